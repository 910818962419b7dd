"""Parts of a loss: whether a loss that is one number is the mean of the same loss of the parts of a batch.

The same of unreduced values and their mean: a value may depend on no other sample.

bound  how far rounding alone may bring the two apart: a forward of other rows is rounded in another way
Law: what is no mean, such as a sum or a loss among the samples of a batch, is further off than the bound.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fourfold.step.objective import ForwardResult
from fourfold.step.uneven_means import is_uneven, uneven_problem
from fourfold.words.errors import Problem

# Of the largest of the losses, by the size in bytes of the least precise number in a forward.
LOSS_TOLERANCE = {8: 1e-8, 4: 1e-4, 2: 2e-2, 1: 1e-1}
# So much of the largest output counts as well: a cross-entropy near 0 is rounded as its logits are.
OUTPUT_FRACTION = 1e-2


class LossComparison(NamedTuple):
    """The loss of a few samples together, and the mean of that of two parts of them, each weighted by its count."""

    whole_mean: float
    parts_mean: float
    part_sizes: list[int]
    """Of each part."""
    is_comparable: bool = False
    """Whether there was anything to compare: finite numbers of some elements."""
    is_additive: bool = True
    is_manual_mean: bool = False
    """Whether the number is a sum of torch's that was divided by its own count by hand, and adds up as such."""
    is_uneven: bool = False
    """Whether it is made of several means, whose counts are not proportional."""
    has_randomness: bool = False
    """Whether random numbers were drawn, so that the two differ in any case."""
    loss_names: str = ""
    is_mixed: bool = False
    """Whether it has, beside torch's means, other parts that differ from sample to sample."""
    divided_by: float | None = None
    """Where it is a sum of torch's, divided by hand: by how many times the number of samples. None: it is not."""
    is_unreduced: bool = False
    """Whether it is the mean of unreduced values."""
    kinks: Sequence[str] = ()
    """The functions with a kink that a mean over the batch goes through."""

    @property
    def kink_problem(self) -> Problem | None:
        """What is wrong with a number that is no multiple of a mean, though it may look so."""
        if not self.kinks:
            return None
        got = (
            f"a loss that is one number: a mean over the batch that goes through {', '.join(dict.fromkeys(self.kinks))}"
        )
        need = "multiples and sums of means: of the parts of a batch, some may lie beyond the kink, and the batch not"
        attempt = "the function on unreduced values; or (loss * n, n), which trains the mean of the parts' losses"
        return Problem(got, need, attempt)

    @property
    def problem(self) -> Problem | None:
        """What is wrong with the number, unless it was divided by hand."""
        if self.is_uneven:
            return uneven_problem(self.loss_names)
        if self.is_additive or self.has_randomness:
            return None
        parts = " and ".join(map(str, self.part_sizes))
        together, apart = _format_distinct(self.whole_mean, self.parts_mean)
        if self.is_unreduced:
            got = f"unreduced values with a mean of {together} for {sum(self.part_sizes)} samples together"
            got += f", and of {apart} for {parts} of them"
            need = "values that depend on their own sample alone, in model and loss: the batch is cut into parts"
            attempt = "GroupNorm for statistics of the batch; (values.sum(), len(values)) trains each part by itself"
            return Problem(got, need, attempt)
        got = f"a loss that is one number, {together} for {sum(self.part_sizes)} samples together"
        got += f", and {apart} as the mean of {parts} of them"
        need = "a mean over samples, or over what torch's loss functions count: the batch is cut into parts"
        attempt = "unreduced values, or a pair (sum, count); (loss * n, n) trains the mean of the parts' losses"
        return Problem(got, need, attempt)


