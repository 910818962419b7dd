"""Open: the source of what is at a path.

kind   the format of a file: by its name, else by its first bytes
Law: what is opened follows from what is there alone. Files of several kinds, or of none that is known, are an error.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.feed.formats import arrow, file_samples, lines, mds, megatron
from fourfold.feed.formats.arrays import ArrayRows
from fourfold.feed.formats.arrow import TableRows
from fourfold.feed.formats.hdf5 import HDF5Rows
from fourfold.feed.formats.listing import KNOWN, find_files, is_marker, names_below
from fourfold.feed.formats.positioned import file_size
from fourfold.feed.formats.source import Dtypes, FormatSource, Records
from fourfold.feed.formats.tfrecord import TFRecords, is_tfrecord
from fourfold.feed.formats.webdataset import TarSamples
from fourfold.feed.pack.layout import INDEX_FILE, MANIFEST_FILE
from fourfold.feed.pack.reader import Pack
from fourfold.feed.source import TokenSource
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem, os_error_text

SUFFIXES = {
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"), "images"),
    ".npy": "npy",
    ".npz": "npz",
    **dict.fromkeys((".txt", ".text"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".parquet", ".arrow", ".arrows", ".feather"), "arrow"),
    ".tar": "tar",
    **dict.fromkeys((".tfrecord", ".tfrecords", ".tfrec"), "tfrecord"),
    **dict.fromkeys((".h5", ".hdf5", ".hdf"), "hdf5"),
    **dict.fromkeys((".bin", ".idx"), "megatron"),
}
SHARD_NUMBER = re.compile(r"-\d+-of-\d+$")  # as TensorFlow names shards: train.tfrecord-00000-of-00016
MAGIC = {b"PAR1": "arrow", b"ARROW1": "arrow", b"\x89HDF\r\n\x1a\n": "hdf5", b"\x93NUMPY": "npy"}
TAR_MAGIC_AT, START_BYTES = 257, 512
# Of files that are not read: the first bytes, or a pattern of the name; what such a file is, and what to do.
UNREAD = {
    b"\x1f\x8b": ("compressed by gzip", "gunzip it first"),
    b"BZh": ("compressed by bzip2", "bunzip2 it first"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unzstd it first"),
    b"\xfd7zXZ": ("compressed by xz", "unxz it first"),
    b"PK\x03\x04": ("a zip archive", "the folder that unzip makes of it"),
    b"SQLite format 3\0": ("a database of SQLite", 'ff.sql("sqlite:///FILE", query, key=…)'),
    r"\.json$": ("one JSON document", "a .jsonl file, an object on each line: jq -c '.[]' FILE"),
    r"/(index|state|manifest)\.json$": ("perhaps the index of a folder", "its folder"),
    r"\.mds(\.|$)": (
        f"a shard of MDS in a folder without {mds.INDEX_FILE}",
        f"the {mds.INDEX_FILE} that was written with it",
    ),
}
SPLITS = frozenset(("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"))


class Options(NamedTuple):
    """What `open_source` was asked for."""

    columns: Sequence[str] | None
    target: str | None
    images: bool
    rows: bool
    length: int | None
    dtype: Dtypes | None

    @property
    def fields(self) -> Sequence[str] | None:
        """The fields that have to be read; None: all."""
        if self.columns is None or self.target is None or self.target in self.columns:
            return self.columns
        return [*self.columns, self.target]


def open_source(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    target: str | None = None,
    images: bool = True,
    rows: bool = False,
    length: int | None = None,
    dtype: Dtypes | None = None,
) -> Any:
    """The samples of files as a source, where they are: a pack, or files of a format of others.

    path     a file, a folder of files of one format, or a pattern such as "train/*.tar"
    columns  the fields of a sample; None: all
    target   a field: samples are pairs (the other fields, target). With one other field, the inputs are its values
    images   decode images to uint8 [3, height, width] (pip install 'fourfold[images]'); else they are bytes
    rows     of a folder of npy or npz files: each row is a sample, not each file
    dtype    of the numbers in a sample, but for those of the target: "float32", or torch.float32; by field, a dict of
             them, which may name the target too. None: as in the files, where numbers are often float64 or int64.
             Images stay uint8
    length   of Megatron's files: a sample is so many tokens with the next ones as targets, not a sequence

    Raises DataError, with what is known, if nothing there can be read; DamagedSample, when a sample is read, if it is
    damaged. Nothing is unpickled.
    """
    options = Options(columns, target, images, rows, length, dtype)
    _check_arguments(path, options)
    given = Path(os.path.expanduser(path))
    if (paths := find_files(given)) is None:
        return _open_folder(given, options)
    return _open_files(str(given), paths, options)


def _check_arguments(path: Any, options: Options) -> None:
    """Raise DataError for values that are not what they must be."""
    columns, target = options.columns, options.target
    problems = argument_checks.str_problems(
        "path", path, path=True, attempt='one path: a folder, or a pattern such as "train/*.csv"'
    )
    if isinstance(path, str) and "://" in path:
        attempt = "ff.Pack(url) for a pack, or a copy of these files"
        problems.append(Problem(f"the URL {path}", "a path on this machine", attempt))
    problems += argument_checks.name_list_problems("columns", columns, optional=True)
    problems += argument_checks.str_problems("target", target, optional=True)
    problems += argument_checks.int_problems("length", options.length, minimum=1, optional=True)
    if not problems and columns is not None and set(columns) == {target}:
        problems.append(Problem(f"columns = {columns} with target = {target!r}", "at least one of the inputs"))
    if problems:
        raise DataError(problems)


def _open_folder(folder: Path, options: Options) -> Any:
    if (folder / MANIFEST_FILE).is_file() and (folder / INDEX_FILE).is_file():
        _refuse(options, str(folder), "a pack", columns=True, target=True, rows=True, length=True, dtype=True)
        return Pack(folder, images=options.images)
    if (folder / mds.INDEX_FILE).is_file():
        return _source(mds.MDS(folder, options.fields), options, "MDS")
    if (folder / arrow.STATE_FILE).is_file():
        return _source(TableRows(str(folder), arrow.saved_files(folder), options.fields), options, "a data set")
    for index in (mds.INDEX_FILE, arrow.STATE_FILE, MANIFEST_FILE):
        _refuse_splits(str(folder), {path.parent.name for path in folder.glob(f"*/{index}")})
    paths = _files_below(folder)
    if not paths:
        raise DataError(Problem(f"no files in {folder}", KNOWN), where=str(folder))
    return _open_files(str(folder), paths, options)


def _refuse_splits(folder: str, names: Iterable[str]) -> None:
    """Raise DataError for a folder of data sets, such as `train` and `validation`: which of them is meant?"""
    if splits := sorted(names):
        got = f"{folder} holds several data sets: {', '.join(splits[:8])}"
        raise DataError(Problem(got, "one of them", os.path.join(folder, splits[0])), where=folder)


def _check_folders(name: str, paths: Sequence[str], *, has_classes: bool) -> None:
    """Raise DataError for folders that are named as data sets, such as `train2017`, and for folders below one class."""
    folders = {os.path.dirname(path) or "." for path in paths}
    root = os.path.commonpath(list(folders)) or "."
    below = {os.path.relpath(folder, root).partition("/")[0] for folder in folders}
    splits = [each for each in below if each.lower().rstrip("0123456789_-") in SPLITS]
    _refuse_splits(root, splits if len(splits) > 1 else ())
    if has_classes and os.path.isdir(name) and len(folders) > 1 and not os.path.samefile(name, root):
        got = f"{name} with one class, {os.path.relpath(root, name).partition('/')[0]}, and folders below it"
        raise DataError(Problem(got, "the folder that holds the classes", root), where=name)


def _files_below(folder: Path) -> list[str]:
    try:
        return sorted(os.path.join(folder, name) for name in names_below(str(folder)) if not is_marker(name))
    except OSError as error:
        problem = Problem(f"{error.filename}: {os_error_text(error)}", "a folder that can be read")
        raise DataError(problem, where=str(folder)) from error


def _open_files(name: str, paths: Sequence[str], options: Options) -> Any:
    kinds = Counter(_kind_of(path) for path in paths)
    if len(kinds) > 1 or None in kinds:
        raise DataError(_kinds_problem(name, paths, kinds), where=name)
    kind = next(iter(kinds))
    assert kind is not None
    if os.path.isdir(name) or kind == "images":  # whose folders are classes, however they were found
        _check_folders(name, paths, has_classes=kind == "images")
    if kind == "megatron" and options.length is not None:
        return _open_tokens(name, paths, options)
    return _source(OPENERS[kind](name, paths, options), options, kind, rows=kind in ("npy", "npz"))


def _kinds_problem(name: str, paths: Sequence[str], kinds: Mapping[str | None, int]) -> Problem:
    """The problem of files of several kinds, or of none that is known."""
    counts = ", ".join(f"{count} {kind or 'of no known kind'}" for kind, count in kinds.items())
    known = {kind: count for kind, count in kinds.items() if kind is not None}
    got, attempt = f"{name}: {counts}", "a source of your own"
    if None in kinds:
        unknown = next(path for path in paths if _kind_of(path) is None)
        got += f", such as {unknown}" if unknown != name else ""
        start, lower = _start_of(unknown), unknown.lower()
        for sign, (what, remedy) in UNREAD.items():
            if start.startswith(sign) if isinstance(sign, bytes) else re.search(sign, lower):
                got, attempt = f"{got}, {what}", remedy
    if known:
        attempt = _pattern_of(max(known, key=known.__getitem__), paths)
    return Problem(got, KNOWN, attempt)


def _pattern_of(kind: str, paths: Sequence[str]) -> str:
    """A pattern that the files of a kind have, and no others of these paths."""
    chosen = [path for path in paths if _kind_of(path) == kind]
    folder = glob.escape(os.path.commonpath([os.path.dirname(path) for path in chosen]))
    suffixes = {os.path.splitext(SHARD_NUMBER.sub("", path))[1] for path in chosen}
    suffix = suffixes.pop()
    if suffixes or not suffix:
        return "the files of one kind in a folder of their own"
    ending = suffix if all(path.endswith(suffix) for path in chosen) else f"{suffix}-*"
    return f'a pattern, such as "{os.path.join(folder, "**", "*")}{ending}"'


def _open_arrays(name: str, paths: Sequence[str], options: Options) -> Records:
    if options.rows or list(paths) == [name]:
        return ArrayRows(name, paths, shards=options.rows)
    return file_samples.array_files(name, paths)


def _open_tokens(name: str, paths: Sequence[str], options: Options) -> TokenSource:
    _refuse(options, name, "tokens", columns=True, target=True, rows=True, dtype=True)
    assert options.length is not None
    return TokenSource(megatron.MegatronTokens(name, _megatron_prefixes(name, paths)), length=options.length)


def _megatron_prefixes(name: str, paths: Sequence[str]) -> list[str]:
    """The names of Megatron's files without their endings. Raises DataError if one of the two is missing."""
    prefixes = sorted({os.path.splitext(path)[0] for path in paths})
    missing = [
        f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx") if not os.path.isfile(prefix + suffix)
    ]
    if missing:
        problems = [Problem(f"no {path}", "Megatron's .bin and .idx files in pairs") for path in missing]
        raise DataError(problems, where=name)
    return prefixes


