"""Verify: every byte of a pack against its digests, and the names of the damaged records.

Law: a pack in which a bit has changed is found damaged, whichever file the bit is in; a record whose bytes have changed
is named.

label  the field whose balance is shown: an integer called targets, or label
Law: what is shown of samples has been checked, as what a feed reads; labels are read of at most MAX_LABELS samples, of
LABEL_BYTES in all.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from torch import Tensor

from fourfold.feed.pack import layout
from fourfold.feed.pack.files import LocalPlace, PackFiles
from fourfold.feed.pack.reader import Pack
from fourfold.feed.pack.schema import Field, leaves
from fourfold.words.errors import DamagedSample, FourfoldError, os_error_text
from fourfold.words.noop import noop
from fourfold.words.units import format_bytes

CHUNK_BYTES = 4 * 2**20


class Verified(NamedTuple):
    """What was read, and what is damaged: a text each, with the file and the record."""

    num_records: int
    num_bytes: int
    damage: list[str]
    damaged_samples: list[int]


def verify_pack(
    path: str | os.PathLike[str], *, threads: int | None = None, progress: Callable[[int], Any] = noop
) -> Verified:
    """Check every file and every record of a pack. `progress(bytes)` is called from any thread.

    Raises DataError if the manifest is damaged, or a file is missing or not as long as it was.
    """
    files = PackFiles(LocalPlace(path))
    manifest = files.manifest
    damage, samples = [], []
    index = Path(files.name) / layout.INDEX_FILE
    if (got := _digest(index, noop)) != manifest.index_digest:
        damage.append(f"{index}: its xxh3_128 is {got}, not {manifest.index_digest} as packed")
    with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="fourfold verify") as pool:
        numbers = range(len(manifest.shards))
        for found in pool.map(lambda number: _verify_shard(files, number, progress), numbers):
            damage += found.damage
            samples += found.damaged_samples
    return Verified(manifest.num_records, manifest.num_bytes, damage, samples)


def _verify_shard(files: PackFiles, number: int, progress: Callable[[int], Any]) -> Verified:
    info, path = files.manifest.shards[number], Path(files.name) / layout.shard_name(number)
    damage, samples = [], []
    for sample, text in _damaged_records(files, number):
        samples.append(sample)
        damage.append(text)
    try:
        got = _digest(path, progress)
    except OSError as error:
        damage.append(f"{path}: {os_error_text(error)}")
        return Verified(info.num_records, info.num_bytes, damage, samples)
    if got != info.digest and not damage:
        damage.append(f"{path}: its xxh3_128 is {got}, not {info.digest} as packed; its records are whole")
    return Verified(info.num_records, info.num_bytes, damage, samples)


def _damaged_records(files: PackFiles, shard: int) -> Iterator[tuple[int, str]]:
    stop = int(files.ends[shard])
    start = stop - files.manifest.shards[shard].num_records
    buffer = np.empty(0, dtype=np.uint8)
    for sample in range(start, stop):
        try:
            (record,) = files.records([sample])
            if len(buffer) < record.length:
                buffer = np.empty(record.length, dtype=np.uint8)
            files.read(record, [buffer.data[: record.length]])
        except DamagedSample as error:
            yield sample, f"{error.key}: {error.reason}"


def _digest(path: Path, progress: Callable[[int], Any]) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


# ---- Show: what is in a pack, for people ----------------------------------------------------------------------------

MAX_LABELS, LABEL_BYTES, NUM_SHOWN, MAX_CLASSES = 20_000, 2**32, 5, 10_000
LABELS = (("targets",), ("label",), ("labels",))


class Shown(NamedTuple):
    """Texts about a pack. `classes`: how many samples have each label, or cannot be read; empty if there is none."""

    facts: dict[str, str]
    fields: list[tuple[str, ...]]
    samples: list[tuple[str, ...]]
    label: str
    classes: dict[str, int]


def describe_pack(path: str | os.PathLike[str]) -> Shown:
    """What a pack holds. Raises DataError if there is none."""
    files, pack = PackFiles(LocalPlace(path)), Pack(path, threads=1, images=False)
    manifest = files.manifest
    lengths = files.index["length"]
    spread = [format_bytes(float(value)) for value in np.quantile(lengths, (0, 0.5, 1), method="nearest")]
    counts = pack.shard_sizes
    facts = {
        "pack": files.name,
        "of": manifest.source,
        "samples": str(manifest.num_records),
        "bytes": f"{format_bytes(manifest.num_bytes)}, compression {manifest.compression}",
        "record": f"{spread[1]}, from {spread[0]} to {spread[2]}; at multiples of {manifest.alignment} B",
        "shards": f"{len(counts)}, of {min(counts)} to {max(counts)} samples",
    }
    fields = [
        (each.name, each.describe(), f"{len(each.classes)} classes" if each.classes else "")
        for each in manifest.schema.fields
    ]
    samples = [_row(pack, number) for number in range(min(NUM_SHOWN, len(pack)))]
    label = next((each for each in manifest.schema.fields if each.path in LABELS and _is_label(each)), None)
    classes = _count_labels(pack, label, lengths) if label is not None and manifest.compression == "none" else {}
    return Shown(facts, fields, samples, "" if label is None else label.name, classes)


def _is_label(field: Field) -> bool:
    return field.kind == "int" or (field.dtype in ("int64", "int32", "uint8") and field.shape == ())


def _row(pack: Pack, number: int) -> tuple[str, ...]:
    try:
        return (str(number), *(_text(value) for _, value in leaves(pack[number])))
    except FourfoldError as error:
        return (str(number), str(error.problems[0].got), *[""] * (len(pack.schema.fields) - 1))


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        numbers = value.reshape(-1)[:4].tolist()
        more = ", …" if value.numel() > len(numbers) else ""
        return f"[{', '.join(f'{number:.4g}' for number in numbers)}{more}]" if value.dim() else str(value.item())
    if isinstance(value, bytes):
        return format_bytes(len(value))
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:39] + "…"


def _count_labels(pack: Pack, field: Field, lengths: np.ndarray) -> dict[str, int]:
    """How many samples have each label, of some spread evenly where there are many."""
    count = min(len(pack), MAX_LABELS, 1 + int(LABEL_BYTES / lengths.mean(dtype=float)))
    found, unreadable = Counter[int](), 0
    for number in (np.arange(count) * len(pack) // count).tolist():
        try:
            found[int(dict(leaves(pack[number]))[field.path])] += 1
        except FourfoldError:
            unreadable += 1
    if len(found) > MAX_CLASSES:
        return {}
    names = field.classes
    return {
        f"{label} {names[label]}" if 0 <= label < len(names) else str(label): count
        for label, count in sorted(found.items())
    } | ({"unreadable": unreadable} if unreadable else {})