def compare_losses(
    whole: ForwardResult, parts: Sequence[ForwardResult], *, part_sizes: list[int], min_itemsize: int, max_output: float
) -> LossComparison:
    """Compare. `itemsize`: of the least precise number in the forwards; `largest`: of all numbers that went out."""
    losses = [(float(each.loss.total.detach()), float(each.loss.count)) for each in (whole, *parts)]
    sums = [_manual_sums(each) for each in (whole, *parts)]
    found = LossComparison(
        _weighted_mean(losses[:1]), _weighted_mean(losses[1:]), part_sizes, is_unreduced=whole.raw_loss.numel() != 1
    )
    # A bend for each sample, as in a loop over them, is not one of a mean: the whole has as many as the parts together.
    if len({len(each.kinks) for each in (whole, *parts)}) == 1 and sum(part_sizes) > 1:
        found = found._replace(kinks=whole.kinks)

    def tolerance(means: Sequence[float]) -> float:
        return LOSS_TOLERANCE[min_itemsize] * (max(map(abs, means)) + OUTPUT_FRACTION * max_output)

    if by_hand := all(each is not None for each in sums):
        by_value, by_sum = ([each[place] for each in sums if each is not None] for place in (0, 1))
        means = [
            _weighted_mean(by_value[:1]),
            _weighted_mean(by_value[1:]),
            *(_weighted_mean([each]) for each in by_value),
        ]
        off = [abs(a[0] - b[0]) - b[1] * tolerance(means) for a, b in zip(by_value, by_sum, strict=True)]
        by_hand = by_sum[0][1] > 0 and max(off) <= 0.0 and abs(means[0] - means[1]) <= tolerance(means)
    means = [found.whole_mean, found.parts_mean, *(_weighted_mean([each]) for each in losses)]
    if not all(map(math.isfinite, means)):
        if not by_hand and losses[0][1] and math.isfinite(found.whole_mean):
            return found._replace(is_comparable=True, is_additive=False)  # what is finite among other samples only
        return found._replace(is_comparable=by_hand, is_manual_mean=by_hand, is_additive=False)
    counts = [(each.loss.count, each.loss.other_count, each.loss.other_square) for each in parts]
    totals = [sum(map(float, each)) for each in zip(*counts, strict=True)]
    adds_up = abs(found.whole_mean - found.parts_mean) <= tolerance(means)
    found = found._replace(is_mixed=_is_mixed((whole, *parts), tolerance(means)))
    if not by_hand:
        found = found._replace(
            divided_by=_divided_by((whole, *parts), [sum(part_sizes), *part_sizes], tolerance(means))
        )
    is_known = bool(losses[0][1]) and totals[0] > 0
    return found._replace(
        is_comparable=is_known, is_additive=adds_up, is_manual_mean=by_hand, is_uneven=is_uneven(*totals)
    )


def _format_distinct(a: float, b: float) -> list[str]:
    """Two numbers, with as many digits as it takes to tell them apart."""
    digits = next((digits for digits in range(6, 17) if f"{a:.{digits}g}" != f"{b:.{digits}g}"), 17)
    return [f"{number:.{digits}g}" for number in (a, b)]


def _weighted_mean(losses: Sequence[tuple[float, float]]) -> float:
    """Of sums and counts; those without elements add nothing."""
    count = sum(count for _, count in losses)
    return sum(total for total, count in losses if count) / count if count else 0.0


def _is_mixed(forwards: Sequence[ForwardResult], tolerance: float) -> bool:
    """Whether what torch's means leave of a number is not the same, as a penalty is, for the whole and the parts."""
    forwards = [each for each in forwards if float(each.loss.count)]  # a mean of nothing shows nothing
    means = [[call for call in each.calls if call.is_mean] for each in forwards]
    if not means or not all(any(call.derivative is not None for call in calls) for calls in means):
        return False
    if len({len(calls) for calls in means}) > 1:  # a mean for each sample: the number is a mean of these
        return True
    rests = [_unexplained_loss(each) for each in forwards]
    of_calls = zip(*means, strict=True)
    off = [
        _peak_to_peak([c.derivative or 0.0 for c in calls]) * max(abs(float(c.value)) for c in calls)
        for calls in of_calls
    ]
    return max(_peak_to_peak(rests), *off) > tolerance


def _divided_by(forwards: Sequence[ForwardResult], sample_counts: Sequence[int], tolerance: float) -> float | None:
    calls = [each.calls for each in forwards]
    if any(len(some) != 1 or some[0].is_mean or not some[0].derivative for some in calls):
        return None
    ratios = [1.0 / (some[0].derivative or 1.0) / count for some, count in zip(calls, sample_counts, strict=True)]
    is_all = max(abs(_unexplained_loss(each)) for each in forwards) <= tolerance
    return ratios[0] if is_all and _peak_to_peak(ratios) <= 2e-2 * abs(ratios[0]) else None


def _unexplained_loss(measured: ForwardResult) -> float:
    """What torch's loss functions leave of a number."""
    calls = measured.calls
    return float(measured.raw_loss.detach()) - sum((call.derivative or 0.0) * float(call.value) for call in calls)


def _peak_to_peak(numbers: Sequence[float]) -> float:
    return max(numbers) - min(numbers)


def _manual_sums(measured: ForwardResult) -> Any:
    """Of a number: itself times the count of a sum of torch's, and that sum; each with the count. None: no sum."""
    calls = measured.calls
    if measured.raw_loss.numel() != 1 or not calls or any(call.is_mean for call in calls):
        return None
    count, value = float(calls[0].count), float(measured.raw_loss.detach())
    return (value * count if count else 0.0, count), (float(calls[0].value.detach()), count)
