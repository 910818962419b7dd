"""Verify: every byte of a pack against its digests, and the names of the damaged records.

Law: a pack in which a bit has changed is found damaged, whichever file the bit is in; a record whose bytes have changed
is named.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from fourfold.feed.pack import layout
from fourfold.feed.pack.files import LocalPlace, PackFiles
from fourfold.words.errors import DamagedSample, os_error_text
from fourfold.words.noop import noop

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
    for error in _damaged_records(files, number):
        damage.append(f"{error.key}: {error.reason}")
        samples.append(error.sample)
    try:
        got = _digest(path, progress)
    except OSError as error:
        damage.append(f"{path}: {os_error_text(error)}")
        return Verified(info.num_records, info.num_bytes, damage, samples)
    if got != info.digest and not damage:
        damage.append(f"{path}: its xxh3_128 is {got}, not {info.digest} as packed; its records are whole")
    return Verified(info.num_records, info.num_bytes, damage, samples)


class _DamagedRecord(NamedTuple):
    sample: int
    key: str
    reason: str


def _damaged_records(files: PackFiles, shard: int) -> Iterator[_DamagedRecord]:
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
            yield _DamagedRecord(sample, error.key, error.reason)


def _digest(path: Path, progress: Callable[[int], Any]) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()
