"""Loss additivity: whether a scalar loss is the mean of the same loss over the parts of a batch.

Also for unreduced values and their mean: a value must not depend on other samples.

tolerance  how much rounding may separate the two: a forward with another number of rows rounds differently
Law: what is not a mean, such as a sum or a loss between the samples of a batch, is further off than the tolerance.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fourfold.step.objective import ForwardResult
from fourfold.step.uneven_means import is_uneven, uneven_problem
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
    is_manual_mean: bool = False
    """Whether the loss is a sum of torch's that the user divided by its own count, and adds up as such."""
    is_uneven: bool = False
    """Whether the loss consists of several means whose counts are not proportional."""
    has_randomness: bool = False
    """Whether random numbers were drawn, so that the two differ anyway."""
    loss_names: str = ""
    is_mixed: bool = False
    """Whether the loss has, besides torch's means, other terms that differ from sample to sample."""
    divided_by: float | None = None
    """If the loss is a sum of torch's that the user divided: the divisor per sample. Else None."""
    is_unreduced: bool = False
    """Whether the loss is the mean of unreduced values."""
    kinks: Sequence[str] = ()
    """The functions with a kink that a mean over the batch passes through."""

    @property
    def kink_problem(self) -> Problem | None:
        """What is wrong with a scalar that is no multiple of a mean, though it may look like one."""
        if not self.kinks:
            return None
        got = f"a scalar loss: a mean over the batch that passes through {', '.join(dict.fromkeys(self.kinks))}"
        need = "sums and multiples of means: later, one part may be beyond the kink while the full batch is not"
        attempt = "the function on unreduced values; or (loss * n, n), which trains the mean of the parts' losses"
        return Problem(got, need, attempt)

    @property
    def problem(self) -> Problem | None:
        """What is wrong with the loss, unless it is a manual mean."""
        if self.is_uneven:
            return uneven_problem(self.loss_names)
        if self.is_additive or self.has_randomness:
            return None
        sizes = " and ".join(map(str, self.part_sizes))
        full, parts = _format_distinct(self.full_mean, self.parts_mean)
        if self.is_unreduced:
            got = f"unreduced loss values with a mean of {full} for {sum(self.part_sizes)} samples together"
            got += f", but {parts} for the same samples in parts of {sizes}"
            need = "values that depend on their own sample alone, in model and loss: the batch is split into parts"
            attempt = "GroupNorm instead of batch statistics; (values.sum(), len(values)) trains each part by itself"
            return Problem(got, need, attempt)
        got = f"a scalar loss of {full} for {sum(self.part_sizes)} samples together"
        got += f", but {parts} as the mean for the same samples in parts of {sizes}"
        need = "a mean over samples, or over what torch's loss functions count: the batch is split into parts"
        attempt = "unreduced values, or a pair (sum, count); (loss * n, n) trains the mean of the parts' losses"
        return Problem(got, need, attempt)


def compare_losses(
    full: ForwardResult, parts: Sequence[ForwardResult], *, part_sizes: list[int], min_itemsize: int, max_output: float
) -> LossComparison:
    """Compare the loss of one forward with those of its parts.

    `min_itemsize` is that of the least precise number in the forwards, `max_output` the largest output.
    """
    forwards = (full, *parts)
    losses = [_WeightedLoss(float(each.loss.total.detach()), float(each.loss.count)) for each in forwards]
    comparison = LossComparison(
        _weighted_mean(losses[:1]), _weighted_mean(losses[1:]), part_sizes, is_unreduced=full.raw_loss.numel() != 1
    )
    # A kink for each sample, as in a loop over samples, is none of a mean: then the full batch has more than a part.
    if len({len(each.kinks) for each in forwards}) == 1 and sum(part_sizes) > 1:
        comparison = comparison._replace(kinks=full.kinks)

    def tolerance(means: Sequence[float]) -> float:
        return LOSS_TOLERANCE[min_itemsize] * (max(map(abs, means)) + OUTPUT_FRACTION * max_output)

    is_manual_mean = _is_manual_mean([_manual_sums(each) for each in forwards], tolerance)
    means = [comparison.full_mean, comparison.parts_mean, *(_weighted_mean([each]) for each in losses)]
    if not all(map(math.isfinite, means)):
        if not is_manual_mean and losses[0].num_elements and math.isfinite(comparison.full_mean):
            return comparison._replace(is_comparable=True, is_additive=False)  # finite only among other samples
        return comparison._replace(is_comparable=is_manual_mean, is_manual_mean=is_manual_mean, is_additive=False)
    counts = [(each.loss.count, each.loss.other_count, each.loss.other_square) for each in parts]
    totals = [sum(map(float, column)) for column in zip(*counts, strict=True)]
    comparison = comparison._replace(is_mixed=_is_mixed(forwards, tolerance(means)))
    if not is_manual_mean:
        divisor = _divided_by(forwards, [sum(part_sizes), *part_sizes], tolerance(means))
        comparison = comparison._replace(divided_by=divisor)
    return comparison._replace(
        is_comparable=bool(losses[0].num_elements) and totals[0] > 0,
        is_additive=abs(comparison.full_mean - comparison.parts_mean) <= tolerance(means),
        is_manual_mean=is_manual_mean,
        is_uneven=is_uneven(*totals),
    )


