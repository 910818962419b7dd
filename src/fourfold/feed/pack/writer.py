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

from fourfold.environment.atomic_file import PARTIAL_SUFFIX, fsync_path, write_atomically
from fourfold.feed.pack import layout
from fourfold.feed.pack.layout import ENTRY, ShardInfo, shard_name
from fourfold.feed.pack.schema import Schema, merge, with_variable
from fourfold.feed.pack.values import Encoder, Part, schema_of
from fourfold.feed.pack.zstd import Codec, Compression
from fourfold.words import argument_checks
from fourfold.words.error_notes import error_line
from fourfold.words.errors import DataError, FourfoldError, Problem, os_error_text
from fourfold.words.noop import noop

# ---- shard writer ---------------------------------------------------------------------------------------------------


FLUSH_BYTES, MAX_PARTS = 4 * 2**20, 512  # IOV_MAX is 1024
ZEROS = bytes(2**16)


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a shard is."""

    info: ShardInfo
    max_record_bytes: int
    entries: bytes
    entries_digest: str


class WrittenShard(NamedTuple):
    """A shard that is on the disk: ENTRY [records]."""

    info: ShardInfo
    max_record_bytes: int
    entries: np.ndarray


class ShardWriter:
    """Writes one shard. `add` each record, then `commit`; or `abandon`."""

    def __init__(self, folder: Path, number: int, alignment: int) -> None:
        self._path, self._alignment = folder / shard_name(number), alignment
        self._partial = self._path.with_name(self._path.name + PARTIAL_SUFFIX)
        self._file = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._entries: list[tuple[int, int, int]] = []
        self._max_record_bytes = 0
        self.num_bytes = 0

    @property
    def num_records(self) -> int:
        return len(self._entries)

    def add(self, parts: Sequence[Part], record_bytes: int) -> None:
        """Write a record, as it is stored. `record_bytes`: its length before compression."""
        parts = [bytes(part) for part in parts]  # a source may reuse the memory of its samples
        if len(parts) == 1:
            digest = xxhash.xxh3_64_intdigest(parts[0])
        else:
            hasher = xxhash.xxh3_64()
            for part in parts:
                hasher.update(part)
            digest = hasher.intdigest()
        length = sum(map(len, parts))
        self._entries.append((self.num_bytes, length, digest))
        self._max_record_bytes = max(self._max_record_bytes, record_bytes)
        self._pending += parts
        if padding := -length % self._alignment:
            self._pending.append(ZEROS[:padding])
        self.num_bytes += length + padding
        self._num_pending_bytes += length + padding
        if self._num_pending_bytes >= FLUSH_BYTES or len(self._pending) >= MAX_PARTS:
            self._flush()

    def _flush(self) -> None:
        content = b"".join(self._pending)  # one write: parts are small, or copied faster than written
        self._pending, self._num_pending_bytes = [], 0
        self._digest.update(content)
        view = memoryview(content)
        while view:
            view = view[os.write(self._file, view) :]

    def commit(self) -> WrittenShard:
        """The shard, on the disk under its name."""
        self._flush()
        os.fsync(self._file)
        self.close()
        self._partial.replace(self._path)
        info = ShardInfo(len(self._entries), self.num_bytes, self._digest.hexdigest())
        entries = np.array(self._entries, dtype=ENTRY)
        content = entries.tobytes()
        note = Note(info, self._max_record_bytes, content, xxhash.xxh3_128_hexdigest(content))
        write_atomically(note_path(self._path), msgspec.msgpack.encode(note), durable=True)
        return WrittenShard(info, self._max_record_bytes, entries)

    def close(self) -> None:
        """Give up the file; without `commit` the shard will be written again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def note_path(path: Path) -> Path:
    """The note of the shard at `path`."""
    return path.with_suffix(".note")


