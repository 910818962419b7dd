"""Sources: numbered samples, and how a batch is fetched from them.

sample   (inputs, targets) without a batch dim, or a dict of a model's inputs, the labels among them
source   a map from a number to a sample
batch    (inputs, targets) with samples on dim 0, each a tensor, or dicts, lists and tuples of tensors; or one dict
Law: `fetch(source, indices)` equals the stack of `source[i]`, with or without a `fetch` of the source's own; or what
the source's collate function makes of the samples `source[i]`.

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

from fourfold.feed.collate import Key, collate_samples, named_sample
from fourfold.torch_kit.tensor_tree import tensor_of_list
from fourfold.words.error_notes import user_frame
from fourfold.words.errors import READING, DataError, FourfoldError, Problem
from fourfold.words.task import Source

MAX_NAMED_SAMPLES = 8


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
    place = user_frame(error) or traceback.extract_tb(error.__traceback__)[-1]
    got = f"StopIteration in {Path(place.filename).name}, line {place.lineno}"
    return Problem(got, "a sample for every number below len(source)", "IndexError, or next(iterator, default)")


def _fetch(source: Source, indices: Sequence[int], before: Callable[[int], None] | None) -> Any:
    method = getattr(source, "fetch", None)
    if method is not None:
        if before is not None and len(indices):
            before(indices[0])
        batch = _read_together(source, method, indices)
        return _check_num_samples(batch, len(indices), f"fetch of {len(indices)} indices")
    numbers = list(indices) or [0]
    collate_fn, dataset = (source.collate_fn, source.dataset) if isinstance(source, CollatedSource) else (None, source)
    samples = read_samples(dataset, numbers, before)
    try:
        batch = make_batch(samples, numbers, collate_fn, key=source_attribute(source, "sample_key"))
    except Exception as error:
        add_sample_note(error, dataset, numbers)
        raise
    return batch if len(indices) else empty_like(batch)


def read_samples(dataset: Source, numbers: Sequence[int], before: Callable[[int], None] | None = None) -> list[Any]:
    """Samples of a dataset, by its `__getitems__` if it has it. An error of the dataset has a note with the sample."""
    read_many = getattr(dataset, "__getitems__", None)  # as torch's DataLoader does; `datasets` reads a table once
    if read_many is not None and before is None:
        return list(_read_together(dataset, read_many, numbers))
    samples, number = [], 0
    try:
        for number in numbers:
            if before is not None:
                before(number)
            samples.append(dataset[number])
    except Exception as error:
        add_sample_note(error, dataset, [number])
        raise
    return samples


def _read_together(source: Any, read: Callable[[Sequence[int]], Any], numbers: Sequence[int]) -> Any:
    """What `read` returns for these samples. The note of an error has the first sample that fails alone, or all."""
    try:
        return read(numbers)
    except Exception as error:
        failing = numbers if isinstance(error, FourfoldError) else _first_failing(read, numbers, type(error))
        add_sample_note(error, source, failing)
        raise


def _first_failing(
    read: Callable[[Sequence[int]], Any], numbers: Sequence[int], kind: type[Exception]
) -> Sequence[int]:
    for number in numbers:
        try:
            read([number])
        except Exception as error:
            if type(error) is kind:
                return [number]
    return numbers


def add_sample_note(error: Exception, source: Any, numbers: Sequence[int]) -> None:
    """Add to an error of the user's code which samples were being read; the innermost source knows best."""
    notes = getattr(error, "__notes__", ())
    if not isinstance(error, FourfoldError) and not any(note.startswith(READING) for note in notes):
        error.add_note(f"{READING}{sample_names(source, numbers)}")


def sample_names(source: Any, numbers: Sequence[int]) -> str:
    """Samples for people: `sample 7 (a.tar/0007) of Faces`, or `samples 7, 3 of Faces`."""
    dataset = source.dataset if isinstance(source, CollatedSource) else source
    if len(numbers) == 1:
        return f"{named_sample(numbers[0], source_attribute(source, 'sample_key'))} of {type(dataset).__name__}"
    shown = [str(number) for number in numbers[:MAX_NAMED_SAMPLES]]
    more = f" and {len(numbers) - len(shown)} more" if len(numbers) > len(shown) else ""
    return f"samples {', '.join(shown)}{more} of {type(dataset).__name__}"


def make_batch(
    samples: Sequence[Any],
    numbers: Sequence[int],
    collate_fn: Callable[[Any], Any] | None = None,
    *,
    key: Key | None = None,
) -> Any:
    """The samples as one batch: stacked, or by `collate_fn`. `numbers`: their numbers in the source, for errors.

    `key`: the source's `sample_key`.

    Raises DataError for samples that cannot be stacked, and for a batch that is neither a pair nor a dict with a row
    for each sample.
    """
    if collate_fn is None:
        checked = [_check_sample(sample, number) for sample, number in zip(samples, numbers, strict=True)]
        batch = collate_samples(checked, numbers, key=key)
        return batch if isinstance(batch, dict) else tuple(batch)
    batch = _plain(collate_fn(list(samples)))
    if not isinstance(batch, dict) and not (isinstance(batch, tuple) and len(batch) == 2):
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple) else type(batch).__name__
        need = "a pair (inputs, targets), or a dict of inputs"
        raise DataError(Problem(f"collate_fn returned a {kind}", need), where="the source")
    return _check_num_samples(batch, len(samples), f"collate_fn of {len(samples)} samples")


