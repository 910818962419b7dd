"""Open: the source of what is at a path.

kind   the format of a file: by its name, else by its first bytes
Law: what is opened follows from what is there alone. Files of several kinds, or of none that is known, are an error.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.feed.files.listing import KIND_OF_SUFFIX, Listing
from fourfold.feed.files.open import OPENERS as PLAIN_OPENERS
from fourfold.feed.files.open import open_files
from fourfold.feed.formats import hugging_face, mds, megatron
from fourfold.feed.formats.array_shards import ArrayShards
from fourfold.feed.formats.arrow import TableRows
from fourfold.feed.formats.hdf5 import HDF5Rows
from fourfold.feed.formats.plain_files import PlainRecords
from fourfold.feed.formats.positioned import file_size
from fourfold.feed.formats.source import FormatSource, Records
from fourfold.feed.formats.tfrecord import TFRecords, is_tfrecord
from fourfold.feed.formats.webdataset import TarSamples
from fourfold.feed.pack.layout import INDEX_FILE, MANIFEST_FILE
from fourfold.feed.pack.reader import Pack
from fourfold.feed.source import TokenSource
from fourfold.words.argument_checks import int_problems
from fourfold.words.errors import DataError, Problem, closest_match, os_error_text

SUFFIXES = {
    **KIND_OF_SUFFIX,
    **dict.fromkeys((".parquet", ".arrow", ".feather"), "arrow"),
    ".tar": "tar",
    **dict.fromkeys((".tfrecord", ".tfrecords", ".tfrec"), "tfrecord"),
    **dict.fromkeys((".h5", ".hdf5", ".hdf"), "hdf5"),
    **dict.fromkeys((".bin", ".idx"), "megatron"),
}
SHARD_NUMBER = re.compile(r"-\d+-of-\d+$")  # as TensorFlow names shards: train.tfrecord-00000-of-00016
MAGIC = {b"PAR1": "arrow", b"ARROW1": "arrow", b"\x89HDF\r\n\x1a\n": "hdf5", b"\x93NUMPY": "npy"}
TAR_MAGIC_AT, START_BYTES = 257, 512
KNOWN = (
    "a pack; images, .npy, .npz, .txt, .jsonl, .csv, .tsv; .parquet, .arrow, .feather; a folder of `datasets` or MDS; "
    ".tar (WebDataset), .tfrecord, .h5, Megatron's .bin and .idx"
)


class Options(NamedTuple):
    """What `open_source` was asked for."""

    columns: Sequence[str] | None
    target: str | None
    images: bool
    rows: bool
    length: int | None

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
) -> Any:
    """The samples of files as a source, where they are: a pack, or files of a format of others.

    path     a file, a folder of files of one format, or a pattern such as "train/*.tar"
    columns  the fields of a sample; None: all
    target   a field: samples are pairs (the other fields, target). With one other field, the inputs are its values
    images   decode images to uint8 [3, height, width] (pip install 'fourfold[images]'); else they are bytes
    rows     of a folder of npy or npz files: each row is a sample, not each file
    length   of Megatron's files: a sample is so many tokens with the next ones as targets, not a sequence

    Raises DataError, with what is known, if nothing there can be read; DamagedSample, when a sample is read, if it is
    damaged. Nothing is unpickled.
    """
    if isinstance(columns, str) or (columns is not None and (not columns or len(set(columns)) < len(columns))):
        raise DataError(Problem(f"columns = {columns!r}", "a list of different names", 'columns=["x", "y"]'))
    if problems := int_problems("length", length, minimum=1, optional=True):
        raise DataError(problems)
    options, given = Options(columns, target, images, rows, length), Path(path).expanduser()
    if given.is_dir():
        return _open_folder(given, options)
    if given.is_file():
        name, paths = str(given), [str(given)]
    elif os.path.isfile(f"{given}.idx"):  # Megatron names its files so
        name, paths = str(given), [f"{given}.bin", f"{given}.idx"]
    elif glob.has_magic(str(given)):
        name, paths = str(given), sorted(filter(os.path.isfile, glob.glob(str(given), recursive=True)))
        if not paths:
            raise DataError(Problem(f"no file that fits {name}", "at least one"), where=name)
    elif given.exists():
        raise DataError(Problem(f"{given} is no file and no folder", KNOWN), where=str(given))
    else:
        raise _nothing_there(given)
    return _open_files(name, paths, options)


def _nothing_there(path: Path) -> DataError:
    try:
        close = closest_match(path.name, os.listdir(path.parent))
    except OSError:
        close = None
    return DataError(Problem(f"nothing at {path}", KNOWN, str(path.parent / close) if close else ""), where=str(path))


def _open_folder(folder: Path, options: Options) -> Any:
    if (folder / MANIFEST_FILE).is_file() and (folder / INDEX_FILE).is_file():
        _refuse(options, str(folder), "a pack", columns=True, target=True, rows=True, length=True)
        return Pack(folder, images=options.images)
    if (folder / mds.INDEX_FILE).is_file():
        return _source(mds.MDS(folder, options.fields), options, "MDS")
    if (folder / hugging_face.STATE_FILE).is_file():
        return _source(TableRows(str(folder), hugging_face.saved_files(folder), options.fields), options, "a data set")
    _refuse_splits(folder)
    paths = _files_below(folder)
    if not paths:
        raise DataError(Problem(f"no files in {folder}", KNOWN), where=str(folder))
    return _open_files(str(folder), paths, options)


def _refuse_splits(folder: Path) -> None:
    """Raise DataError for a folder of data sets, such as `train` and `validation`: which of them is meant?"""
    for index in (mds.INDEX_FILE, hugging_face.STATE_FILE, MANIFEST_FILE):
        splits = sorted(path.parent.name for path in folder.glob(f"*/{index}"))
        if splits:
            got = f"{folder} holds several data sets: {', '.join(splits[:8])}"
            raise DataError(Problem(got, "one of them", str(folder / splits[0])), where=str(folder))


def _files_below(folder: Path) -> list[str]:
    def stop(error: OSError) -> None:
        problem = Problem(f"{error.filename}: {os_error_text(error)}", "a folder that can be read")
        raise DataError(problem, where=str(folder)) from error

    paths = []
    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(root, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def _open_files(name: str, paths: Sequence[str], options: Options) -> Any:
    kinds = Counter(_kind_of(path) for path in paths)
    if len(kinds) > 1 or None in kinds:
        counts = ", ".join(f"{count} {kind or 'of no known kind'}" for kind, count in kinds.items())
        named = next(path for path in paths if _kind_of(path) is None) if None in kinds else ""
        got = f"{name}: {counts}{f', such as {named}' if named and named != name else ''}"
        attempt = f'a pattern, such as "{os.path.join(os.path.dirname(paths[0]), "*" + os.path.splitext(paths[0])[1])}"'
        raise DataError(Problem(got, KNOWN, attempt if len(kinds) > 1 else "a source of your own"), where=name)
    kind = next(iter(kinds))
    assert kind is not None
    if kind == "megatron" and options.length is not None:
        return _open_tokens(name, paths, options)
    if kind in PLAIN_OPENERS:
        return _source(_open_plain(name, paths, kind, options), options, kind, rows=kind in ("npy", "npz"))
    return _source(OPENERS[kind](name, paths, options), options, kind)


def _open_plain(name: str, paths: Sequence[str], kind: str, options: Options) -> Records:
    if options.rows and kind in ("npy", "npz"):
        return ArrayShards(name, paths)
    if len(paths) == 1 and paths[0] == name:
        return PlainRecords(open_files(name))
    for path in paths:
        file_size(path)
    root = name if os.path.isdir(name) else os.path.commonpath([os.path.dirname(path) for path in paths])
    return PlainRecords(PLAIN_OPENERS[kind](Listing(kind, root, [os.path.relpath(path, root) for path in paths])))


def _open_tokens(name: str, paths: Sequence[str], options: Options) -> TokenSource:
    _refuse(options, name, "tokens", columns=True, target=True, rows=True)
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
    "arrow": lambda name, paths, options: TableRows(name, paths, options.fields),
    "tar": lambda name, paths, options: TarSamples(name, paths, options.fields),
    "tfrecord": lambda name, paths, options: TFRecords(name, paths),
    "hdf5": lambda name, paths, options: HDF5Rows(name, paths, options.fields),
    "megatron": lambda name, paths, options: megatron.MegatronSequences(name, _megatron_prefixes(name, paths)),
}


def _source(records: Records, options: Options, what: str, *, rows: bool = False) -> FormatSource:
    _refuse(options, records.name, what, rows=not rows, length=True)
    return FormatSource(records, columns=options.columns, target=options.target, images=options.images)


def _refuse(options: Options, name: str, what: str, **refused: bool) -> None:
    """Raise DataError for options that mean nothing here."""
    given = [each for each, is_refused in refused.items() if is_refused and getattr(options, each) not in (None, False)]
    if given:
        raise DataError([Problem(f"{each}= for {what}", f"no {each}=") for each in given], where=name)


def _kind_of(path: str) -> str | None:
    """The kind of a file; None: unknown."""
    suffix = os.path.splitext(SHARD_NUMBER.sub("", path))[1].lower()
    if suffix == ".bin" and not os.path.isfile(f"{path[:-4]}.idx"):
        return None
    return SUFFIXES.get(suffix) or _kind_by_content(path)


def _kind_by_content(path: str) -> str | None:
    file_size(path)
    try:
        with open(path, "rb") as file:
            start = file.read(START_BYTES)
    except OSError as error:
        raise DataError(Problem(f"{path}: {os_error_text(error)}", "a file that can be read"), where=path) from error
    for magic, kind in MAGIC.items():
        if start.startswith(magic):
            return kind
    if start[TAR_MAGIC_AT:].startswith(b"ustar"):
        return "tar"
    return "tfrecord" if is_tfrecord(start) else None
