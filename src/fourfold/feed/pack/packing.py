"""Packing: the samples of a source to shards, in parallel where the source has numbers.

numbered   a source with `len(source)` and `source[i]`: shards are known ahead, and written in parallel
Law: shards that an earlier packing has finished are not written, nor their samples read, again.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.feed.pack.plan_file import PackingPlan
from fourfold.feed.pack.shard_writer import ShardWriter, WrittenShard, read_note
from fourfold.feed.pack.values import Encoder
from fourfold.feed.pack.zstd import Codec
from fourfold.words.error_notes import error_line
from fourfold.words.errors import DataError, FourfoldError, Problem

Progress = Callable[[int, int], Any]


class Numbered(NamedTuple):
    """A source whose samples can be read in any order; a source's own `pack_sample` reads what is to be stored."""

    source: Any

    def read(self, number: int) -> Any:
        return getattr(self.source, "pack_sample", self.source.__getitem__)(number)

    def key(self, number: int) -> str:
        name = getattr(self.source, "sample_key", None)
        return name(number) if name is not None else f"sample {number}"


def read_sample(numbered: Numbered, number: int) -> Any:
    """What is to be stored of a sample. Raises DataError, with its key, if the source raises."""
    try:
        return numbered.read(number)
    except FourfoldError:
        raise
    except Exception as error:
        raise _unreadable(numbered.key(number), error) from error


def named_errors(samples: Iterator[Any], number: int = 0) -> Iterator[Any]:
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

    def __init__(self, folder: Path, plan: PackingPlan) -> None:
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


def pack_numbered(
    folder: Path, plan: PackingPlan, samples: Numbered, threads: int, progress: Progress
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
                records.add(writer, read_sample(samples, index), samples.key(index))
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


def pack_stream(
    folder: Path, plan: PackingPlan, samples: Iterator[Any], progress: Progress
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
