"""Schedules of the pipeline axis with sizes that they can be made for, for property tests."""

from hypothesis import strategies as st

from fourfold.axes.pipeline.rules.schedules import SCHEDULES
from fourfold.axes.pipeline.rules.spec import BlockCosts, PipelineSpec

SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
COSTS = st.builds(BlockCosts, *[st.integers(1, 5)] * 3)
ANY_SCHEDULE = st.sampled_from([name for name in SCHEDULES if name != "written"])


@st.composite
def sizes(draw, schedules=ANY_SCHEDULE):
    """A schedule and the arguments of `compute_actions`."""
    schedule, pp = draw(schedules), draw(st.integers(1, 5))
    if schedule == "interleaved":
        return schedule, {"pp": pp, "microbatches": pp * draw(st.integers(1, 3)), "interleave": draw(st.integers(2, 3))}
    if schedule == "pipedream":
        return schedule, {"pp": pp, "microbatches": 1, "num_batches": draw(st.integers(1, 8))}
    if schedule == "2bw":
        return schedule, {"pp": pp, "microbatches": draw(st.integers(pp, 7)), "num_batches": draw(st.integers(1, 3))}
    size = {"pp": pp, "microbatches": draw(st.integers(1, 10))}
    if schedule == "zero-bubble":
        size |= {"max_in_flight": draw(st.none() | st.integers(1, 9)), "costs": draw(COSTS)}
    return schedule, size


def whole_step(size):
    """The sizes of a synchronous step with as many microbatches as all batches together."""
    spec = PipelineSpec(**size)
    return PipelineSpec(spec.pp, spec.microbatches * spec.num_batches, spec.interleave)


def expected_bubble(schedule, spec):
    """The bubble of a synchronous schedule by its paper's formula.

    Of zero-bubble with a limit of p or 2p − 1 microbatches in flight, and with at least as many.

    Sources: (p − 1)/m, GPipe (1811.06965); (p − 1)/(v·m), Narayanan et al. (2104.04473), §2.2.2; H1 and H2, Qi et al.
    (2401.10241), table 2. The search may find a smaller bubble than that of H2 within a larger limit.
    """
    p, m, costs = spec.pp, spec.microbatches, spec.costs
    if schedule != "zero-bubble":
        return (p - 1) / (spec.interleave * m)
    fillings = {p: 1, 2 * p - 1: 2}[spec.max_in_flight or p]
    gap = costs.forward + costs.backward_input - fillings * costs.backward_weight
    return (p - 1) * max(0.0, gap) / (m * costs.total)
