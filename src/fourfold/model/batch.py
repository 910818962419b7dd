"""Batches: (inputs, targets), each a tree of tensors whose first dim counts samples: a tensor, or dicts, lists and
tuples of tensors.

A batch may also be one dict: the inputs of a model that returns its own loss, without targets.

Law: the microbatches of a batch tile it, in order; some may be empty.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.orders.sample_order import shard_range
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import Problem, TaskError

POSITION_KEYS = ("position_ids", "positions")
TOKEN_KEYS = (*POSITION_KEYS, "input_ids", "tokens")


class Microbatch(NamedTuple):
    """Consecutive samples of a batch.

    targets      None if the batch has none
    num_tokens   0 if the inputs have none
    real_tokens  int64, the indices of the tokens that are not padding, if the rank has a shard of the tokens; None: all
    draw_seed    of what a model on several stages draws (`axes/pipeline/work/chain.py`)
    """

    inputs: Any
    targets: Any
    num_samples: int
    num_tokens: int
    real_tokens: Tensor | None = None
    draw_seed: int = 0


NO_SAMPLES = Microbatch(None, None, 0, 0)


def split_microbatches(
    batch: Any, num_microbatches: int, device: torch.device, *, real_tokens: Tensor | None = None
) -> list[Microbatch]:
    """Split a batch into microbatches on `device`, as equal in size as possible, larger ones last.

    `real_tokens`: int64, the indices of the input tokens that are not padding (targets have no padding); None: all.
    Raises TaskError unless the batch consists of trees of tensors with one number of samples.
    """
    inputs, targets = tree_map(unpack_batch(batch), lambda tensor: tensor.to(device, non_blocking=True))
    samples = num_samples((inputs, targets))
    microbatches = []
    real_tokens = None if real_tokens is None else real_tokens.to(device)
    for index in range(num_microbatches):
        start, stop = shard_range(0, samples, num_microbatches, index)
        part = slice_samples((inputs, targets), start, stop)
        tokens = num_tokens(part[0]) if real_tokens is None else (stop - start) * len(real_tokens)
        microbatches.append(Microbatch(*part, stop - start, tokens, real_tokens))
    return microbatches


def unpack_batch(batch: Any) -> tuple[Any, Any]:
    """The inputs and targets of a batch. A dict is the inputs, with the labels among them; its targets are None."""
    if isinstance(batch, Mapping):
        return dict(batch), None
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        got = f"a batch of type {type(batch).__name__}"
        raise TaskError(Problem(got, 'a pair (inputs, targets), or a dict of inputs, "labels" among them'))
    return batch[0], batch[1]


def num_samples(batch: Any) -> int:
    """The first dim of all tensors of a batch. Raises TaskError if they differ, and for anything else than tensors."""
    inputs, targets = unpack_batch(batch)
    leaves = dict([*named_values("inputs", inputs), *([] if targets is None else named_values("targets", targets))])
    for name, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            got, need = f"{name} of type {type(leaf).__name__}", "tensors, or dicts, lists or tuples of them"
            is_array = hasattr(leaf, "__array__")
            attempt = f"torch.as_tensor({name})" if is_array else "numbers in its place, or samples without it"
            raise TaskError(Problem(got, need, attempt), where="the batch")
        if leaf.dim() == 0:
            need = "tensors whose first dim counts samples"
            raise TaskError(Problem(f"{name}, a tensor without dims", need), where="the batch")
    lengths = {len(leaf) for leaf in leaves.values()}
    if len(lengths) != 1:
        sizes = ", ".join(f"{len(leaf)} in {name}" for name, leaf in leaves.items())
        need = "one number of samples, the first dim of each tensor: batches are split along it"
        attempt = "samples padded to one length, instead of lists joined end to end with offsets or indices"
        raise TaskError(Problem(f"a batch with {sizes or 'no tensor'}", need, attempt), where="the batch")
    return lengths.pop()


def named_values(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """What a batch has in its dicts, lists and tuples, with its place."""
    if isinstance(tree, dict | list | tuple):
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named_values(f"{name}[{key!r}]", part)
    else:
        yield name, tree


def slice_samples(batch: Any, start: int, stop: int) -> tuple[Any, Any]:
    """The samples [start, stop) of a batch."""
    return tree_map(unpack_batch(batch), lambda tensor: tensor[start:stop])


def subsample(batch: Any, num_picked: int) -> tuple[Any, Any]:
    """`num_picked` samples of a batch, evenly spaced from the first to the last."""
    indices = torch.linspace(0, num_samples(batch) - 1, num_picked).long()
    return tree_map(unpack_batch(batch), lambda tensor: tensor[indices.to(tensor.device)])


def batch_and_parts(batch: Any) -> tuple[Any, list[Any]]:
    """A batch and two parts of it, of different sizes. A single sample is doubled first."""
    samples = num_samples(batch)
    if samples == 1:
        return tree_map(batch, lambda tensor: torch.cat([tensor, tensor])), [batch, batch]
    first = max(1, samples // 3)
    return batch, [slice_samples(batch, *span) for span in ((0, first), (first, samples))]


def repeated_and_parts(batch: Any, num_repeated: int) -> tuple[Any, list[Any]]:
    """A batch with its first samples once more, and two parts of it: these samples, and all others with them again.

    So there are several samples of one class, in one part fewer than in all. A single sample is doubled first.
    """
    if num_samples(batch) == 1:
        batch = tree_map(batch, lambda tensor: torch.cat([tensor, tensor]))
    repeated = tree_map(unpack_batch(batch), lambda tensor: torch.cat([tensor, tensor[:num_repeated]]))
    samples = num_samples(repeated)
    return repeated, [slice_samples(repeated, *span) for span in ((0, num_repeated), (num_repeated, samples))]


def shorten(batch: Any, num_kept: int) -> Any:
    """`num_kept` successive tokens of each sample, where most targets are; None: it has no more tokens than that.

    Tokens are dim 1 of one of TOKEN_KEYS of the inputs, or of inputs [N, L] of integers.
    """
    inputs, targets = unpack_batch(batch)
    named = inputs if isinstance(inputs, Mapping) else {"tokens": inputs}
    tokens = next((named[key] for key in TOKEN_KEYS if isinstance(named.get(key), Tensor)), None)
    if tokens is None or tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] <= num_kept:
        return None
    length = tokens.shape[1]
    labels = [t for t in tree_leaves((named.get("labels"), targets)) if has_token_dim(t, length)]
    start = 0
    if labels and not labels[0].is_floating_point() and labels[0].dim() == 2:
        counts = (labels[0] >= 0).sum(0).cumsum(0)  # what is ignored is mostly negative
        start = int((counts[num_kept - 1 :] - torch.cat([counts.new_zeros(1), counts[:-num_kept]])).argmax())

    def window(tensor: Tensor) -> Tensor:
        if not has_token_dim(tensor, length):
            return tensor
        kept = tensor[:, start : start + num_kept]
        return kept[:, :, start : start + num_kept] if is_square_mask(tensor) else kept

    return tree_map((inputs, targets), window)


def num_tokens(inputs: Any) -> int:
    """The number of tokens, padding included, if the inputs are a dict that shows it; else 0.

    Ids and positions have an element for each token, embeddings a last dim of features. A model that hears or sees has
    tokens only in its labels: integers of two dims.
    """
    given = inputs.items() if isinstance(inputs, dict) else ()
    named = {name: each for name, each in given if isinstance(each, Tensor)}
    for name in TOKEN_KEYS:
        if name in named:
            return named[name].numel()
    if "inputs_embeds" in named:
        return named["inputs_embeds"].shape[:-1].numel()
    labels = named.get("labels")
    return labels.numel() if labels is not None and labels.dim() == 2 and not labels.is_floating_point() else 0


def num_targets(batch: Any) -> int:
    """The elements of the targets, ignored ones included; of the labels in a batch without targets."""
    inputs, targets = unpack_batch(batch)
    return sum(leaf.numel() for leaf in tree_leaves(inputs.get("labels") if targets is None else targets))


def find_positions(inputs: Any) -> Any:
    """The positions, if the inputs are a dict with `position_ids` or `positions`; else None."""
    if not isinstance(inputs, dict):
        return None
    return next((inputs[name] for name in POSITION_KEYS if name in inputs), None)


def has_token_dim(tensor: Tensor, length: int) -> bool:
    """Whether dim 1 of a tensor counts `length` tokens."""
    return tensor.dim() >= 2 and tensor.shape[1] == length


def is_square_mask(tensor: Tensor) -> bool:
    """Whether a token tensor is a mask [B, L, L] and not L features: an additive mask is never positive."""
    if tensor.dim() != 3 or tensor.shape[1] != tensor.shape[2]:
        return False
    return tensor.dtype == torch.bool or (tensor.is_floating_point() and not bool((tensor > 0).any()))


def input_names(inputs: Any) -> str:
    """The names of the inputs of a batch, or their type, for messages."""
    return ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
