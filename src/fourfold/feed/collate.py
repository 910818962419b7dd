"""Samples: what a source must be, and how its samples become a batch.

form  of a sample: the shapes and dtypes of its tensors, by their places in it
Law: what cannot be stacked is told with the number of the sample and what it has instead.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.parts.torch_private import collate, default_collate_fn_map
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem
from fourfold.words.task import Data

INDEXABLE_NEED = "numbered samples: len(source) and source[i]"
PADDING_HINT = "pad them to one shape, or give the source a fetch(indices) that does"
DTYPE_HINT = "convert them in the source, for instance with .float() or .long()"
Handler = Callable[..., Any]


def source_problem(source: Any, name: str) -> Problem | None:
    """What is wrong with a source; None where its samples can be counted and asked for by number."""
    got = argument_checks.format_argument(name, source)
    if isinstance(source, torch.utils.data.DataLoader):
        return Problem(got, INDEXABLE_NEED, "its dataset: loader.dataset")
    if isinstance(source, Mapping | str | bytes):
        return Problem(got, INDEXABLE_NEED, "a list of (inputs, targets)")
    has_samples = hasattr(source, "__getitem__") or hasattr(source, "fetch")
    if not has_samples or not hasattr(source, "__len__"):
        return Problem(
            got, INDEXABLE_NEED, "list(source), if it fits into memory" if hasattr(source, "__iter__") else ""
        )
    try:
        return None if len(source) else Problem(f"{name} without samples", "at least one")
    except Exception as error:  # no length, a negative one, one beyond an index; or the source's own objection
        return Problem(f"{got}: {str(error) or type(error).__name__}", INDEXABLE_NEED)


def check_data(data: Any, *, where: str) -> None:
    """Raise DataError with all that is wrong with what a task's `data` function returned."""
    if not isinstance(data, Data):
        raise DataError(
            Problem(
                argument_checks.format_argument("data()", data),
                "the task's data() to return a Data",
                "ff.Data(train=source)",
            ),
            where=where,
        )
    sources = {"train": data.train} | ({} if data.valid is None else {"valid": data.valid})
    found = (source_problem(source, name) for name, source in sources.items())
    if problems := [problem for problem in found if problem is not None]:
        raise DataError(problems, where=where)


def collate_samples(samples: Sequence[Any], indices: Sequence[int]) -> Any:
    """The samples as one batch, as torch's `default_collate` makes it. `numbers`: which samples of the source.

    Raises DataError where a sample is None, or has other shapes, dtypes or keys than the first one.
    """
    try:
        return collate(samples, collate_fn_map=_HANDLERS)
    except Exception as error:
        problem = _first_mismatch(samples, indices)
        if problem is None:  # strings in an array, sparse tensors
            said = "tensors and arrays in one place" if isinstance(error, _Mismatch) else _first_line(error)
            got = f"samples {indices[0] if indices else 0} and on cannot be stacked: {said}"
            problem = Problem(got, "dense tensors, arrays or numbers", "tensors, or a source with a fetch(indices)")
        raise DataError(problem, where="the source") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Mismatch(Exception):
    """Samples differ in what torch would convert without a word."""


def _require_same(handler: Handler, key: Callable[[Any], Any]) -> Handler:
    def handle(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
        if len({key(each) for each in batch}) > 1:
            raise _Mismatch
        return handler(batch, collate_fn_map=collate_fn_map)

    return handle


def _collate_dicts(batch: Sequence[Mapping[Any, Any]], *, collate_fn_map: Any = None) -> dict[Any, Any]:
    """A dict of batches. Torch would take the keys of the first dict, and leave out what the others have besides."""
    if any(each.keys() != batch[0].keys() for each in batch):
        raise _Mismatch
    return {key: collate([each[key] for each in batch], collate_fn_map=collate_fn_map) for key in batch[0]}


def _dtype(value: Any) -> Any:
    return value.dtype


_HANDLERS: dict[Any, Handler] = {
    **default_collate_fn_map,
    Mapping: _collate_dicts,
    Tensor: _require_same(default_collate_fn_map[Tensor], _dtype),
    np.ndarray: _require_same(default_collate_fn_map[np.ndarray], _dtype),
    # NumPy's scalars, which torch has under one key of several types.
    **{
        key: _require_same(default_collate_fn_map[key], _dtype)
        for key in default_collate_fn_map
        if isinstance(key, tuple)
    },
    float: _require_same(default_collate_fn_map[float], type),
    int: _require_same(default_collate_fn_map[int], type),
}


def _first_mismatch(samples: Sequence[Any], numbers: Sequence[int]) -> Problem | None:
    """The first sample that is None or is not like the first one, and how."""
    for sample, number in zip(samples, numbers, strict=False):
        for place, form in _leaf_forms(sample):
            if form == "None":
                need = "a pair (inputs, targets)" if not place else "a tensor there"
                return Problem(
                    f"sample {number}{place and f': {place}'} is None", need, "a source without such samples"
                )
    first = dict(_leaf_forms(samples[0]))
    for sample, number in zip(samples[1:], numbers[1:], strict=False):
        theirs = dict(_leaf_forms(sample))
        for place in {**first, **theirs}:
            a, b = first.get(place, "missing"), theirs.get(place, "missing")
            if a != b:
                got = f"{place or 'samples'}: {a} in sample {numbers[0]}, {b} in sample {number}"
                if "missing" in (a, b):
                    attempt = "the same keys in every sample"
                else:
                    attempt = PADDING_HINT if a.partition(" ")[2] != b.partition(" ")[2] else DTYPE_HINT
                return Problem(got, "samples of one form, so that a batch can stack them", attempt)
    return None


def _leaf_forms(sample: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if sample is None:
        yield place, "None"
    elif isinstance(sample, Tensor | np.ndarray | np.number | np.bool_):
        yield place, f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}"
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from _leaf_forms(value, f"{place}[{key!r}]")
    elif isinstance(sample, tuple | list):
        names = ("inputs", "targets") if not place and len(sample) == 2 else range(len(sample))
        for name, value in zip(names, sample, strict=True):
            yield from _leaf_forms(value, name if isinstance(name, str) else f"{place}[{name}]")
    else:
        yield place, type(sample).__name__