OPENERS: dict[str, Callable[[str, Sequence[str], Options], Records]] = {
    "images": lambda name, paths, options: file_samples.images(name, paths),
    **dict.fromkeys(("npy", "npz"), _open_arrays),
    "text": lambda name, paths, options: lines.open_text(name, paths),
    "jsonl": lambda name, paths, options: lines.open_jsonl(name, paths),
    "csv": lambda name, paths, options: lines.open_csv(name, paths),
    "arrow": lambda name, paths, options: TableRows(name, paths, options.fields),
    "tar": lambda name, paths, options: TarSamples(name, paths, options.fields),
    "tfrecord": lambda name, paths, options: TFRecords(name, paths),
    "hdf5": lambda name, paths, options: HDF5Rows(name, paths, options.fields),
    "megatron": lambda name, paths, options: megatron.MegatronSequences(name, _megatron_prefixes(name, paths)),
}


def _source(records: Records, options: Options, what: str, *, rows: bool = False) -> FormatSource:
    _refuse(options, records.name, what, rows=not rows, length=True)
    wanted = {"columns": options.fields, "target": options.target, "images": options.images, "dtype": options.dtype}
    return FormatSource(records, **wanted)


def _refuse(options: Options, name: str, what: str, **refused: bool) -> None:
    """Raise DataError for options that mean nothing here."""
    given = [each for each, is_refused in refused.items() if is_refused and getattr(options, each) not in (None, False)]
    if given:
        attempt = f"{', '.join(f'{each}=' for each in given)} when it is packed" if what == "a pack" else ""
        raise DataError([Problem(f"{each}= for {what}", f"no {each}=", attempt) for each in given], where=name)


def _kind_of(path: str) -> str | None:
    """The kind of a file; None: unknown."""
    suffix = os.path.splitext(SHARD_NUMBER.sub("", path))[1].lower()
    if suffix == ".bin" and not os.path.isfile(f"{path[:-4]}.idx"):
        return None
    return SUFFIXES.get(suffix) or _kind_by_content(path)


def _kind_by_content(path: str) -> str | None:
    start = _start_of(path)
    for magic, kind in MAGIC.items():
        if start.startswith(magic):
            return kind
    if start[TAR_MAGIC_AT:].startswith(b"ustar"):
        return "tar"
    return "tfrecord" if is_tfrecord(start) else None


def _start_of(path: str) -> bytes:
    file_size(path)
    try:
        with open(path, "rb") as file:
            return file.read(START_BYTES)
    except OSError as error:
        raise DataError(Problem(f"{path}: {os_error_text(error)}", "a file that can be read"), where=path) from error
