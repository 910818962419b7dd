"""Sources: numbered samples, and how a batch is fetched from them.

sample   (inputs, targets) without a batch dim, or a dict of a model's inputs, the labels among them
source   a map from a number to a sample
batch    (inputs, targets) with samples on dim 0, inputs a tensor or a dict of tensors; or one dict of tensors
Law: `fetch(source, indices)` equals the stack of `source[i]`, with or without a `fetch` of the source's own.

B batch · L sequence length
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fourfold.feed.collate import collate_samples
from fourfold.feed.corpus import Corpus
from fourfold.words.errors import DataError, Problem
from fourfold.words.task import Source


class BatchSource(Source, Protocol):
    """A source that reads a whole batch at once, cheaper than sample by sample."""

    def fetch(self, indices: Sequence[int], /) -> Any: ...


def fetch(source: Source, indices: Sequence[int], *, before_sample: Callable[[int], None] | None = None) -> Any:
    """The batch of these samples, in this order: by `source.fetch` if the source has it, else stacked samples.

    No indices give a batch of no samples with the right shapes. `before_sample(i)` is called before `source[i]`, or
    before `source.fetch` with its first index. Raises DataError if the source raises StopIteration, which would
    silently end a generator that reads it.
    """
    try:
        return _fetch(source, indices, before_sample)
    except StopIteration as error:
        raise DataError(_stop_iteration_problem(error), where="the source") from error


def _stop_iteration_problem(error: StopIteration) -> Problem:
    place = traceback.extract_tb(error.__traceback__)[-1]
    got = f"StopIteration in {Path(place.filename).name}, line {place.lineno}"
    return Problem(got, "a sample for every number below len(source)", "IndexError, or next(iterator, default)")


def _fetch(source: Source, indices: Sequence[int], before: Callable[[int], None] | None) -> Any:
    method = getattr(source, "fetch", None)
    if method is not None:
        if before is not None and len(indices):
            before(indices[0])
        return _check_num_samples(method(indices), len(indices))
    samples = []
    for index in indices or [0]:
        if before is not None:
            before(index)
        samples.append(_check_sample(source[index], index))
    batch = collate_samples(samples, indices)
    batch = batch if isinstance(batch, dict) else tuple(batch)
    return batch if len(indices) else _empty_like(batch)


def _check_num_samples(batch: Any, num_samples: int) -> Any:
    """The batch of a source's own `fetch`. Raises DataError if its number of samples is not the requested one."""
    level = [batch]
    while level:
        value = level.pop()
        if isinstance(value, Mapping):
            level += value.values()
        elif isinstance(value, tuple | list):
            level += value
        elif isinstance(value, Tensor) and value.dim() and len(value) != num_samples:
            got = f"fetch of {num_samples} indices returned a tensor of {list(value.shape)}"
            need = f"a first dim of {num_samples}, a row for each index"
            raise DataError(Problem(got, need, "one sample for each index: ranks fetch parts of a batch"))
    return batch


def _check_sample(sample: Any, index: int) -> Any:
    """A sample that can be collated. Raises DataError if it is neither a pair nor a dict of numbers."""
    if isinstance(sample, Mapping):
        return _convert_dict_sample(sample, index)
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return tuple(sample)
    if sample is None:
        return None  # `collate_samples` reports it
    kind = type(sample).__name__
    got = f"{kind} of {len(sample)}" if isinstance(sample, tuple | list) else kind
    attempt = "source[i] = (x, y), or {'input_ids': …, 'labels': …} with loss=None"
    problem = Problem(f"sample {index} is a {got}", "a pair (inputs, targets), or a dict of inputs", attempt)
    raise DataError(problem, where="the source")


def _convert_dict_sample(sample: Mapping[Any, Any], index: int) -> dict[str, Any]:
    """The sample with its lists of numbers as tensors: torch collates lists to one tensor per position."""
    checked, problems = {}, []
    for name, value in sample.items():
        if isinstance(value, Tensor | np.ndarray | np.number | np.bool_ | bool | int | float):
            checked[name] = value
        elif isinstance(value, list | tuple) and (numbers := _as_tensor(value)) is not None:
            checked[name] = numbers
        else:
            got = f"sample {index} has a {type(value).__name__} as {name!r}"
            problems.append(Problem(got, "tensors, arrays or numbers", f"samples without {name!r}, or with numbers"))
    if not sample:
        problems.append(Problem(f"sample {index} is an empty dict", "the inputs of a model"))
    if problems:
        raise DataError(problems, where="the source")
    return checked


def _as_tensor(values: Sequence[Any]) -> Tensor | None:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None


class TensorSource:
    """Samples held in memory: rows of `inputs` and `targets`."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def fetch(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return self.inputs[rows], self.targets[rows]


class TokenSource:
    """A corpus of bytes in samples of `length` tokens; the target of each token is the next one.

    corpus        the bytes, one token each
    length        L, tokens of one sample
    num_samples   the most samples, spread evenly over the corpus; None for all

    A sample is ({"tokens": int64 [L], "positions": int64 [L]}, targets int64 [L]). Raises DataError if the
    corpus is shorter than one sample and its last target.
    """

    def __init__(self, corpus: Corpus, *, length: int, num_samples: int | None = None) -> None:
        if problem := corpus_problem(corpus, length=length, name="corpus"):
            raise DataError(problem)
        self.corpus, self.length = corpus, length
        self.num_full_samples = (len(corpus) - 1) // length
        self.num_samples = self.num_full_samples if num_samples is None else min(num_samples, self.num_full_samples)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets = self.fetch([index])
        return {name: values[0] for name, values in inputs.items()}, targets[0]

    def fetch(self, indices: Sequence[int], /) -> tuple[dict[str, Tensor], Tensor]:
        rows = torch.from_numpy(self.corpus.read(self.sample_starts(indices), self.length + 1)).to(torch.int64)
        positions = torch.arange(self.length).expand(len(rows), -1).contiguous()
        return {"tokens": rows[:, :-1].contiguous(), "positions": positions}, rows[:, 1:].contiguous()

    def sample_starts(self, indices: Sequence[int]) -> np.ndarray:
        """The first byte of each sample: int64 [B]. Raises IndexError outside [0, num_samples)."""
        numbers = np.asarray(indices, dtype=np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.num_samples):
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} asked of {self.num_samples}")
        return numbers * self.num_full_samples // self.num_samples * self.length


def corpus_problem(corpus: Corpus, *, length: int, name: str) -> Problem | None:
    """The problem of a corpus too short for `length` tokens and their last target; None if it is long enough."""
    if len(corpus) > length:
        return None
    attempt = f"length={len(corpus) - 1}, or more text" if len(corpus) > 1 else "more text"
    return Problem(f"{name} has {len(corpus)} bytes", f"{length + 1}, for one sample of length {length}", attempt)


def _empty_like(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _empty_like(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_empty_like(value) for value in values)
    return values[:0]