def _plain(value: Any) -> Any:
    """The value with dicts in place of other mappings, such as the BatchEncoding of transformers, and with tuples."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return tuple(_plain(each) for each in value)
    return value


def _check_num_samples(batch: Any, num_samples: int, what: str) -> Any:
    """A batch that `what` has returned. Raises DataError if its number of samples is not the requested one."""
    level = [batch]
    while level:
        value = level.pop()
        if isinstance(value, Mapping):
            level += value.values()
        elif isinstance(value, tuple | list):
            level += value
        elif isinstance(value, Tensor) and value.dim() and len(value) != num_samples:
            got = f"{what} returned a tensor of {list(value.shape)}"
            need = f"a first dim of {num_samples}, a row for each sample"
            raise DataError(Problem(got, need, "one row for each sample: ranks read parts of a batch"))
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
            attempt = f"samples without {name!r} (datasets: remove_columns), or a DataLoader with a collate_fn"
            problems.append(Problem(got, "tensors, arrays or numbers", attempt))
    if not sample:
        problems.append(Problem(f"sample {index} is an empty dict", "the inputs of a model"))
    if problems:
        raise DataError(problems, where="the source")
    return checked


def _as_tensor(values: Sequence[Any]) -> Tensor | None:
    try:
        return tensor_of_list(values)
    except (TypeError, ValueError, RuntimeError):
        return None


class CollatedSource:
    """A dataset and the function that makes a batch of its samples: called once for each local batch."""

    def __init__(self, dataset: Source, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Any:
        return self.dataset[index]


def source_attribute(source: Any, name: str) -> Any:
    """What a source may have besides its samples, such as `shard_sizes`; None if it has not."""
    return getattr(source.dataset if isinstance(source, CollatedSource) else source, name, None)


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


class TokenRow(Protocol):
    """Tokens laid end to end, such as a `Corpus` of bytes."""

    def __len__(self) -> int: ...

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray: ...


def read_rows(
    ends: np.ndarray,
    starts: Sequence[int] | np.ndarray,
    length: int,
    dtype: type[np.integer[Any]],
    read: Callable[[int, int, int], np.ndarray],
) -> np.ndarray:
    """Rows of `length` tokens from each of B starts, of parts that end at these tokens: [B, length].

    `read(part, first, count)` gives tokens of one part. Raises IndexError outside the parts.
    """
    offsets, num_tokens = np.asarray(starts, dtype=np.int64), int(ends[-1]) if len(ends) else 0
    if offsets.size and (offsets.min() < 0 or offsets.max() + length > num_tokens):
        raise IndexError(f"tokens up to {int(offsets.max()) + length} asked of {num_tokens}")
    rows = np.empty((offsets.size, length), dtype=dtype)
    parts = np.searchsorted(ends, offsets, side="right")
    for row, part, offset in zip(rows, parts.tolist(), offsets.tolist(), strict=True):
        filled = 0
        while filled < length:
            end, at = int(ends[part]), offset + filled
            count = min(length - filled, end - at)
            row[filled : filled + count] = read(part, at - (int(ends[part - 1]) if part else 0), count)
            filled, part = filled + count, part + 1
    return rows


class TokenSource:
    """A corpus in samples of `length` tokens; the target of each token is the next one.

    corpus        the tokens: bytes, one token each, or those of a tokenizer
    length        L, tokens of one sample
    num_samples   the most samples, spread evenly over the corpus; None for all

    A sample is ({"tokens": int64 [L], "positions": int64 [L]}, targets int64 [L]). Raises DataError if the
    corpus is shorter than one sample and its last target.
    """

    def __init__(self, corpus: TokenRow, *, length: int, num_samples: int | None = None) -> None:
        if problem := corpus_problem(corpus, length=length, name=getattr(corpus, "name", "corpus"), unit="tokens"):
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


def corpus_problem(corpus: TokenRow, *, length: int, name: str, unit: str = "bytes") -> Problem | None:
    """The problem of a corpus too short for `length` tokens and their last target; None if it is long enough."""
    if len(corpus) > length:
        return None
    attempt = f"length={len(corpus) - 1}, or more text" if len(corpus) > 1 else "more text"
    return Problem(f"{name} has {len(corpus)} {unit}", f"{length + 1}, for one sample of length {length}", attempt)


def empty_like(values: Any) -> Any:
    """A batch without samples, in the shapes of another one."""
    return map_leaves(values, lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.dim() else leaf)


def map_leaves(values: Any, function: Callable[[Any], Any]) -> Any:
    """A batch with `function` applied to each leaf of its dicts, lists and tuples."""
    if isinstance(values, dict):
        return {name: map_leaves(value, function) for name, value in values.items()}
    if isinstance(values, list | tuple):
        parts = [map_leaves(value, function) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    return function(values)


def pin_batch(batch: Any) -> Any:
    """The batch in pinned memory, from which copies to a GPU overlap with its work; without a GPU as it is."""
    if not torch.cuda.is_available():
        return batch
    return map_leaves(batch, lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf)
