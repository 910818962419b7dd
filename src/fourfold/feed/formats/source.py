"""Format source: the records of files as samples.

records   files of one format; record j of file f is a dict of values by field
field     a name, and an array, a number, text, bytes or an encoded image
sample    the dict of a record; or a pair, if a `target` is named, or the fields are `inputs` and `targets`
Law: `source.fetch(indices)` equals the stack of `source[i]`; what cannot be read raises DamagedSample with the file and
the record, and no other error.
"""

import bisect
import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from fourfold.feed.collate import collate_samples
from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.feed.pack.schema import PAIR, EncodedImage
from fourfold.feed.pack.values import DTYPES, IMAGE_THREADS, decode_image
from fourfold.feed.source import empty_like
from fourfold.feed.unpacked import BatchBytes, bytes_of, check_fits, load_json
from fourfold.torch_kit.tensor_tree import tensor_of_list
from fourfold.words import argument_checks
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DamagedSample, DataError, Problem, closest_match, first_line

# ---- values of JSON --------------------------------------------------------------------------------------------------


TENSOR_BYTES = 640  # of a small one, measured
Shape = tuple[int, ...] | None


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text, as a batch can hold it. Raises ValueError or RecursionError if it is none."""
    return stackable(load_json(content))


def stackable(value: Any, shapes: dict[int, Shape] | None = None) -> Any:
    """A value of JSON with its lists of numbers as tensors of int64 or float64, as JSON's numbers are. Nulls stay None.

    `shapes`: by id, of the lists of a value of which this is a part. Raises ValueError for what is no int64.
    """
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of more than 64 bits")
    if isinstance(value, dict):
        return {name: stackable(each, shapes) for name, each in value.items()}
    if isinstance(value, list):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if shapes is None or shapes[id(value)] is not None:
                tensor = tensor_of_list(value)
                return torch.as_tensor(value, dtype=torch.float64) if tensor.is_floating_point() else tensor
        if shapes is None:  # once, at the top: to try each list of a deep one takes its depth times its length
            _add_shapes(value, shapes := {})
        return [stackable(each, shapes) for each in value]
    return value


def _add_shapes(value: Any, shapes: dict[int, Shape]) -> Shape:
    """The shape of a list of numbers; () of a number, None of other values. `shapes` gets those of all lists in it."""
    if not isinstance(value, list | dict):
        is_number = isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)
        return () if is_number else None
    found = {_add_shapes(each, shapes) for each in (value if isinstance(value, list) else value.values())}
    if isinstance(value, dict):
        return None
    inner = found.pop() if found else ()
    shapes[id(value)] = None if found or inner is None else (len(value), *inner)
    check_fits(TENSOR_BYTES * len(shapes), "the lists of a JSON text")
    return shapes[id(value)]


# ---- records ---------------------------------------------------------------------------------------------------------


NUM_TRIED = 64  # records, for the names of fields
UNREADABLE = (ValueError, OSError, EOFError, MemoryError, OverflowError, RecursionError)
Record = dict[str, Any]
Dtypes = str | torch.dtype | Mapping[str, str | torch.dtype]


class Records(Protocol):
    """Files of one format. `read` raises one of `UNREADABLE` for a damaged record.

    noun   what a record is called, such as "row"; "" if a file is one. Or `key(file, record)` says which it is
    files  through which they are read; None: by a library, or a file as a whole
    Perhaps `field_names`, those of all records; `classes`, what the values of the targets mean.
    """

    @property
    def name(self) -> str: ...
    @property
    def paths(self) -> Sequence[str]: ...
    @property
    def noun(self) -> str: ...
    @property
    def files(self) -> PositionedFiles | None: ...
    @property
    def shard_sizes(self) -> Sequence[int]: ...
    def read(self, file: int, records: Sequence[int], /) -> Iterable[Record]: ...


class FormatSource:
    """The records of files as a source.

    columns  the fields of a sample, in this order, the target among them; None: all
    target   a field: samples are pairs (the other fields, target). With one other field, the inputs are its values
    images   decode images to uint8 [3, height, width]; else their bytes are the sample
    dtype    of all numbers but the target's; or a dtype by field

    A batch stacks arrays and numbers, and makes lists of text, bytes and nulls.
    """

    def __init__(
        self,
        records: Records,
        *,
        columns: Sequence[str] | None = None,
        target: str | None = None,
        images: bool = True,
        dtype: Dtypes | None = None,
    ) -> None:
        self._records, self._columns, self._target, self._images = records, columns, target, images
        self.name, self.shard_sizes = records.name, records.shard_sizes
        self.classes: Sequence[str] | None = getattr(records, "classes", None)
        self._dtypes = _read_dtypes(dtype)
        self._ends = list(itertools.accumulate(records.shard_sizes))
        count = sum(records.shard_sizes)
        if not 0 < count < 2**63:  # of rows without bytes, a file may have any number
            need = "fewer than 2**63" if count else "at least one"
            raise DataError(Problem(f"{records.name} has {count or 'no'} samples", need), where=records.name)
        self._check_names()

    def _check_names(self) -> None:
        """Raise DataError for names that no record has: the names are wrong, and not the records damaged."""
        named = (self._target, *self._dtypes) if self._columns is None else (*self._columns, *self._dtypes)
        wanted = [name for name in named if name is not None]
        known = list(getattr(self._records, "field_names", ()) or (self._names_of_some(wanted) if wanted else ()))
        problems = argument_checks.unknown_name_problems("field", wanted, known) if known else []
        if known == [self._target]:
            problems.append(Problem(f"no field but the target {self._target}", "at least one of the inputs"))
        if problems:
            raise DataError(problems, where=self.name)

    def _names_of_some(self, wanted: Sequence[str]) -> list[str]:
        """The fields of some records, spread evenly, until enough are found; none if no record is whole."""
        found: dict[str, None] = {}
        for number in dict.fromkeys(index * len(self) // NUM_TRIED for index in range(NUM_TRIED)):
            file, record = self._place(number)
            with contextlib.suppress(*UNREADABLE):  # a damaged record is reported when it is read
                found |= dict.fromkeys(next(iter(self._records.read(file, [record]))))
            if found.keys() >= set(wanted) and (self._columns is not None or len(found) > 1):
                break
        return list(found)

    @property
    def bytes_read(self) -> int | None:
        """What has been read of the files; None if their library does not tell."""
        return None if self._records.files is None else self._records.files.bytes_read

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int, /) -> Any:
        return self._decoded(index, self.pack_sample(index))

    def fetch(self, indices: Sequence[int], /) -> Any:
        """The batch of these samples, in this order."""
        numbers = list(map(int, indices))
        if not numbers:
            return _batch_of_none(self[0])
        needed = BatchBytes(len(numbers), self.name)
        samples = self._read_many(numbers, needed)
        if self._images and any(isinstance(value, EncodedImage) for value in _values(samples[0])):
            threads = min(IMAGE_THREADS, len(numbers), len(os.sched_getaffinity(0)))

            def decoded(index: int, sample: Any) -> Any:
                pixels = self._decoded(index, sample)
                needed.add(2 * bytes_of(pixels))  # and their rows of the batch
                return pixels

            with ThreadPoolExecutor(threads, thread_name_prefix="fourfold images") as pool:
                samples = list(pool.map(decoded, numbers, samples))
        batch = collate_samples(samples, numbers, nulls=True, key=self.sample_key)
        return batch if isinstance(batch, dict) else tuple(batch)

    def pack_sample(self, index: int) -> Any:
        """The sample with encoded images in place of their pixels."""
        file, record = self._place(index)
        try:
            (found,) = self._records.read(file, [record])
            return self._arranged(found)
        except UNREADABLE as error:
            raise DamagedSample(self.sample_key(index), first_line(error), where=self.name) from error

    def sample_key(self, index: int) -> str:
        """The file and the record of a sample."""
        file, record = self._place(index)
        own_key = getattr(self._records, "key", None)
        if own_key is not None:
            return own_key(file, record)
        noun = self._records.noun
        return self._records.paths[file] + (f", {noun} {record}" if noun else "")

    def _place(self, index: int) -> tuple[int, int]:
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        file = bisect.bisect_right(self._ends, number)
        return file, number - (self._ends[file - 1] if file else 0)

    def _read_many(self, numbers: Sequence[int], needed: BatchBytes) -> list[Any]:
        """The samples, those of one file in one call. Raises DamagedSample for the first that cannot be read."""
        places = [self._place(number) for number in numbers]
        by_file: dict[int, list[int]] = {}
        for row, (file, _) in enumerate(places):
            by_file.setdefault(file, []).append(row)
        samples: list[Any] = [None] * len(numbers)
        for file, rows in by_file.items():
            try:
                found = self._records.read(file, [places[row][1] for row in rows])
                for row, record in zip(rows, found, strict=True):
                    samples[row] = self._arranged(record)
                    needed.add(2 * bytes_of(samples[row]))  # and its row of the batch
            except UNREADABLE:  # which of them?
                for row in rows:
                    samples[row] = self.pack_sample(numbers[row])
        return samples

    def _arranged(self, record: Record) -> Any:
        """The sample of a record. Raises ValueError if fields are missing."""
        wanted = list(record) if self._columns is None else self._columns
        needed = wanted if self._target is None else [*wanted, self._target]
        if missing := [name for name in needed if name not in record]:
            raise ValueError(f"no {' and no '.join(missing)}, but {comma_list(record) or 'nothing'}")
        values = {name: self._converted(name, record[name]) for name in wanted}
        if self._target is not None:
            target = values.pop(self._target)
            if not values:
                raise ValueError(f"no field but the target {self._target}")
            return next(iter(values.values())) if len(values) == 1 else values, target
        return tuple(values[name] for name in PAIR) if set(values) == set(PAIR) else values

    def _converted(self, name: str, value: Any) -> Any:
        target = self._target or PAIR[1]
        dtype = self._dtypes.get(name, None if name == target else self._dtypes.get(None))
        return value if dtype is None else _converted(value, dtype)

    def _decoded(self, index: int, sample: Any) -> Any:
        if not self._images:
            return sample
        try:
            return _decode_images(sample)
        except UNREADABLE as error:
            raise DamagedSample(self.sample_key(index), first_line(error), where=self.name) from error


def _read_dtypes(given: Dtypes | None) -> dict[str | None, torch.dtype]:
    """The dtypes by field; under None, that of the others. Raises DataError for what is no dtype."""
    by_name = given if isinstance(given, Mapping) else {None: given} if given is not None else {}
    found = {name: each if isinstance(each, torch.dtype) else DTYPES.get(str(each)) for name, each in by_name.items()}
    problems = [
        Problem(f"dtype = {each!r}", f"one of {', '.join(DTYPES)}", closest_match(str(each), DTYPES) or "")
        for name, each in by_name.items()
        if found[name] not in DTYPES.values()
    ]
    if problems:
        raise DataError(problems, where="open_source")
    return {name: each for name, each in found.items() if each is not None}


def _converted(value: Any, dtype: torch.dtype) -> Any:
    """A value with its numbers in a dtype; text and bytes stay as they are."""
    if isinstance(value, Mapping):
        return {name: _converted(each, dtype) for name, each in value.items()}
    if isinstance(value, list):
        return [_converted(each, dtype) for each in value]
    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        array = np.array(value)
        if array.dtype == object:
            raise ValueError(f"a whole number of more than 64 bits, for {str(dtype).removeprefix('torch.')}")
        value = torch.from_numpy(array)
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex() and not dtype.is_complex:  # torch would drop the imaginary parts
        raise ValueError(f"complex numbers, for {str(dtype).removeprefix('torch.')}")
    converted = value.to(dtype)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:  # torch would make infinities
        is_finite = torch.isfinite(converted.float() if dtype.itemsize == 1 else converted)
        is_held, wrong = bool(is_finite.all()) or torch.equal(is_finite, torch.isfinite(value)), "too large"
    else:  # torch would wrap, or cut
        is_held, wrong = np.array_equal(converted.numpy(), value.numpy()), "too large, negative, NaN or not whole"
    if not is_held:
        raise ValueError(f"numbers that {str(dtype).removeprefix('torch.')} cannot hold: {wrong}")
    return converted


def _decode_images(value: Any) -> Any:
    if isinstance(value, EncodedImage):
        return decode_image(value)
    if isinstance(value, Mapping):
        return {name: _decode_images(each) for name, each in value.items()}
    return tuple(map(_decode_images, value)) if isinstance(value, tuple) else value


def _values(sample: Any) -> list[Any]:
    parts = [sample]
    for part in parts:
        parts += part.values() if isinstance(part, Mapping) else part if isinstance(part, tuple) else ()
    return parts


def _batch_of_none(sample: Any) -> Any:
    """A batch of no samples like this one."""
    if isinstance(sample, Mapping):
        return {name: _batch_of_none(value) for name, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(map(_batch_of_none, sample))
    if sample is None or isinstance(sample, str | bytes | list):
        return []
    return empty_like(collate_samples([sample], [0]))
