"""Bubble: the time in which a pipeline index waits, in relation to the time in which it computes.

block   the compute time of one microbatch on one stage, equal on all stages
span    from an index's first action to the end of its last one; in the zero-bubble schedules indexes begin and end
        their steps one after the other, so that the span of one is shorter than that of all together
bubble  the most that any index waits within its span, over what it computes
Law: the simulated bubble is the expected one, if messages take no time.
Sources: (p − 1)/m, see GPipe (1811.06965); (p − 1)/(v·m), Narayanan et al. (2104.04473), §2.2.2; H1 and H2, Qi et al.
(2401.10241), table 2.
"""

from collections.abc import Sequence

from fourfold.plan.pipeline.schedules import ASYNCHRONOUS
from fourfold.plan.pipeline.spec import EQUAL_COSTS, BlockCosts, PipelineSpec
from fourfold.plan.simulate import simulate
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action


def simulated_bubble(
    lists: Sequence[Sequence[Action]], costs: BlockCosts = EQUAL_COSTS, *, ends_together: bool = False
) -> float:
    """The bubble of lists with or without messages.

    `ends_together`: all indexes wait for the last one before their updates, for the norm of all gradients or for
    whether one of them is not finite; so the span of each is that of all together.
    """
    program = {index: tuple(actions) for index, actions in enumerate(lists)}
    timeline = simulate(program, lambda _, action: costs.of(action), mesh=Mesh(pp=len(lists)))
    computing = [[timed for timed in times if costs.of(timed.action)] for times in timeline.values()]
    spans = [(times[0].start, times[-1].end) for times in computing]
    if ends_together:
        spans = [(min(start for start, _ in spans), max(end for _, end in spans))] * len(spans)
    busy = [sum(costs.of(timed.action) for timed in times) for times in computing]
    return max((stop - start - own) / own for (start, stop), own in zip(spans, busy, strict=True))


def expected_bubble(schedule: str, spec: PipelineSpec) -> float | None:
    """The bubble by the schedule's formula; None: there is none for these sizes.

    Of the zero-bubble schedules, H1 needs m ≥ p microbatches and a limit of p in flight, H2 m ≥ 2p − 1 and a limit of
    2p − 1. The search may find a smaller bubble than that of H2 within a larger limit.
    """
    p, m, costs = spec.pp, spec.microbatches, spec.costs
    if schedule in ASYNCHRONOUS:
        return 0.0  # between the first batches and the drain
    if schedule != "zero-bubble":
        return (p - 1) / (spec.interleave * m)
    limit = spec.max_in_flight or p
    fillings = {p: 1, 2 * p - 1: 2}.get(limit)
    if fillings is None or m < limit:
        return None
    gap = costs.forward + costs.backward_input - fillings * costs.backward_weight
    return (p - 1) * max(0.0, gap) / (m * costs.total)
