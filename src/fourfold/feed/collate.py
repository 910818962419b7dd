"""Collate: how samples become a batch.

form  the shapes and dtypes of a sample's tensors, each under its path in the sample
Law: an error about samples that cannot be stacked names the sample, and in what it differs.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fourfold.torch_kit.torch_private import collate, default_collate_fn_map
from fourfold.words.errors import DataError, Problem, first_line

PADDING_HINT = "pad them to one shape: in the samples, a DataLoader's collate_fn, or the source's own fetch(indices)"
DTYPE_HINT = "convert them in the source, for instance with .float() or .long()"
Handler = Callable[..., Any]
Key = Callable[[int], str]


def named_sample(number: int, key: Key | None) -> str:
    """A sample for people: `sample 7 (a.tar/0007)`."""
    with contextlib.suppress(Exception):  # whatever a source's own method raises: the number is enough
        return f"sample {number}" if key is None else f"sample {number} ({key(number)})"
    return f"sample {number}"


def collate_samples(
    samples: Sequence[Any], indices: Sequence[int], *, nulls: bool = False, key: Key | None = None
) -> Any:
    """The samples as one batch, as torch's `default_collate` makes it. `indices`: their numbers in the source.

    `key`: the source's `sample_key`. `nulls`: None, as JSON has it, may be among text, or in its place; they become a
    list. Raises DataError where a sample is None, or has other shapes, dtypes or keys than the first one.
    """
    try:
        return collate(samples, collate_fn_map=_WITH_NULLS if nulls else _HANDLERS)
    except Exception as error:
        problem = (None if nulls else _first_none(samples, indices)) or _first_mismatch(samples, indices, key)
        if problem is None:  # strings in an array, sparse tensors
            reason = "tensors and arrays in one place" if isinstance(error, _Mismatch) else first_line(error)
            got = f"samples from {indices[0] if indices else 0} on cannot be stacked: {reason}"
            problem = Problem(got, "dense tensors, arrays or numbers", "tensors, or a source with a fetch(indices)")
        raise DataError(problem, where="the source") from None


class _Mismatch(Exception):
    """Samples differ in a way that torch would convert silently."""


def _require_same(handler: Handler, key: Callable[[Any], Any]) -> Handler:
    def handle(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
        if len({key(sample) for sample in batch}) > 1:
            raise _Mismatch
        return handler(batch, collate_fn_map=collate_fn_map)

    return handle


def _collate_dicts(batch: Sequence[Mapping[Any, Any]], *, collate_fn_map: Any = None) -> dict[Any, Any]:
    """A dict of batches. torch would take the keys of the first dict and silently drop all others."""
    if any(sample.keys() != batch[0].keys() for sample in batch):
        raise _Mismatch
    return {key: collate([sample[key] for sample in batch], collate_fn_map=collate_fn_map) for key in batch[0]}


def _collate_nulls(batch: Sequence[Any], *, collate_fn_map: Any = None) -> list[Any]:
    if not all(isinstance(value, str | None) for value in batch):
        raise _Mismatch
    return list(batch)


_dtype = operator.attrgetter("dtype")
_HANDLERS: dict[Any, Handler] = {
    **default_collate_fn_map,
    Mapping: _collate_dicts,
    Tensor: _require_same(default_collate_fn_map[Tensor], _dtype),
    np.ndarray: _require_same(default_collate_fn_map[np.ndarray], _dtype),
    # NumPy's scalars: torch registers several types under one key.
    **{
        key: _require_same(default_collate_fn_map[key], _dtype)
        for key in default_collate_fn_map
        if isinstance(key, tuple)
    },
    float: _require_same(default_collate_fn_map[float], type),
    int: _require_same(default_collate_fn_map[int], type),
}
_WITH_NULLS = {**_HANDLERS, type(None): _collate_nulls}


def _first_none(samples: Sequence[Any], indices: Sequence[int]) -> Problem | None:
    """The first sample that is None, and where."""
    for sample, index in zip(samples, indices, strict=False):
        for path, form in _leaf_forms(sample):
            if form == "None":
                need = "a pair (inputs, targets)" if not path else "a tensor there"
                return Problem(f"sample {index}{path and f': {path}'} is None", need, "a source without such samples")
    return None


def _first_mismatch(samples: Sequence[Any], indices: Sequence[int], key: Key | None) -> Problem | None:
    """The first sample that differs from the first one, and in what."""
    first = dict(_leaf_forms(samples[0]))
    for sample, index in zip(samples[1:], indices[1:], strict=False):
        form = dict(_leaf_forms(sample))
        # A null first: a list with one is no tensor, and differs in its paths too.
        for path in sorted({**first, **form}, key=lambda path: "None" not in (first.get(path), form.get(path))):
            a, b = first.get(path, "missing"), form.get(path, "missing")
            if a != b:
                names = [named_sample(each, key) for each in (indices[0], index)]
                got = f"{path or 'samples'}: {a} in {names[0]}, {b} in {names[1]}"
                if "None" in (a, b):
                    attempt = "a number in place of null, or columns= without it"
                elif "missing" in (a, b):
                    attempt = "the same keys in every sample"
                else:
                    attempt = PADDING_HINT if a.partition(" ")[2] != b.partition(" ")[2] else DTYPE_HINT
                return Problem(got, "samples of one form, so that a batch can stack them", attempt)
    return None


def _leaf_forms(sample: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if sample is None:
        yield path, "None"
    elif isinstance(sample, Tensor | np.ndarray | np.number | np.bool_):
        yield path, f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}"
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from _leaf_forms(value, f"{path}[{key!r}]")
    elif isinstance(sample, tuple | list):
        names = ("inputs", "targets") if not path and len(sample) == 2 else range(len(sample))
        for name, value in zip(names, sample, strict=True):
            yield from _leaf_forms(value, name if isinstance(name, str) else f"{path}[{name}]")
    else:
        yield path, type(sample).__name__
