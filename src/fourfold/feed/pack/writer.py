"""Writer: a source becomes a pack.

note       `shard-00000.note`, written when the shard is on the disk: its entries and its digest
probe      the samples that are read first: they tell schema, alignment, and how many samples a shard has
plan       what was decided when a packing began, so that a later run of it goes on in the same way
numbered   a source with `len(source)` and `source[i]`: shards are known ahead, and written in parallel
packing    the folder `DEST.part` until the pack is whole; then it is renamed to DEST
Law: DEST is a whole pack or does not exist. A packing that is killed at any point goes on where it was, and ends with
the same bytes: shards that are finished are not written, nor their samples read, again. Two runs of a packing have the
same plan, or the second is refused.
Law: a shard with a note is whole; a packing that is killed writes the shards again that have none.
"""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from fourfold.environment.atomic_file import PARTIAL_SUFFIX, fsync_path, write_atomically
from fourfold.feed.pack import layout
from fourfold.feed.pack.layout import ENTRY, ShardInfo, shard_name
from fourfold.feed.pack.schema import Schema, merge, with_variable
from fourfold.feed.pack.values import Encoder, schema_of
from fourfold.feed.pack.zstd import Codec, Compression
from fourfold.words import argument_checks
from fourfold.words.error_notes import error_line
from fourfold.words.errors import DataError, FourfoldError, Problem, os_error_text
from fourfold.words.noop import noop

# ---- shard writer ---------------------------------------------------------------------------------------------------


FLUSH_BYTES, MAX_PARTS = 4 * 2**20, 512  # IOV_MAX is 1024
ZEROS = bytes(2**16)


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A shard that is on the disk. `entries`: the bytes of ENTRY [records]."""

    info: ShardInfo
    max_record_bytes: int
    entries: bytes
    entries_digest: str


class ShardWriter:
    """Writes one shard. `add` each sample, then `commit`; and `close`."""

    def __init__(self, folder: Path, number: int, plan: "_PackingPlan") -> None:
        self._path, self._alignment = folder / shard_name(number), plan.alignment
        self._encoder, self._codec = Encoder(plan.schema), Codec() if plan.compression == "zstd" else None
        self._partial = self._path.with_name(self._path.name + PARTIAL_SUFFIX)
        self._file = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._entries: list[tuple[int, int, int]] = []
        self._max_record_bytes = 0
        self.num_bytes = 0

    def add(self, sample: Any, key: str) -> int:
        """Write a sample's record; how many bytes it takes, as it is stored."""
        parts = [bytes(part) for part in self._encoder.encode(sample, key)]  # a source may use its memory again
        self._max_record_bytes = max(self._max_record_bytes, sum(map(len, parts)))
        if self._codec is not None:
            parts = [self._codec.compress(b"".join(parts))]
        length, hasher = sum(map(len, parts)), xxhash.xxh3_64()
        for part in parts:
            hasher.update(part)
        self._entries.append((self.num_bytes, length, hasher.intdigest()))
        self._pending += parts
        if padding := -length % self._alignment:
            self._pending.append(ZEROS[:padding])
        self.num_bytes += length + padding
        self._num_pending_bytes += length + padding
        if self._num_pending_bytes >= FLUSH_BYTES or len(self._pending) >= MAX_PARTS:
            self._flush()
        return length + padding

    def _flush(self) -> None:
        content = b"".join(self._pending)  # one write: parts are small, or copied faster than written
        self._pending, self._num_pending_bytes = [], 0
        self._digest.update(content)
        view = memoryview(content)
        while view:
            view = view[os.write(self._file, view) :]

    def commit(self) -> Note:
        """The shard, on the disk under its name."""
        self._flush()
        os.fsync(self._file)
        self.close()
        self._partial.replace(self._path)
        info = ShardInfo(len(self._entries), self.num_bytes, self._digest.hexdigest())
        entries = np.array(self._entries, dtype=ENTRY).tobytes()
        note = Note(info, self._max_record_bytes, entries, xxhash.xxh3_128_hexdigest(entries))
        write_atomically(_note_path(self._path), msgspec.msgpack.encode(note), durable=True)
        return note

    def close(self) -> None:
        """Give up the file; without `commit` the shard will be written again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _note_path(path: Path) -> Path:
    """The note of the shard at `path`."""
    return path.with_suffix(".note")


def _read_note(folder: Path, number: int) -> Note | None:
    """A shard that an earlier packing has written; None if it has to be written again."""
    path = folder / shard_name(number)
    try:
        note = msgspec.msgpack.decode(_note_path(path).read_bytes(), type=Note)
        size = path.stat().st_size
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    is_whole = xxhash.xxh3_128_hexdigest(note.entries) == note.entries_digest and size == note.info.num_bytes
    return note if is_whole and len(note.entries) == note.info.num_records * ENTRY.itemsize else None


# ---- the plan of a packing -------------------------------------------------------------------------------------------


PLAN_FILE = "packing.json"


class _PackingPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a source is packed.

    num_samples        None: not known before the source has ended
    samples_per_shard  of all shards but the last; None: a shard ends when it has shard_bytes
    """

    schema: Schema
    alignment: int
    compression: Compression
    shard_bytes: int
    num_samples: int | None
    samples_per_shard: int | None
    source: str
    fingerprint: str

    @property
    def shards(self) -> list[range] | None:
        """The samples of each shard; None: a shard ends when it has shard_bytes."""
        if self.num_samples is None or self.samples_per_shard is None:
            return None
        starts = range(0, self.num_samples, self.samples_per_shard)
        return [range(start, min(start + self.samples_per_shard, self.num_samples)) for start in starts]


