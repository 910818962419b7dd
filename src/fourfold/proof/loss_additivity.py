"""Loss additivity: whether a scalar loss is the mean of the same loss over the parts of a batch.

Also for unreduced values and their mean: a value must not depend on other samples.

tolerance  how much rounding may separate the two: a forward with another number of rows rounds differently
Law: what is not a mean, such as a sum or a loss between the samples of a batch, is further off than the tolerance.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.model.loss_sum import MEND, is_uneven, uneven_problem
from fourfold.model.objective import ForwardResult
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.words.errors import Problem

# Relative to the largest of the losses, by the size in bytes of the least precise number in a forward.
LOSS_TOLERANCE = {8: 1e-8, 4: 1e-4, 2: 2e-2, 1: 1e-1}
# This fraction of the largest output counts too: a cross-entropy near 0 is rounded as its logits are.
OUTPUT_FRACTION = 1e-2


class LossComparison(NamedTuple):
    """The loss of a few samples together, and the mean of the losses of their parts, each weighted by its count."""

    full_mean: float
    parts_mean: float
    part_sizes: list[int]
    """The number of samples of each part."""
    is_comparable: bool = False
    """Whether there was anything to compare: finite numbers of some elements."""
    is_additive: bool = True
    is_uneven: bool = False
    """Whether the loss consists of several means whose counts are not proportional."""
    has_randomness: bool = False
    """Whether random numbers were drawn, so that the two differ anyway."""
    loss_names: str = ""
    is_mixed: bool = False
    """Whether the loss has, besides torch's means, other terms that differ from sample to sample."""
    is_unreduced: bool = False
    """Whether the loss is the mean of unreduced values."""
    mixes_outputs: bool = False
    """Whether the model's outputs for a sample are others in a part than among all samples."""
    is_torch_mean: bool = False
    """Whether the loss is one of torch's means."""
    change: str = ""
    """How the samples were changed, in words; empty: not at all."""

    @property
    def problem(self) -> Problem | None:
        """What is wrong with the loss, or with the model."""
        if self.is_uneven:
            return uneven_problem(self.loss_names)
        if self.is_additive or self.has_randomness:
            return None
        sizes, together = " and ".join(map(str, self.part_sizes)), f"{sum(self.part_sizes)} samples together"
        full, parts = _format_distinct(self.full_mean, self.parts_mean)
        kind = "unreduced loss values with a mean of" if self.is_unreduced else "a scalar loss of"
        if self.mixes_outputs and (self.is_unreduced or self.is_torch_mean):
            got = f"a model whose outputs for a sample change with the other samples: {kind} {full} for {together},"
            got += f" but {parts} for the same samples in parts of {sizes}"
            need = "a model in which samples do not see each other: the batch is split into parts"
            attempt = "GroupNorm or LayerNorm instead of batch statistics, attention within a sample; or dp = 1 and"
            return Problem(got, need, f"{attempt} microbatches = 1")
        got = f"{kind} {full} for {together}, but {parts} for the same samples in parts of {sizes}{self.change}"
        if self.is_unreduced:
            need = "values that depend on their own sample alone: the batch is split into parts"
            return Problem(got, need, "return (values.sum(), len(values)), which trains each part by itself")
        need = "a mean over samples, or one of torch's own means: the batch is split into parts"
        return Problem(got, need, MEND)


