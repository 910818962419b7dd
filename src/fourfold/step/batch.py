"""Batches: (inputs, targets), tensors or dicts of tensors whose first dim counts samples.

A batch may also be one dict: inputs of a model that makes its own loss, without targets.
Law: the microbatches of a batch tile it, in order; there may be empty ones.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.plan.sample_order import shard_range
from fourfold.step.tensor_tree import tree_map
from fourfold.words.errors import Problem, TaskError

POSITION_KEYS = ("position_ids", "positions")


class Microbatch(NamedTuple):
    """A stretch of a batch; `tokens` is 0 where inputs carry no positions, `targets` None where there are none.

    kept  which of its tokens are no pads, where a rank has but some of a sample's tokens; None: all
    """

    inputs: Any
    targets: Any
    num_samples: int
    num_tokens: int
    real_tokens: Tensor | None = None


def split_microbatches(
    batch: Any, num_microbatches: int, device: torch.device, *, real_tokens: Tensor | None = None
) -> list[Microbatch]:
    """The batch in `count` microbatches on `device`, sizes as equal as can be, larger ones never first.

    kept: int64 [tokens], which tokens of the inputs are no pads; the targets have none. None: all.
    Raises TaskError for what is no batch of tensors or dicts of tensors with one number of samples.
    """
    inputs, targets = (_to_device(part, device) for part in unpack_batch(batch))
    samples = num_samples((inputs, targets))
    parts = []
    real_tokens = None if real_tokens is None else real_tokens.to(device)
    for index in range(num_microbatches):
        start, stop = shard_range(0, samples, num_microbatches, index)
        own = _slice_tree(inputs, start, stop)
        tokens = num_tokens(own) if real_tokens is None else (stop - start) * len(real_tokens)
        parts.append(Microbatch(own, _slice_tree(targets, start, stop), stop - start, tokens, real_tokens))
    return parts


def unpack_batch(batch: Any) -> tuple[Any, Any]:
    """The inputs and targets of a batch. A dict is inputs, the labels among them, and has no targets (None)."""
    if isinstance(batch, Mapping):
        return dict(batch), None
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        got = f"a batch of type {type(batch).__name__}"
        raise TaskError(Problem(got, 'a pair (inputs, targets), or a dict of inputs, "labels" among them'))
    return batch[0], batch[1]


def num_samples(batch: Any) -> int:
    """The first dim of all tensors of a batch. Raises TaskError where they differ, or are none."""
    inputs, targets = unpack_batch(batch)
    tensors = [*_batch_tensors(inputs), *([] if targets is None else _batch_tensors(targets))]
    if any(tensor.dim() == 0 for tensor in tensors):
        raise TaskError(Problem("a batch with a tensor without dims", "tensors whose first dim counts samples"))
    lengths = {tensor.shape[0] for tensor in tensors}
    if len(lengths) != 1:
        told = [*_first_dims("inputs", inputs), *([] if targets is None else _first_dims("targets", targets))]
        need = "one number of samples, the first dim of each tensor: a batch is cut along it"
        attempt = "samples padded to one length, instead of lists joined end to end with offsets or indices"
        raise TaskError(Problem(f"a batch with {', '.join(told) or 'no tensor'}", need, attempt), where="the batch")
    return lengths.pop()


def _first_dims(name: str, tree: Any) -> Iterator[str]:
    """The first dim of each tensor, by name."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield from _first_dims(f"{name}[{key!r}]", part)
    else:
        yield f"{len(tree)} in {name}"


def slice_samples(batch: Any, start: int, stop: int) -> tuple[Any, Any]:
    """The samples [start, stop) of a batch."""
    inputs, targets = unpack_batch(batch)
    return _slice_tree(inputs, start, stop), _slice_tree(targets, start, stop)


def subsample(batch: Any, num_picked: int) -> tuple[Any, Any]:
    """So many samples of a batch, from its first to its last at even distances."""
    places = torch.linspace(0, num_samples(batch) - 1, num_picked).long()
    return tree_map(unpack_batch(batch), lambda tensor: tensor[places.to(tensor.device)])


def batch_and_parts(batch: Any) -> tuple[Any, list[Any]]:
    """A batch and two parts of it, of different sizes. One sample makes a batch with itself."""
    samples = num_samples(batch)
    if samples == 1:
        return tree_map(batch, lambda tensor: torch.cat([tensor, tensor])), [batch, batch]
    first = max(1, samples // 3)
    return batch, [slice_samples(batch, *span) for span in ((0, first), (first, samples))]


def num_tokens(inputs: Any) -> int:
    """Elements of the positions, where the inputs are a dict with `position_ids` or `positions`; else 0."""
    positions = find_positions(inputs)
    return 0 if positions is None else positions.numel()


def find_positions(inputs: Any) -> Any:
    """The positions, where the inputs are a dict with `position_ids` or `positions`; else None."""
    if not isinstance(inputs, dict):
        return None
    return next((inputs[name] for name in POSITION_KEYS if name in inputs), None)


def has_token_dim(tensor: Tensor, length: int) -> bool:
    """Whether a tensor has something for each of `length` tokens: on dim 1."""
    return tensor.dim() >= 2 and tensor.shape[1] == length


def _batch_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _batch_tensors(part)]
    raise TaskError(Problem(f"a batch with a {type(value).__name__}", "tensors, or dicts of tensors"))


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to_device(part, device) for name, part in value.items()}
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _slice_tree(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, dict):
        return {name: _slice_tree(part, start, stop) for name, part in value.items()}
    return None if value is None else value[start:stop]


def input_names(inputs: Any) -> str:
    """The names of the inputs of a batch, or their type, for messages."""
    return ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