def _agree(plan: _PackingPlan, folder: Path) -> _PackingPlan:
    """The plan in the folder of the packing, or this one, which is put there. Raises DataError if they differ."""
    path = folder / PLAN_FILE
    if not path.exists():
        write_atomically(path, msgspec.json.encode(plan), durable=True)
        return plan
    try:
        begun = msgspec.json.decode(path.read_bytes(), type=_PackingPlan)
    except msgspec.MsgspecError as error:
        problem = Problem(f"{path}: {error}", "the plan of a packing", f"rm -r {folder}, to begin again")
        raise DataError(problem) from None
    if problems := [Problem(each, attempt=f"rm -r {folder}, to begin again") for each in _differences(begun, plan)]:
        raise DataError(problems, where=f"{folder}, a packing that was not finished")
    return begun


def _differences(begun: _PackingPlan, plan: _PackingPlan) -> Iterator[str]:
    for name in _PackingPlan.__struct_fields__:
        before, now = getattr(begun, name), getattr(plan, name)
        if before != now and name == "schema":
            before, now = (", ".join(f"{each.name} {each.describe()}" for each in it.fields) for it in (before, now))
        if before != now:
            yield f"{name} = {str(before)[:80]} then, {str(now)[:80]} now"


# ---- samples to shards -----------------------------------------------------------------------------------------------


Progress = Callable[[int, int], Any]


class _Numbered(NamedTuple):
    """A source whose samples can be read in any order; a source's own `pack_sample` reads what is to be stored."""

    source: Any

    def read(self, number: int) -> Any:
        """What is to be stored of a sample. Raises DataError, with its key, if the source raises."""
        try:
            return getattr(self.source, "pack_sample", self.source.__getitem__)(number)
        except FourfoldError:
            raise
        except Exception as error:
            raise _unreadable(self.key(number), error) from error

    def key(self, number: int) -> str:
        name = getattr(self.source, "sample_key", None)
        return name(number) if name is not None else f"sample {number}"


def _named_errors(samples: Iterator[Any]) -> Iterator[Any]:
    """The samples of an iterable. Raises DataError, with the sample, if the iterable raises."""
    number = 0
    try:
        for sample in samples:
            yield sample
            number += 1
    except FourfoldError:
        raise
    except Exception as error:
        raise _unreadable(f"sample {number}", error) from error


def _unreadable(key: str, error: Exception) -> DataError:
    problem = Problem(f"{key}: {error_line(error)}", "a sample that can be read")
    return DataError(problem, where="the source to pack")


