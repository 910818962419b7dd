"""Loss divisors: what a scalar loss was divided by, read from autograd's graph.

divisor  a scalar that is not trained: `mask.sum()` in `values.sum() / mask.sum()`, or the number of elements of a mean
fixed    a divisor that does not change with the number of samples: the 2 of `(a + b) / 2`
Law: a hand-written mean adds up as long as its divisors are proportional to the weights of the parts of a batch, and
its fixed divisors are the same for all parts.

Only the final nodes are read (`loss_graph.py`). A division further back, such as by weights that sum to 1, is not
found; nor is one whose saved tensors lie elsewhere, as with checkpointing.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fourfold.parts.data.sharded_params import SavedTensor
from fourfold.parts.torch_private import packed_divisor, saved_dims, saved_input_numel, saved_input_shape
from fourfold.step.dry_run.loss_graph import DIV_NODE, MEAN_NODES, final_nodes
from fourfold.step.torch_losses import Count


class LossDivisors:
    """The divisors of a scalar loss. A dry run shows which of them are fixed."""

    def __init__(self) -> None:
        self._observed: list[tuple[int, list[float]]] = []
        self._scales: list[tuple[bool, float]] | None = None
        """For each divisor: whether it is fixed, and its value (if fixed) or its value per sample. None: not known."""

    @property
    def has_divisors(self) -> bool:
        return bool(self._scales)

    def reset(self) -> None:
        """Forget what was recorded: another dry run begins."""
        self._observed = []

    def record(self, value: Tensor, num_samples: int) -> None:
        """Record the divisors of the loss of so many samples."""
        self._observed.append((num_samples, [float(divisor) for divisor in find_divisors(value)]))

    def summarize(self) -> list[tuple[bool, float]] | None:
        """What this rank has recorded, ready for JSON. None: the forwards do not agree, or there were none."""
        if not self._observed or len({len(divisors) for _, divisors in self._observed}) > 1:
            return None
        has_several_sizes = len({samples for samples, _ in self._observed}) > 1
        samples, largest = max(self._observed, key=lambda each: each[0])
        columns = zip(*(divisors for _, divisors in self._observed), strict=True)
        fixed = [has_several_sizes and len(set(column)) == 1 for column in columns]
        return [(is_fixed, d if is_fixed else d / samples) for is_fixed, d in zip(fixed, largest, strict=True)]

    def merge_ranks(self, by_rank: Sequence[Sequence[tuple[bool, float]] | None]) -> None:
        """Take over the summaries of all ranks. A divisor is fixed if it is fixed on every rank."""
        summaries = [summary for summary in by_rank if summary is not None]
        if not summaries:
            return
        self._scales = None
        if len({len(summary) for summary in summaries}) == 1:
            # `min` prefers a rank on which the divisor is not fixed, and takes its scale.
            self._scales = [
                (bool(is_fixed), float(scale)) for is_fixed, scale in map(min, zip(*summaries, strict=True))
            ]

    def proportional_counts(self, value: Tensor, count: Count) -> list[Count]:
        """For each divisor, a number that must be proportional to `count`, the weight of this part of the batch."""
        divisors, scales = find_divisors(value), self._scales
        if scales is None or len(scales) != len(divisors):
            return divisors
        scaled = [(d / scale if scale else d, is_fixed) for d, (is_fixed, scale) in zip(divisors, scales, strict=True)]
        return [divisor * count if is_fixed else divisor for divisor, is_fixed in scaled]


def find_divisors(value: Tensor) -> list[Count]:
    """What a scalar was divided by, in an order that is the same for the same operations."""
    found: list[Count] = []
    for node, name in final_nodes(value.grad_fn):
        if name == DIV_NODE:
            found += _scalar_divisor(node)
        # For a single sample, the mean over all other dims is a scalar too: what counts is which dims were reduced.
        elif name == "MeanBackward0" or (name in MEAN_NODES and len(saved_dims(node)) == len(saved_input_shape(node))):
            found.append(float(saved_input_numel(node)))
    return found


def _scalar_divisor(node: Any) -> list[Count]:
    """The divisor of a division, if it is a scalar that is in memory: unpacking a saved tensor may recompute it."""
    if node.next_functions[1][0] is not None:  # the divisor is trained too
        return []
    divisor = packed_divisor(node)
    divisor = divisor.tensor if isinstance(divisor, SavedTensor) else divisor
    if not isinstance(divisor, Tensor) or divisor.dim():
        return []
    return [float(divisor) if divisor.is_cpu else divisor.detach().double()]
