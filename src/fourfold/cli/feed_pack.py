"""`fourfold feed pack`, `verify` and `show`: their words, their progress, and what they print.

Law: an unknown word or value is an error that names the closest one, before anything is written.
"""

import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.cli.output import print_text
from fourfold.environment.python_source import closest_if_missing
from fourfold.feed.pack.layout import read_manifest
from fourfold.words.errors import DataError, Problem, SettingError
from fourfold.words.field import Field, read_words
from fourfold.words.terminal_text import table_lines
from fourfold.words.units import Dimension, format_bytes, format_bytes_per_second, format_count

WHERE = "fourfold feed pack"
MIB = 2**20
MAX_NAMED, MAX_CLASSES_SHOWN = 100, 20


COUNT, NAME = Field(type=int, minimum=1), Field(type=str)
WORDS = {
    "shard_bytes": Field(dimension=Dimension.BYTES),
    "threads": COUNT,
    "compression": Field(type=str, choices=("none", "zstd")),
    "variable": NAME,
    "columns": NAME,
    "target": NAME,
    "dtype": NAME,
    "rows": Field(type=bool),
    "row_tokens": COUNT,
}
LISTS = ("variable", "columns")
READING = ("columns", "target", "rows", "dtype")  # what is read of files; the others say how the pack is written