class _Packing(NamedTuple):
    """The shards of a plan, in the folder of its packing."""

    folder: Path
    plan: _PackingPlan
    progress: Progress

    def finished(self) -> dict[int, Note]:
        """What an earlier packing has written: of an iterable, the shards before the first that is missing."""
        found, shards = dict[int, Note](), self.plan.shards
        for number in itertools.count() if shards is None else range(len(shards)):
            note = _read_note(self.folder, number)
            if note is not None and (shards is None or note.info.num_records == len(shards[number])):
                found[number] = note
                self.progress(note.info.num_records, note.info.num_bytes)
            elif shards is None:
                break
        return found

    def write_numbered(self, samples: _Numbered, finished: dict[int, Note], threads: int) -> list[Note]:
        """All shards; those that are not finished are written in threads."""
        shards, stopped = self.plan.shards or [], list[bool]()
        missing = [number for number in range(len(shards)) if number not in finished]

        def read(numbers: range) -> Iterator[tuple[str, Any]]:
            for number in numbers:
                if stopped:
                    raise InterruptedError(f"sample {number}")
                yield samples.key(number), samples.read(number)

        with ThreadPoolExecutor(max(1, min(threads, len(missing))), thread_name_prefix="fourfold pack") as pool:
            try:
                written = pool.map(lambda number: self._write_shard(number, read(shards[number])), missing)
                finished |= zip(missing, written, strict=True)
            except BaseException:
                stopped.append(True)
                pool.shutdown(cancel_futures=True)
                raise
        return [finished[number] for number in range(len(shards))]

    def write_stream(self, samples: Iterator[Any], finished: dict[int, Note]) -> list[Note]:
        """All shards, of which the samples of the finished ones are skipped."""
        shards = list(finished.values())
        count = sum(shard.info.num_records for shard in shards)
        if (skipped := sum(1 for _ in itertools.islice(samples, count))) < count:
            need = f"the {count} that have been packed already, and the rest"
            raise DataError(Problem(f"{skipped} samples", need), where="the source to pack")
        rest = ((f"sample {number}", sample) for number, sample in enumerate(samples, count))
        for first in rest:
            shards.append(self._write_shard(len(shards), itertools.chain([first], rest)))
        return shards

    def _write_shard(self, number: int, samples: Iterable[tuple[str, Any]]) -> Note:
        """A shard of these samples with their keys; of a stream, until it has the bytes of one."""
        writer = ShardWriter(self.folder, number, self.plan)
        try:
            for key, sample in samples:
                self.progress(1, writer.add(sample, key))
                if self.plan.samples_per_shard is None and writer.num_bytes >= self.plan.shard_bytes:
                    break
            return writer.commit()
        finally:
            writer.close()


# ---- the pack --------------------------------------------------------------------------------------------------------


PACKING_SUFFIX, LOCK_FILE = ".part", ".lock"
SHARD_BYTES = 256 * 2**20
NUM_PROBED = 64


class Packed(NamedTuple):
    """A pack that has been written. `num_resumed`: samples that an earlier packing had written."""

    path: Path
    num_samples: int
    num_bytes: int
    num_shards: int
    num_resumed: int


def pack(
    source: Any,
    dest: str | os.PathLike[str],
    *,
    shard_bytes: int = SHARD_BYTES,
    threads: int | None = None,
    compression: Compression = "none",
    variable: Sequence[str] = (),
    progress: Progress = noop,
) -> Packed:
    """Write the samples of a source into a new pack at `dest`.

    source     a source (`len(source)`, `source[i]`), or any iterable of samples: pairs (inputs, targets) or dicts of
               tensors, arrays, numbers, text and bytes
    threads    that read a source and write shards; None: one for each core. An iterable has one
    variable   names of arrays whose shapes differ, where the first samples do not show it
    progress   called with (samples, bytes) that have been packed since the last call, from any thread

    If an earlier call was killed, the same call goes on where it was. Raises DataError for a source that is empty or
    changes its schema, with the sample; and if something else is at `dest`, or another process is packing there.
    """
    if problems := argument_checks.str_problems("dest", dest, path=True):
        raise DataError(problems, where="the pack")
    path = Path(os.path.abspath(dest))
    _check_arguments(path, shard_bytes, threads, compression)
    folder = path.with_name(path.name + PACKING_SUFFIX)
    try:
        with _locked(folder, path):
            probed, samples = _probe(source)
            schema = with_variable(_schema_of(source, probed), variable)
            num_samples = len(source) if isinstance(samples, _Numbered) else None
            plan = _agree(_make_plan(source, schema, probed, num_samples, (shard_bytes, compression)), folder)
            packing = _Packing(folder, plan, progress)
            finished = packing.finished()
            num_resumed = sum(shard.info.num_records for shard in finished.values())
            if isinstance(samples, _Numbered):
                shards = packing.write_numbered(samples, finished, threads or os.cpu_count() or 1)
            else:
                shards = packing.write_stream(samples, finished)
            manifest = _finish(folder, path, plan, shards)
    except OSError as error:
        attempt = "the same command again once that is resolved: it goes on where it was"
        raise DataError(Problem(f"{folder}: {os_error_text(error)}", "room for the pack", attempt)) from error
    return Packed(path, manifest.num_records, manifest.num_bytes, len(manifest.shards), num_resumed)


def _check_arguments(path: Path, shard_bytes: int, threads: int | None, compression: str) -> None:
    problems = []
    if os.path.lexists(path):
        problems.append(Problem(f"something at {path}", "a path without anything", "another path"))
    if not 1 <= shard_bytes <= layout.MAX_SHARD_BYTES:
        problems.append(Problem(f"shard_bytes = {shard_bytes}", "1 or more", "shard_bytes=256MiB"))
    if threads is not None and threads < 1:
        problems.append(Problem(f"threads = {threads}", "1 or more"))
    if compression not in ("none", "zstd"):
        problems.append(Problem(f"compression = {compression}", "none or zstd"))
    if problems:
        raise DataError(problems, where="the pack")


