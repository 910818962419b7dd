"""HDF5: the rows of the datasets of a file.

field   a dataset, under its path in the file: `images`, or `train/images`
row     what all datasets of a file have at one index of their first dim: a sample
Law: only what is in the file itself is read: links to other files, external and virtual datasets are refused.
"""

import itertools
import math
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fourfold.feed.formats.positioned import file_size
from fourfold.feed.optional_package import import_optional
from fourfold.feed.unpacked import check_fits, share_bytes
from fourfold.words import argument_checks
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DataError, Problem, first_line

MAX_OPEN, MAX_MEMBERS, MAX_DEPTH = 16, 2000, 16
MAX_RATIO = 1100  # of deflate
MAX_CHUNKS = 2**16  # of a row: HDF5 lists them all before it reads one
COMPRESSIONS = (1, 4, 32000)  # the numbers of HDF5's filters gzip, szip and lzf
CHECKSUM_BYTES = 4
LEAST_BYTES = 2**20  # what a dataset and its chunks may have, however small its file is


class _Layout(NamedTuple):
    """Of a file: the dtype and the shape of a row of each dataset, and the number of rows."""

    fields: dict[str, tuple[str, tuple[int, ...]]]
    num_rows: int


def _h5py() -> Any:
    return import_optional("h5py", "h5py, which reads it", "hdf5", got="HDF5, and no h5py")


