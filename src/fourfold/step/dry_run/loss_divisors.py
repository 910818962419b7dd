"""Divisors: what a loss that is one number was divided by, as autograd has recorded it.

divisor  one number that is not trained: `mask.sum()` of `values.sum() / mask.sum()`, or the elements of a mean
fixed    a divisor that is the same for samples however many: the 2 of `(a + b) / 2`
Law: a mean made by hand adds up while its divisors are in one proportion to the weights of the parts of a batch, and
those that are fixed are the same for all of them.

Only the last steps of autograd are read, back to what is no sum, multiple or quotient. What is divided before, such as
weights that sum to 1, and what is saved elsewhere, as checkpointing does, is not seen.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fourfold.parts.data.sharded_params import SavedTensor
from fourfold.parts.torch_private import packed_divisor, saved_dims, saved_input_numel, saved_input_shape
from fourfold.step.torch_losses import Count

MAX_NODES = 32  # that are read at most: reading them takes time in each forward
DIV_NODE = "DivBackward0"
MEAN_NODES = {"MeanBackward0", "MeanBackward1"}
# Behind these stands the same loss, or a sum of several.
TRANSPARENT_NODES = {
    f"{name}Backward{number}"
    for name in (
        *("Add", "Sub", "Mul", "Neg", "Sum", "NanToNum", "Where", "MaskedFill"),
        *("Stack", "Cat", "Unbind", "Select", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Alias"),
        *("ToCopy", "Clone", "Expand", "Permute", "Transpose"),
    )
    for number in range(5)
}


class LossDivisors:
    """The divisors of a number. Which of them are fixed is learned from a dry run."""

    def __init__(self) -> None:
        self._observed: list[tuple[int, list[float]]] = []
        self._scales: list[tuple[bool, float]] | None = None
        """Of each divisor: whether it is fixed; and itself, or what it is for one sample. None: not known."""

    @property
    def has_divisors(self) -> bool:
        return bool(self._scales)

    def reset(self) -> None:
        """Forget what was noted: another dry run begins."""
        self._observed = []

    def record(self, value: Tensor, num_samples: int) -> None:
        """Note those of a number that was made of so many samples."""
        self._observed.append((num_samples, [float(each) for each in find_divisors(value)]))

    def summarize(self) -> list[tuple[bool, float]] | None:
        """What was noted on this rank, in JSON; None: nothing that can be told."""
        tried = self._observed
        if not tried or len({len(each) for _, each in tried}) > 1:
            return None
        several = len({samples for samples, _ in tried}) > 1
        samples, most = max(tried, key=lambda each: each[0])
        fixed = [several and len(set(column)) == 1 for column in zip(*(each for _, each in tried), strict=True)]
        return [(is_fixed, d if is_fixed else d / samples) for is_fixed, d in zip(fixed, most, strict=True)]

    def merge_ranks(self, by_rank: Sequence[Sequence[tuple[bool, float]] | None]) -> None:
        """Take over what all ranks have found: fixed is what is so on each of them."""
        known = [found for found in by_rank if found is not None]
        if not known:
            return
        self._scales = None
        if known and len({len(found) for found in known}) == 1:
            # Of a divisor that is not fixed everywhere the scale is that of a rank where it is not.
            self._scales = [
                (bool(f), float(scale)) for f, scale in (min(column) for column in zip(*known, strict=True))
            ]

    def proportional_counts(self, value: Tensor, count: Count) -> list[Count]:
        """What must be in proportion to `count`, the weight of this part, for each divisor of the number."""
        found, scales = find_divisors(value), self._scales
        if scales is None or len(scales) != len(found):
            return found
        scaled = [(d / scale if scale else d, is_fixed) for d, (is_fixed, scale) in zip(found, scales, strict=True)]
        return [divisor * count if is_fixed else divisor for divisor, is_fixed in scaled]


def find_divisors(value: Tensor) -> list[Count]:
    """What a number was divided by, in an order that is the same for the same steps."""
    found: list[Count] = []
    for node, name in _walk_final_nodes(value.grad_fn):
        if name == DIV_NODE:
            found += _scalar_divisor(node)
        # Of a tensor with one sample the mean over its other dims is one number too: what counts is the dims.
        elif name == "MeanBackward0" or (name in MEAN_NODES and len(saved_dims(node)) == len(saved_input_shape(node))):
            found.append(float(saved_input_numel(node)))
    return found


def final_nodes(node: Any) -> list[Any]:
    """The last steps of autograd up to this one: those that made one number of others, and those before them."""
    return [step for step, _ in _walk_final_nodes(node)]


def _walk_final_nodes(node: Any) -> list[tuple[Any, str]]:
    found, ahead = [], [node]
    while ahead and len(found) < MAX_NODES:
        node = ahead.pop()
        if node is None:
            continue
        name = node.name()
        found.append((node, name))
        if name in TRANSPARENT_NODES:
            ahead += [behind for behind, _ in reversed(node.next_functions)]
        elif name == DIV_NODE or name in MEAN_NODES:
            ahead.append(node.next_functions[0][0])
    return found


def _scalar_divisor(node: Any) -> list[Count]:
    """The divisor of a division, where it is one number that is at hand: unpacking it may compute it anew."""
    if node.next_functions[1][0] is not None:  # it is trained too
        return []
    divisor = packed_divisor(node)
    divisor = divisor.tensor if isinstance(divisor, SavedTensor) else divisor
    if not isinstance(divisor, Tensor) or divisor.dim():
        return []
    return [float(divisor) if divisor.is_cpu else divisor.detach().double()]