def parse_words(words: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    """Source, destination, and the values of the words. Raises SettingError with all problems."""
    # A folder may be called year=2026.
    words = [os.path.join(os.curdir, word) if "=" in word and os.path.exists(word) else word for word in words]
    paths, values, problems = read_words(words, WORDS, lists=LISTS)
    if len(paths) != 2:
        need = "a source and the folder of the pack"
        problems.append(Problem(" and ".join(paths) or "no source", need, f"{WHERE} images/ images.pack"))
    if problems:
        raise SettingError(problems, where=WHERE)
    if "shard_bytes" in values:
        values["shard_bytes"] = math.ceil(values["shard_bytes"])
    return paths[0], paths[1], values


def run_pack(words: Sequence[str]) -> int:
    """`fourfold feed pack`; returns the exit code."""
    source_name, dest, values = parse_words(words)
    source = open_source(source_name, {word: values.pop(word) for word in READING if word in values})
    from fourfold.feed.pack.writer import SHARD_BYTES, pack

    if row_tokens := values.pop("row_tokens", None):
        source = _token_rows(source, row_tokens)
    if command := stripe_command(dest, values.get("shard_bytes", SHARD_BYTES)):
        print_text(f"on Lustre, before packing: {command}")
    total = len(source) if hasattr(source, "__len__") else None
    began = time.perf_counter()
    with _progress("packing", "samples", total) as advance:
        packed = pack(source, dest, progress=lambda samples, num_bytes: advance(samples), **values)
    seconds = time.perf_counter() - began
    resumed = f", {format_count(packed.num_resumed)} of them by an earlier run" if packed.num_resumed else ""
    shards = "1 shard" if packed.num_shards == 1 else f"{packed.num_shards} shards"
    rate = format_bytes_per_second(packed.num_bytes / seconds)
    size = format_bytes(packed.num_bytes)
    print_text(
        f"packed {format_count(packed.num_samples)} samples{resumed}: {size} in {shards}, {seconds:.1f} s, {rate}"
    )
    if row_tokens:
        print_text(_padding_text(source))
    return 0


def _token_rows(source: Any, length: int) -> Any:
    from fourfold.feed.token_rows import TokenRows

    return TokenRows(source, length)


def _padding_text(rows: Any) -> str:
    padding = rows.num_padding / (rows.num_tokens + rows.num_padding)
    short = f"; {rows.num_short} documents of fewer than two tokens left out" if rows.num_short else ""
    return f"rows of {rows.length}: {format_count(rows.num_tokens)} tokens with a target, {padding:.1%} padding{short}"


def open_source(name: str, reading: Mapping[str, Any]) -> Any:
    """The source at a path, or in FILE.py:NAME. Raises DataError if there is none."""
    file, _, member = name.partition(":")
    if file.endswith(".py"):
        if reading:
            raise SettingError([Problem(f"{word}= for {name}", f"no {word}=") for word in reading], where=WHERE)
        return _source_in_file(Path(file), member)
    from fourfold.feed.formats.listing import find_files

    find_files(Path(name).expanduser())  # which says what is not there before torch is imported
    from fourfold.feed.formats import open as formats

    return formats.open_source(name, images=False, **reading)  # images go into a pack as their files are


def _source_in_file(path: Path, name: str) -> Any:
    from fourfold.cli import task_loader

    task_loader.check_python_file(str(path), DataError, "a Python file")
    close = closest_if_missing(path, name)
    member = getattr(task_loader.import_file(path), name, None) if close is None else None
    if member is None:
        attempt = f"{path}:{close or 'samples'}"
        raise DataError(Problem(f"{path}:{name}", "the name of a source in the file", attempt), where=WHERE)
    if callable(member) and not hasattr(member, "__getitem__") and not hasattr(member, "__iter__"):
        with task_loader.wrap_user_errors(f"{path}:{name} failed", DataError):
            return member()
    return member


def stripe_command(dest: str, shard_bytes: int) -> str | None:
    """Lustre's command that sets how the files of a folder are striped; None where Lustre's tools are not installed."""
    if shutil.which("lfs") is None:
        return None
    # As Lustre's wiki says for one client per file: 1 below 1 MiB, 4 up to 1 GiB, 8 above.
    count = 1 if shard_bytes < MIB else 4 if shard_bytes <= 1024 * MIB else 8
    return f"mkdir -p {dest}.part && lfs setstripe -c {count} -S 4M {dest}.part"


def run_verify(path: str, threads: int | None) -> int:
    """`fourfold feed verify`; returns the exit code: 1 if something is damaged."""
    read_manifest(Path(path).absolute())  # before torch is imported
    from fourfold.feed.pack.verify import verify_pack

    began = time.perf_counter()
    with _progress("verifying", "bytes", None) as advance:
        verified = verify_pack(path, threads=threads, progress=advance)
    rate = format_bytes_per_second(verified.num_bytes / (time.perf_counter() - began))
    for text in verified.damage[:MAX_NAMED]:
        print_text(f"damaged: {text}")
    if len(verified.damage) > MAX_NAMED:
        print_text(f"and {len(verified.damage) - MAX_NAMED} more")
    what = f"{format_count(verified.num_records)} records, {format_bytes(verified.num_bytes)}, {rate}"
    count = len(verified.damaged_samples)
    print_text(f"{what}: {f'{count} records damaged' if count else 'DAMAGED' if verified.damage else 'whole'}")
    return 1 if verified.damage else 0


def run_show(path: str) -> int:
    """`fourfold feed show`; returns the exit code."""
    read_manifest(Path(path).absolute())  # before torch is imported
    from fourfold.feed.pack.verify import describe_pack

    shown = describe_pack(path)
    for line in table_lines([(name, text) for name, text in shown.facts.items()], "<<", gap="   "):
        print_text(line)
    for title, rows in (("fields", shown.fields), ("first samples", shown.samples)):
        print_text(f"\n{title}")
        for line in table_lines(rows, "<" * len(rows[0]), gap="   "):
            print_text(f"  {line}")
    if shown.classes:
        print_text(f"\n{shown.label}, of {format_count(sum(shown.classes.values()))} samples")
        total = sum(shown.classes.values())
        most = sorted(shown.classes.items(), key=lambda each: (each[0] != "unreadable", -each[1]))
        rows = [(name, str(count), f"{100 * count / total:.1f} %") for name, count in most[:MAX_CLASSES_SHOWN]]
        for line in table_lines(rows, "<>>", gap="   "):
            print_text(f"  {line}")
        if len(most) > MAX_CLASSES_SHOWN:
            print_text(f"  and {len(most) - MAX_CLASSES_SHOWN} more, the smallest with {most[-1][1]}")
    return 0


@contextlib.contextmanager
def _progress(what: str, unit: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; elsewhere nothing. It may be advanced from any thread."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    count_column = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = ("{task.description}", BarColumn(), count_column, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bar:
        task, lock, pending = bar.add_task(what, total=total), threading.Lock(), [0, time.monotonic()]

        def advance(count: int) -> None:
            with lock:  # rich is asked now and then: each call would cost as much as a small sample
                pending[0] += count
                now = time.monotonic()
                if now - pending[1] < 0.1:
                    return
                pending[0], pending[1], count = 0, now, int(pending[0])
            bar.advance(task, count)

        yield advance