class HDF5Rows:
    """The rows of HDF5 files, which have the same datasets."""

    noun, files = "row", None

    def __init__(self, name: str, paths: Sequence[str], columns: Sequence[str] | None = None) -> None:
        self.name, self.paths, self._columns = name, paths, columns
        layouts = [self._layout(path) for path in self.paths]
        for path, layout in zip(self.paths, layouts, strict=True):
            if layout.fields != layouts[0].fields:
                need = f"{_summary(layouts[0])}, as in {self.paths[0]}"
                problem = Problem(f"{path}: {_summary(layout)}", need, "a folder for each, or columns=")
                raise DataError(problem, where=self.name)
        self.shard_sizes = [layout.num_rows for layout in layouts]
        self.field_names = list(layouts[0].fields)
        self._open, self._lock = OrderedDict[int, Any](), threading.Lock()

    def __reduce__(self) -> Any:  # to a worker process goes nothing that is open
        return HDF5Rows, (self.name, self.paths, self._columns)

    def read(self, file: int, records: Sequence[int]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        with self._lock:  # h5py has one lock for all files in any case
            opened = self._file(file)
            for record in records:
                row = {}
                for name in self.field_names:
                    try:
                        row[name] = _row_of(opened[name], record)
                    except (KeyError, RuntimeError) as error:  # h5py's, for damaged files
                        raise ValueError(f"{name}: {error}") from error
                rows.append(row)
        return rows

    def _file(self, number: int) -> Any:
        file = self._open.pop(number, None)
        if file is None:
            file = _h5py().File(self.paths[number], "r")
        self._open[number] = file
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        return file

    def _layout(self, path: str) -> _Layout:
        size = file_size(path)
        try:
            with _h5py().File(path, "r") as file:
                found = dict(_datasets(file, "", itertools.count(1)))
                wanted = self._columns if self._columns is not None else list(found)
                problems = argument_checks.unknown_name_problems("dataset", wanted, list(found))
                chosen = {name: found[name] for name in found if name in wanted}
                problems += [problem for name, each in chosen.items() for problem in _problems(path, name, each, size)]
                if problems:
                    raise DataError(problems, where=path)
                return self._layout_of(path, chosen)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:  # h5py's
            got = f"{path}: {first_line(error)}"
            raise DataError(Problem(got, "an HDF5 file that is whole"), where=path) from error

    def _layout_of(self, path: str, datasets: dict[str, Any]) -> _Layout:
        lengths = {name: each.shape[0] for name, each in datasets.items()}
        if len(set(lengths.values())) != 1:
            got = comma_list(f"{name} of {length} rows" for name, length in lengths.items()) or "no datasets"
            problem = Problem(
                f"{path}: {got}", "datasets with one row for each sample", "columns= of those that have it"
            )
            raise DataError(problem, where=path)
        fields = {name: (str(each.dtype), each.shape[1:]) for name, each in datasets.items()}
        return _Layout(fields, next(iter(lengths.values())))


def _datasets(group: Any, prefix: str, count: Iterator[int]) -> Iterator[tuple[str, Any]]:
    """The datasets below a group by their paths. Raises ValueError for what is not in the file itself."""
    h5py = _h5py()
    if prefix.count("/") > MAX_DEPTH:  # a group may hold itself
        raise ValueError(f"{prefix} lies more than {MAX_DEPTH} groups deep")
    for name in group:
        if next(count) > MAX_MEMBERS:  # which groups that hold one another have, however few they are
            raise ValueError(f"more than {MAX_MEMBERS} datasets and groups; a file per sample is not HDF5's")
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{prefix}{name} is a link, perhaps to another file")
        member = group[name]
        if isinstance(member, h5py.Group):
            yield from _datasets(member, f"{prefix}{name}/", count)
        elif isinstance(member, h5py.Dataset):
            yield prefix + name, member


def _problems(path: str, name: str, dataset: Any, file_bytes: int) -> list[Problem]:
    """What keeps a dataset from being a field."""
    where = f"{path}: {name}"
    if dataset.is_virtual or dataset.external:
        return [Problem(f"{where} is in other files", "datasets of this file")]
    is_text = _h5py().check_string_dtype(dataset.dtype) is not None
    if not is_text and dataset.dtype.kind not in "biuf":
        return [Problem(f"{where} of {dataset.dtype}", "numbers or text", "columns= without it")]
    if not dataset.shape:
        return [Problem(f"{where} has no rows", "a first dim of samples", "columns= without it")]
    most = max(LEAST_BYTES, MAX_RATIO * file_bytes)
    for shape, what in ((dataset.shape, "rows"), (dataset.chunks or (), "chunks")):
        num_bytes = dataset.dtype.itemsize * math.prod(shape)
        if num_bytes > most:
            return [Problem(f"{where} with {what} of {num_bytes} bytes, in a file of {file_bytes}", f"at most {most}")]
    if dataset.chunks:
        filters = dataset.id.get_create_plist()
        count = math.prod(len(each) for each in _chunk_starts(dataset))
        if count > MAX_CHUNKS:
            return [Problem(f"{where}: a row of {count} chunks", f"at most {MAX_CHUNKS}", "larger chunks")]
        if sum(filters.get_filter(each)[0] in COMPRESSIONS for each in range(filters.get_nfilters())) > 1:
            return [Problem(f"{where} is compressed more than once", "once at most", "columns= without it")]
    for shape, what in ((dataset.shape[1:], "a row"), (dataset.chunks or (), "a chunk")):
        try:
            check_fits(dataset.dtype.itemsize * math.prod(shape), what)
        except ValueError as error:
            return [Problem(f"{where}: {error}", "rows and chunks that fit", "smaller chunks")]
    return []


def _chunk_starts(dataset: Any) -> list[range]:
    """Where the chunks of a row begin, in each dim after the first."""
    return [range(0, size, step) for size, step in zip(dataset.shape[1:], dataset.chunks[1:], strict=True)]


def _check_chunks(dataset: Any, record: int) -> None:
    """Raise ValueError for a chunk of a row that unpacks to more than it has: HDF5 would unpack all of it."""
    if dataset.compression != "gzip":
        return
    num_bytes = dataset.dtype.itemsize * math.prod(dataset.chunks) + CHECKSUM_BYTES
    for place in itertools.product([record - record % dataset.chunks[0]], *_chunk_starts(dataset)):
        size = dataset.id.get_chunk_info_by_coord(place).size
        if size * MAX_RATIO <= share_bytes():
            continue
        check_fits(size, "a chunk")
        try:
            unpacked = zlib.decompressobj().decompress(dataset.id.read_direct_chunk(place)[1], num_bytes + 1)
        except zlib.error:  # HDF5 says what is wrong with it, or that it is not compressed
            continue
        if len(unpacked) > num_bytes:
            raise ValueError(f"a chunk that unpacks to more than {num_bytes} bytes")


def _row_of(dataset: Any, record: int) -> Any:
    """A value of a dataset. Raises ValueError for texts that do not fit into memory, and for chunks that lie."""
    _check_chunks(dataset, record)
    if len(dataset.shape) < 2 or dataset.dtype.kind in "biuf":
        return _value(dataset[record])
    texts, total = list[str](), 0
    # A text is no longer than its file, but may stand in every place: few are read at once.
    step = max(1, share_bytes() // (4 * dataset.file.id.get_filesize()))
    for place in np.ndindex(dataset.shape[1:-1]):
        for start in range(0, dataset.shape[-1], step):
            part = _value(dataset[(record, *place, slice(start, start + step))])
            total += sum(map(len, part))
            check_fits(total, "the texts of a row")
            texts += part
    return texts


def _value(value: Any) -> Any:
    if isinstance(value, bytes | str):
        return value.decode() if isinstance(value, bytes) else value
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        return [each.decode() if isinstance(each, bytes) else str(each) for each in array.reshape(-1).tolist()]
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _summary(layout: _Layout) -> str:
    return comma_list(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in layout.fields.items())