class _WeightedLoss(NamedTuple):
    """A loss as a sum over elements."""

    total: float
    num_elements: float


class _ManualSums(NamedTuple):
    """A scalar times the count of torch's sum, and that sum. They are equal if the scalar is sum / count."""

    by_value: _WeightedLoss
    by_sum: _WeightedLoss


def _format_distinct(a: float, b: float) -> list[str]:
    """Two numbers, with as many digits as it takes to distinguish them."""
    digits = next((digits for digits in range(6, 17) if f"{a:.{digits}g}" != f"{b:.{digits}g}"), 17)
    return [f"{number:.{digits}g}" for number in (a, b)]


def _weighted_mean(losses: Sequence[_WeightedLoss]) -> float:
    """The mean of losses; those without elements add nothing."""
    count = sum(loss.num_elements for loss in losses)
    return sum(loss.total for loss in losses if loss.num_elements) / count if count else 0.0


def _is_manual_mean(sums: Sequence[_ManualSums | None], tolerance: Callable[[Sequence[float]], float]) -> bool:
    """Whether the scalar of each forward is a sum of torch's divided by its count, and these means add up."""
    known = [each for each in sums if each is not None]
    if len(known) < len(sums):
        return False
    by_value = [each.by_value for each in known]
    means = [
        _weighted_mean(by_value[:1]),
        _weighted_mean(by_value[1:]),
        *(_weighted_mean([loss]) for loss in by_value),
    ]
    excess = [abs(a.total - b.total) - b.num_elements * tolerance(means) for a, b in known]
    return known[0].by_sum.num_elements > 0 and max(excess) <= 0.0 and abs(means[0] - means[1]) <= tolerance(means)


def _manual_sums(result: ForwardResult) -> _ManualSums | None:
    """None if the loss is no scalar, or is not made of sums of torch's alone."""
    calls = result.calls
    if result.raw_loss.numel() != 1 or not calls or any(call.is_mean for call in calls):
        return None
    count, value = float(calls[0].count), float(result.raw_loss.detach())
    by_value = _WeightedLoss(value * count if count else 0.0, count)
    return _ManualSums(by_value, _WeightedLoss(float(calls[0].value.detach()), count))


def _is_mixed(forwards: Sequence[ForwardResult], tolerance: float) -> bool:
    """Whether the terms that torch's means do not explain differ between forwards. A penalty on weights does not."""
    forwards = [each for each in forwards if float(each.loss.count)]  # a mean of nothing shows nothing
    means = [[call for call in each.calls if call.is_mean] for each in forwards]
    if not means or not all(any(call.derivative is not None for call in calls) for calls in means):
        return False
    if len({len(calls) for calls in means}) > 1:  # a mean for each sample: the scalar is a mean of these
        return True
    unexplained = [_unexplained_loss(each) for each in forwards]
    deviations = [
        _peak_to_peak([call.derivative or 0.0 for call in calls]) * max(abs(float(call.value)) for call in calls)
        for calls in zip(*means, strict=True)
    ]
    return max(_peak_to_peak(unexplained), *deviations) > tolerance


def _divided_by(forwards: Sequence[ForwardResult], sample_counts: Sequence[int], tolerance: float) -> float | None:
    calls_by_forward = [each.calls for each in forwards]
    if any(len(calls) != 1 or calls[0].is_mean or not calls[0].derivative for calls in calls_by_forward):
        return None
    divisors = [
        1.0 / (calls[0].derivative or 1.0) / count for calls, count in zip(calls_by_forward, sample_counts, strict=True)
    ]
    is_all = max(abs(_unexplained_loss(each)) for each in forwards) <= tolerance
    return divisors[0] if is_all and _peak_to_peak(divisors) <= 2e-2 * abs(divisors[0]) else None


def _unexplained_loss(result: ForwardResult) -> float:
    """The part of a scalar that torch's loss functions do not explain."""
    explained = sum((call.derivative or 0.0) * float(call.value) for call in result.calls)
    return float(result.raw_loss.detach()) - explained


def _peak_to_peak(numbers: Sequence[float]) -> float:
    return max(numbers) - min(numbers)