def read_note(folder: Path, number: int) -> WrittenShard | None:
    """A shard that an earlier packing has written; None if it has to be written again."""
    path = folder / shard_name(number)
    try:
        note = msgspec.msgpack.decode(note_path(path).read_bytes(), type=Note)
        size = path.stat().st_size
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    is_whole = xxhash.xxh3_128_hexdigest(note.entries) == note.entries_digest and size == note.info.num_bytes
    if not is_whole or len(note.entries) != note.info.num_records * ENTRY.itemsize:
        return None
    return WrittenShard(note.info, note.max_record_bytes, np.frombuffer(note.entries, dtype=ENTRY))


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
    def num_shards(self) -> int:
        """With samples_per_shard."""
        assert self.num_samples is not None
        assert self.samples_per_shard is not None
        return -(-self.num_samples // self.samples_per_shard)

    def samples_of(self, shard: int) -> range:
        assert self.num_samples is not None
        assert self.samples_per_shard is not None
        start = shard * self.samples_per_shard
        return range(start, min(start + self.samples_per_shard, self.num_samples))


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


def _fingerprint_of(samples: Sequence[Any], schema: Schema, num_samples: int | None) -> str:
    """A digest of some samples and of how many there are: by it a packing that goes on knows its source again."""
    digest, encoder = xxhash.xxh3_128(str(num_samples).encode()), Encoder(schema)
    for number, sample in enumerate(samples):
        for part in encoder.encode(sample, f"sample {number}"):
            digest.update(part)
    return digest.hexdigest()


# ---- samples to shards -----------------------------------------------------------------------------------------------


Progress = Callable[[int, int], Any]


class _Numbered(NamedTuple):
    """A source whose samples can be read in any order; a source's own `pack_sample` reads what is to be stored."""

    source: Any

    def read(self, number: int) -> Any:
        return getattr(self.source, "pack_sample", self.source.__getitem__)(number)

    def key(self, number: int) -> str:
        name = getattr(self.source, "sample_key", None)
        return name(number) if name is not None else f"sample {number}"


def _read_sample(numbered: _Numbered, number: int) -> Any:
    """What is to be stored of a sample. Raises DataError, with its key, if the source raises."""
    try:
        return numbered.read(number)
    except FourfoldError:
        raise
    except Exception as error:
        raise _unreadable(numbered.key(number), error) from error


def _named_errors(samples: Iterator[Any], number: int = 0) -> Iterator[Any]:
    """The samples of an iterable; `number`: of the first. Raises DataError, with the sample, if the iterable raises."""
    while True:
        try:
            sample = next(samples)
        except StopIteration:
            return
        except FourfoldError:
            raise
        except Exception as error:
            raise _unreadable(f"sample {number}", error) from error
        yield sample
        number += 1


def _unreadable(key: str, error: Exception) -> DataError:
    problem = Problem(f"{key}: {error_line(error)}", "a sample that can be read")
    return DataError(problem, where="the source to pack")


class _RecordWriter:
    """Samples to the records of shards."""

    def __init__(self, folder: Path, plan: _PackingPlan) -> None:
        self._folder, self._plan, self._encoder = folder, plan, Encoder(plan.schema)
        self._codec = Codec() if plan.compression == "zstd" else None

    def open(self, number: int) -> ShardWriter:
        return ShardWriter(self._folder, number, self._plan.alignment)

    def add(self, writer: ShardWriter, sample: Any, key: str) -> None:
        parts = self._encoder.encode(sample, key)
        record_bytes = sum(map(len, parts))
        if self._codec is not None:
            parts = [self._codec.compress(b"".join(parts))]
        writer.add(parts, record_bytes)


def _pack_numbered(
    folder: Path, plan: _PackingPlan, samples: _Numbered, threads: int, progress: Progress
) -> tuple[list[WrittenShard], int]:
    records, resumed = _RecordWriter(folder, plan), 0
    stopped: list[bool] = []

    def write(number: int) -> WrittenShard:
        writer = records.open(number)
        try:
            before = 0
            for index in plan.samples_of(number):
                if stopped:
                    raise InterruptedError(f"shard {number}")
                records.add(writer, _read_sample(samples, index), samples.key(index))
                progress(1, writer.num_bytes - before)
                before = writer.num_bytes
            return writer.commit()
        finally:
            writer.close()

    shards: dict[int, WrittenShard] = {}
    for number in range(plan.num_shards):
        found = read_note(folder, number)
        if found is not None and found.info.num_records == len(plan.samples_of(number)):
            shards[number] = found
            resumed += found.info.num_records
            progress(found.info.num_records, found.info.num_bytes)
    missing = [number for number in range(plan.num_shards) if number not in shards]
    with ThreadPoolExecutor(max(1, min(threads, len(missing))), thread_name_prefix="fourfold pack") as pool:
        try:
            shards |= zip(missing, pool.map(write, missing), strict=True)
        except BaseException:
            stopped.append(True)
            pool.shutdown(cancel_futures=True)
            raise
    return [shards[number] for number in range(plan.num_shards)], resumed


def _pack_stream(
    folder: Path, plan: _PackingPlan, samples: Iterator[Any], progress: Progress
) -> tuple[list[WrittenShard], int]:
    shards: list[WrittenShard] = []
    while (found := read_note(folder, len(shards))) is not None:
        shards.append(found)
        progress(found.info.num_records, found.info.num_bytes)
    resumed = sum(shard.info.num_records for shard in shards)
    number, records = resumed, _RecordWriter(folder, plan)
    rest = iter(_skipped(samples, resumed))
    while (sample := next(rest, _END)) is not _END:
        writer = records.open(len(shards))
        try:
            while sample is not _END:
                before = writer.num_bytes
                records.add(writer, sample, f"sample {number}")
                progress(1, writer.num_bytes - before)
                number += 1
                if writer.num_bytes >= plan.shard_bytes:
                    break
                sample = next(rest, _END)
            shards.append(writer.commit())
        finally:
            writer.close()
    return shards, resumed


_END = object()


def _skipped(samples: Iterator[Any], count: int) -> Iterator[Any]:
    """The samples after the first `count`. Raises DataError if there are fewer."""
    skipped = sum(1 for _ in itertools.islice(samples, count))
    if skipped < count:
        need = f"the {count} that have been packed already, and the rest"
        raise DataError(Problem(f"{skipped} samples", need), where="the source to pack")
    return samples


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
            done = _pack_into(folder, source, (shard_bytes, threads, compression, tuple(variable)), progress)
            for each in folder.iterdir():
                if each.name not in done.names:
                    each.unlink()
            fsync_path(folder)
            folder.rename(path)
            fsync_path(path.parent)
    except OSError as error:
        attempt = "the same command again once that is resolved: it goes on where it was"
        raise DataError(Problem(f"{folder}: {os_error_text(error)}", "room for the pack", attempt)) from error
    manifest = done.manifest
    return Packed(path, manifest.num_records, manifest.num_bytes, len(manifest.shards), done.num_resumed)


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


class _Done(NamedTuple):
    manifest: layout.Manifest
    num_resumed: int

    @property
    def names(self) -> set[str]:
        """The files of the pack."""
        shards = {layout.shard_name(number) for number in range(len(self.manifest.shards))}
        return shards | {layout.MANIFEST_FILE, layout.INDEX_FILE}


def _pack_into(
    folder: Path, source: Any, options: tuple[int, int | None, Compression, Sequence[str]], progress: Progress
) -> _Done:
    shard_bytes, threads, compression, variable = options
    probed, samples = _probe(source)
    is_numbered = isinstance(samples, _Numbered)
    schema = with_variable(_schema_of(source, probed), variable)
    plan = _agree(_make_plan(source, schema, probed, is_numbered, (shard_bytes, compression)), folder)
    if isinstance(samples, _Numbered):
        shards, num_resumed = _pack_numbered(folder, plan, samples, threads or os.cpu_count() or 1, progress)
    else:
        shards, num_resumed = _pack_stream(folder, plan, samples, progress)
    return _Done(_finish(folder, plan, shards), num_resumed)


def _probe(source: Any) -> tuple[dict[str, Any], _Numbered | Iterator[Any]]:
    """Some samples by their keys, and all of them."""
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, dict | str | bytes):
        length, numbered = len(source), _Numbered(source)
        numbers = sorted({index * length // NUM_PROBED for index in range(NUM_PROBED)}) if length else []
        probed = {numbered.key(number): _read_sample(numbered, number) for number in numbers}
        samples: _Numbered | Iterator[Any] = numbered
    elif isinstance(source, Iterable) and not isinstance(source, dict | str | bytes):
        rest = iter(source)
        first = list(itertools.islice(_named_errors(rest), NUM_PROBED))
        probed = {f"sample {number}": sample for number, sample in enumerate(first)}
        samples = itertools.chain(first, _named_errors(rest, len(first)))
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
    from fourfold.feed.pack.schema import Field

    names = tuple(map(str, classes))
    fields = [
        Field(each.path, each.kind, each.dtype, each.shape, names) if each.path == ("targets",) else each
        for each in schema.fields
    ]
    return Schema(tuple(fields), is_pair=True)


def _make_plan(
    source: Any, schema: Schema, probed: dict[str, Any], is_numbered: bool, options: tuple[int, Compression]
) -> _PackingPlan:
    encoder, (shard_bytes, compression) = Encoder(schema), options
    sizes = [sum(map(len, encoder.encode(sample, key))) for key, sample in probed.items()]
    mean = sum(sizes) / len(sizes)
    alignment = layout.alignment_for(mean)
    num_samples = len(source) if is_numbered else None
    stored = max(1.0, mean + alignment / 2 if schema.record_bytes is None else mean + -mean % alignment)
    return _PackingPlan(
        schema=schema,
        alignment=alignment,
        compression=compression,
        shard_bytes=shard_bytes,
        num_samples=num_samples,
        samples_per_shard=max(1, int(shard_bytes / stored)) if is_numbered else None,
        source=_name_of(source),
        fingerprint=_fingerprint_of(list(probed.values()), schema, num_samples),
    )


def _name_of(source: Any) -> str:
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else type(source).__name__


def _finish(folder: Path, plan: _PackingPlan, shards: Sequence[WrittenShard]) -> layout.Manifest:
    """Write index and manifest."""
    digest = xxhash.xxh3_128()
    index = folder / layout.INDEX_FILE
    with index.open("wb") as file:
        for shard in shards:
            content = np.ascontiguousarray(shard.entries).tobytes()
            digest.update(content)
            file.write(content)
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
    return manifest
