"""Cuts: in which ways plans of these ranks divide a sample, and how many samples their microbatches have.

Law: every way that a plan of this model may have is among them; one that the model does not allow is left out, with the
reason.
"""

from typing import NamedTuple

from fourfold.plan.plan import Plan

MICROBATCHES = (1, 2, 4)  # the microbatch sizes that are measured: a batch cut into so many


class MeasuredCut(NamedTuple):
    """A plan that has the cut, without pipeline; and the samples of the microbatches to measure, in order.

    may_have_stages  whether ranks are left for a pipeline: only there are backwards divided
    """

    plan: Plan
    samples: tuple[int, ...]
    may_have_stages: bool


def cuts_of(num_ranks: int, batch_size: int) -> list[MeasuredCut]:
    """All ways to divide the ranks among dp, sp and tp, with both forms of attention over sequence ranks."""
    cuts = []
    for tp in _divisors(num_ranks):
        for sp in _divisors(num_ranks // tp):
            dp = num_ranks // (tp * sp)
            largest = -(-batch_size // dp)
            samples = tuple(sorted({-(-largest // parts) for parts in MICROBATCHES}))
            for ulysses in dict.fromkeys((1, sp)):
                cuts.append(MeasuredCut(Plan(dp=dp, sp=sp, tp=tp, ulysses=ulysses), samples, dp > 1))
    return sorted(cuts, key=lambda cut: cut.plan.sp * cut.plan.tp)  # those that most plans have come first


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