@contextlib.contextmanager
def _locked(folder: Path, path: Path) -> Iterator[None]:
    """The folder of a packing, for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = Problem(f"{folder} is written by another process", "one at a time", "when that has ended")
            raise DataError(problem, where="the pack") from None
        if os.path.lexists(path):  # finished by another process in the meantime
            raise DataError(Problem(f"something at {path}", "a path without anything"), where="the pack")
        yield
    finally:
        os.close(lock)


def _probe(source: Any) -> tuple[dict[str, Any], _Numbered | Iterator[Any]]:
    """Some samples by their keys, and all of them."""
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, dict | str | bytes):
        length, numbered = len(source), _Numbered(source)
        numbers = sorted({index * length // NUM_PROBED for index in range(NUM_PROBED)}) if length else []
        probed = {numbered.key(number): numbered.read(number) for number in numbers}
        samples: _Numbered | Iterator[Any] = numbered
    elif isinstance(source, Iterable) and not isinstance(source, dict | str | bytes):
        rest = _named_errors(iter(source))
        first = list(itertools.islice(rest, NUM_PROBED))
        probed = {f"sample {number}": sample for number, sample in enumerate(first)}
        samples = itertools.chain(first, rest)
    else:
        need = "len(source) and source[i], or an iterable of samples"
        raise DataError(Problem(f"a {type(source).__name__}", need), where="the source to pack")
    if not probed:
        problem = Problem(f"no samples in {_name_of(source)}", "at least one")
        raise DataError(problem, where="the source to pack")
    return probed, samples


def _schema_of(source: Any, probed: dict[str, Any]) -> Schema:
    schema = merge([schema_of(sample, key) for key, sample in probed.items()], list(probed))
    classes = getattr(source, "classes", None)
    if not isinstance(classes, Sequence) or isinstance(classes, str) or not schema.is_pair:
        return schema
    names = tuple(map(str, classes))
    fields = [replace(each, classes=names) if each.path == ("targets",) else each for each in schema.fields]
    return Schema(tuple(fields), is_pair=True)


def _make_plan(
    source: Any, schema: Schema, probed: dict[str, Any], num_samples: int | None, options: tuple[int, Compression]
) -> _PackingPlan:
    (shard_bytes, compression), encoder = options, Encoder(schema)
    # By a digest of some samples and of how many there are, a packing that goes on knows its source again.
    digest, num_bytes = xxhash.xxh3_128(str(num_samples).encode()), 0
    for key, sample in probed.items():
        for part in encoder.encode(sample, key):
            digest.update(part)
            num_bytes += len(part)
    mean = num_bytes / len(probed)
    alignment = layout.alignment_for(mean)
    stored = max(1.0, mean + alignment / 2 if schema.record_bytes is None else mean + -mean % alignment)
    return _PackingPlan(
        schema=schema,
        alignment=alignment,
        compression=compression,
        shard_bytes=shard_bytes,
        num_samples=num_samples,
        samples_per_shard=max(1, int(shard_bytes / stored)) if num_samples is not None else None,
        source=_name_of(source),
        fingerprint=digest.hexdigest(),
    )


def _name_of(source: Any) -> str:
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else type(source).__name__


def _finish(folder: Path, path: Path, plan: _PackingPlan, shards: Sequence[Note]) -> layout.Manifest:
    """Write index and manifest, and make the folder of the packing the pack at `path`."""
    digest = xxhash.xxh3_128()
    index = folder / layout.INDEX_FILE
    with index.open("wb") as file:
        for shard in shards:
            digest.update(shard.entries)
            file.write(shard.entries)
    fsync_path(index)
    manifest = layout.Manifest(
        version=layout.VERSION,
        schema=plan.schema,
        alignment=plan.alignment,
        compression=plan.compression,
        max_record_bytes=max(shard.max_record_bytes for shard in shards),
        index_digest=digest.hexdigest(),
        shards=tuple(shard.info for shard in shards),
        source=plan.source,
        fingerprint=plan.fingerprint,
    )
    write_atomically(folder / layout.MANIFEST_FILE, layout.encode_manifest(manifest), durable=True)
    names = {layout.MANIFEST_FILE, layout.INDEX_FILE, *map(shard_name, range(len(shards)))}
    for each in folder.iterdir():
        if each.name not in names:
            each.unlink()
    fsync_path(folder)
    folder.rename(path)
    fsync_path(path.parent)
    return manifest