def compare_losses(
    full: ForwardResult, parts: Sequence[ForwardResult], *, part_sizes: list[int], min_itemsize: int, max_output: float
) -> LossComparison:
    """Compare the loss of one forward with those of its parts.

    `min_itemsize` is that of the least precise number in the forwards, `max_output` the largest output.
    """
    forwards = (full, *parts)
    losses = [(float(each.loss.total.detach()), float(each.loss.count)) for each in forwards]
    means = [_weighted_mean(losses[:1]), _weighted_mean(losses[1:]), *(_weighted_mean([each]) for each in losses)]
    comparison = LossComparison(
        means[0],
        means[1],
        part_sizes,
        is_unreduced=full.raw_loss.numel() != 1,
        is_torch_mean=all(each.is_torch_mean for each in forwards),
        loss_names=", ".join(dict.fromkeys(call.name for each in forwards for call in each.calls)),
    )
    mixes_outputs = _mixes_outputs(full, parts, part_sizes, LOSS_TOLERANCE[min_itemsize] * max_output)
    comparison = comparison._replace(mixes_outputs=mixes_outputs)
    if not all(map(math.isfinite, means)):
        # Finite only among other samples?
        is_only_full = bool(losses[0][1]) and math.isfinite(means[0])
        return comparison._replace(is_comparable=is_only_full, is_additive=False)
    tolerance = LOSS_TOLERANCE[min_itemsize] * (max(map(abs, means)) + OUTPUT_FRACTION * max_output)
    counts = [(each.loss.count, each.loss.other_count, each.loss.other_square) for each in parts]
    totals = [sum(map(float, column)) for column in zip(*counts, strict=True)]
    return comparison._replace(
        is_comparable=bool(losses[0][1]) and totals[0] > 0,
        is_additive=abs(comparison.full_mean - comparison.parts_mean) <= tolerance,
        is_uneven=is_uneven(*totals),
        is_mixed=_is_mixed(forwards, tolerance),
    )


def _format_distinct(a: float, b: float) -> list[str]:
    """Two numbers, with as many digits as it takes to distinguish them."""
    digits = next((digits for digits in range(6, 17) if f"{a:.{digits}g}" != f"{b:.{digits}g}"), 17)
    return [f"{number:.{digits}g}" for number in (a, b)]


def _weighted_mean(losses: Sequence[tuple[float, float]]) -> float:
    """The mean of losses, each a sum and a count; those without elements add nothing."""
    count = sum(num_elements for _, num_elements in losses)
    return sum(total for total, num_elements in losses if num_elements) / count if count else 0.0


def _mixes_outputs(full: ForwardResult, parts: Sequence[ForwardResult], sizes: Sequence[int], tolerance: float) -> bool:
    """Whether outputs with a row for each sample differ."""
    columns = zip(*(tree_leaves(each.outputs) for each in (full, *parts)), strict=False)
    return any(_differs(whole, pieces, sizes, tolerance) for whole, *pieces in columns)


def _differs(whole: Tensor, pieces: Sequence[Tensor], sizes: Sequence[int], tolerance: float) -> bool:
    if not whole.is_floating_point() or not whole.dim() or len(whole) % sum(sizes):
        return False
    rows = len(whole) // sum(sizes)
    kept = [piece[: size * rows] for piece, size in zip(pieces, sizes, strict=True)]
    if any(piece.shape[1:] != whole.shape[1:] for piece in kept):  # such as a similarity to each other sample
        return False
    joined = torch.cat(kept)
    if joined.shape != whole.shape:
        return False
    return bool((((joined - whole).abs() > tolerance) | (joined.isnan() != whole.isnan())).any())


def _is_mixed(forwards: Sequence[ForwardResult], tolerance: float) -> bool:
    """Whether the terms that torch's means do not explain differ between forwards. A penalty on weights does not."""
    forwards = [each for each in forwards if float(each.loss.count)]  # a mean of nothing shows nothing
    calls = [each.calls for each in forwards]
    if not calls or not all(any(call.derivative is not None for call in each) for each in calls):
        return False
    if len({len(each) for each in calls}) > 1:  # a mean for each sample: the scalar is a mean of these
        return True
    unexplained = [_unexplained_loss(each) for each in forwards]
    deviations = [
        _peak_to_peak([call.derivative or 0.0 for call in column]) * max(abs(float(call.value)) for call in column)
        for column in zip(*calls, strict=True)
    ]
    return max(_peak_to_peak(unexplained), *deviations) > tolerance


def _unexplained_loss(result: ForwardResult) -> float:
    """The part of a scalar that torch's loss functions do not explain."""
    explained = sum((call.derivative or 0.0) * float(call.value) for call in result.calls)
    return float(result.raw_loss.detach()) - explained


def _peak_to_peak(numbers: Sequence[float]) -> float:
    return max(numbers) - min(numbers)
