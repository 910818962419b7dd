"""Laws of costs: what actions cost by a trace, and steps that are simulated at these costs."""

import pytest

from fourfold.axes.data.rules.step_program import DataStepSpec, lower_step
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS
from fourfold.plan.simulate import makespan, simulate
from fourfold.trace import utilization
from fourfold.trace.cost import StepCosts, measure_costs, step_costs
from fourfold.trace.step_comparison import (
    compare_timelines,
    measured_seconds,
    measured_timeline,
    median_step,
    simulated_seconds,
    simulated_step_seconds,
    simulated_timeline,
)
from fourfold.trace.trace_file import Event, Trace
from fourfold.words.trace_events import COMPUTE_LANE, GATHER_LANE, REDUCE_LANE, WAIT_SPAN
from tests.recorded_traces import PROGRAM, trace, zero3_trace

LANES = {"R": REDUCE_LANE, "G": GATHER_LANE, "A": GATHER_LANE}


def recorded(program, rows, **options) -> Trace:
    """A trace of one step, of rows (rank, name, start, stop)."""
    events = (Event(rank, 3, name, LANES.get(name[0], COMPUTE_LANE), start, stop) for rank, name, start, stop in rows)
    return Trace(program, tuple(events), **options)


def one_bucket(zero=0, **fields):
    """The program of two ranks with one bucket."""
    return dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1, RESTING_LAYOUTS[zero], **fields)))


def test_costs_exclude_waits():
    found = measure_costs(trace(late=3.0))
    assert found.seconds[0, "U0.0"] == pytest.approx(1.0)
    assert found.seconds[0, "U0.1"] == pytest.approx(1.5)
    assert found.seconds[1, "B0.0"] == pytest.approx(6.5)
    assert found.overlaps[0, "R0.0", "B0.0"] == pytest.approx(2.0)
    assert found.overlaps[0, "R0.1", "B0.0"] == 0.0


@pytest.mark.parametrize("late", [0.0, 3.0])
def test_a_simulated_step_takes_as_long_as_the_measured_one(late):
    found = trace(late=late)
    assert measured_seconds(found, 3) == pytest.approx(13 + late)
    assert simulated_step_seconds(found, 3) == pytest.approx(13 + late)
    times = simulated_timeline(found, step_costs(found, 3))
    assert makespan(times) == pytest.approx(makespan(measured_timeline(found, 3)))


def test_steps_in_which_ranks_are_late_in_turn_are_simulated_at_their_own_costs():
    events = []
    for step, backward in {3: (9.0, 4.0), 4: (4.0, 9.0), 5: (4.0, 9.0)}.items():
        for rank, seconds in enumerate(backward):
            end = 1 + seconds
            rows = [("F0.0", 0.0, 1.0), ("M0.0", 1.0, 1.0), ("B0.0", 1.0, end), ("R0.0 sent", end, end)]
            rows += [("R0.0", 10.0, 11.0), ("U0.0", end, 12.0), (WAIT_SPAN, end, 11.0)]
            events += [Event(rank, step, row[0], LANES.get(row[0][0], COMPUTE_LANE), *row[1:]) for row in rows]
    found = Trace(one_bucket(), tuple(events))
    for step in found.steps:
        assert simulated_step_seconds(found, step) == measured_seconds(found, step) == 12.0
    costs = measure_costs(Trace(found.program, tuple(e for e in found.events if e.step < 5)))
    assert simulated_seconds(simulated_timeline(found, costs), costs) == 7.0  # the lower medians of both ranks


def test_time_between_actions_belongs_to_the_later_one():
    rows = [("F0.0", 0.0, 2.0), ("M0.0", 2.5, 3.0), ("B0.0", 3.0, 5.0), ("U0.0", 5.75, 7.0)]
    costs = step_costs(recorded({0: one_bucket()[0]}, [(0, *row) for row in rows]), 3)
    assert [costs.seconds[0, name] for name, _, _ in rows] == [2.0, 1.0, 2.0, 2.0]


def test_a_wait_ends_when_what_it_is_for_is_there_and_the_rank_that_goes_on_later_is_late_itself():
    rows = [("F0.0", 0.0, 1.0), ("M0.0", 1.0, 1.0), ("B0.0", 1.0, 2.0), ("R0.0 sent", 2.0, 2.0)]
    rows += [("R0.0", 2.0, 5.0), ("U0.0", 2.0, 8.0), (WAIT_SPAN, 2.0, 7.0)]
    found = recorded(one_bucket(), [(rank, *row) for rank in range(2) for row in rows])
    costs = step_costs(found, 3)
    assert (costs.seconds[0, "R0.0"], costs.seconds[0, "U0.0"]) == (3.0, 3.0)
    assert simulated_step_seconds(found, 3) == 8.0


def test_ranks_begin_and_end_a_step_at_their_own_times():
    rows = [(0, "step", 0.0, 12.0), (1, "step", 3.0, 13.0)]
    for rank, begin in enumerate((1.0, 5.0)):
        rows += [(rank, "F0.0", begin, begin + 2), (rank, "M0.0", begin + 2, begin + 2)]
        rows += [(rank, "B0.0", begin + 2, begin + 4), (rank, "R0.0 sent", begin + 4, begin + 4)]
        rows += [(rank, "R0.0", 9.0, 9.5), (rank, "U0.0", begin + 4, 10.0), (rank, WAIT_SPAN, begin + 4, 9.5)]
    found = recorded(one_bucket(), rows)
    costs = step_costs(found, 3)
    assert (costs.before, costs.begins, costs.rests) == (1.0, {0: 0.0, 1: 4.0}, {0: 2.0, 1: 3.0})
    times = {str(timed.action): timed for timed in simulated_timeline(found, costs)[0]}
    assert (times["F0.0"].start, times["R0.0"].start, times["U0.0"].end) == (0.0, 8.0, 9.0)
    assert simulated_step_seconds(found, 3) == measured_seconds(found, 3) == 13.0


def test_what_a_rank_does_behind_its_last_action_waits_for_its_collectives_only():
    program = one_bucket(update="in_forward")
    rows = [("U0.0", 0.0, 1.0), ("F0.0", 0.0, 2.0), ("M0.0", 2.0, 2.0), ("B0.0", 2.0, 4.0), ("R0.0 sent", 3.0, 3.0)]
    rows += [("R0.0", 3.0, 9.0), (WAIT_SPAN, 4.0, 10.0), ("step", 0.0, 12.0)]
    found = recorded(program, [(rank, *row) for rank in range(2) for row in rows])
    assert step_costs(found, 3).rests == {0: 3.0, 1: 3.0}
    assert simulated_step_seconds(found, 3) == 12.0


def test_a_gather_costs_what_it_takes_from_its_launch_on_the_last_rank():
    program = one_bucket(1)
    rows = [("F0.0", 0.0, 1.0), ("M0.0", 1.0, 1.0), ("B0.0", 1.0, 2.0), ("R0.0 sent", 2.0, 2.0), ("R0.0", 2.0, 3.0)]
    rows += [(WAIT_SPAN, 2.0, 3.0)]
    late = [(rank, *row) for rank in range(2) for row in rows]
    late += [(0, "U0.0", 2.0, 4.0), (1, "U0.0", 2.0, 7.0), (0, "G0.0", 4.0, 9.0), (1, "G0.0", 7.0, 9.0)]
    found = recorded(program, late)
    costs = step_costs(found, 3)
    assert (costs.seconds[0, "G0.0"], costs.seconds[1, "G0.0"]) == (2.0, 2.0)
    assert simulated_step_seconds(found, 3) == 9.0


def test_what_a_backward_does_after_a_launch_is_an_overlap_without_its_waits():
    program = one_bucket(3)
    rows = [("A0.0", 0.0, 1.0), ("F0.0", 0.0, 2.0), (WAIT_SPAN, 0.0, 1.0), ("M0.0", 2.0, 2.0)]
    rows += [("A0.1", 2.0, 3.0), (WAIT_SPAN, 2.0, 3.0)]
    both = [(rank, *row) for rank in range(2) for row in rows]
    # Rank 0 launches at 5, computes until 6 and waits for rank 1, which launches at 12, until that has computed too.
    both += [(0, "B0.0", 2.0, 14.0), (0, "R0.0 sent", 5.0, 5.0), (0, WAIT_SPAN, 6.0, 14.0), (0, "R0.0", 5.0, 13.0)]
    both += [(1, "B0.0", 2.0, 14.0), (1, "R0.0 sent", 12.0, 12.0), (1, WAIT_SPAN, 13.5, 14.0), (1, "R0.0", 12.0, 13.0)]
    both += [(rank, "U0.0", 14.0, 15.0) for rank in range(2)]
    found = recorded(program, both)
    costs = step_costs(found, 3)
    # Half a second passes from the last rank's arrival to the end: it is the cost of asking each other.
    assert (costs.seconds[0, "B0.0"], costs.seconds[1, "B0.0"]) == (3.5, 11.0)
    assert (costs.overlaps[0, "R0.0", "B0.0"], costs.overlaps[1, "R0.0", "B0.0"]) == (1.5, 2.0)
    times = {str(timed.action): timed for timed in simulated_timeline(found, costs)[0]}
    assert (times["B0.0"].end, times["R0.0"].start, times["R0.0"].end) == (14.0, 12.0, 13.0)
    assert simulated_step_seconds(found, 3) == 15.0


def test_every_action_that_was_measured_is_compared():
    found = trace()
    rows = compare_timelines(found, 3, simulated_timeline(found, measure_costs(found)))
    assert {(row.rank, row.action) for row in rows} == {(r, str(a)) for r, actions in PROGRAM.items() for a in actions}
    assert all(row.measured == pytest.approx(row.simulated) for row in rows)


def test_unshards_overlap_with_the_forward_or_backward_that_uses_them():
    found = zero3_trace()
    costs = measure_costs(found)
    assert (costs.seconds[0, "F0.0"], costs.seconds[0, "B0.0"]) == (8.0, 7.0)
    overlaps = {(action, needed): seconds for (rank, action, needed), seconds in costs.overlaps.items() if not rank}
    assert [overlaps["F0.0", "A0.1"], overlaps["F0.0", "A0.0"]] == [0.0, 3.0]
    assert [overlaps["B0.0", "A0.2"], overlaps["B0.0", "A0.3"]] == [0.0, 3.0]
    times = {str(timed.action): timed for timed in simulated_timeline(found, costs)[0]}
    measured = {str(timed.action): timed for timed in measured_timeline(found, 3)[0]}
    assert all(times[name].end == pytest.approx(measured[name].end) for name in measured)
    assert utilization.seconds_by_category(found)["unshard"] == 14.0


def test_a_forward_overlaps_with_the_gathers_of_the_updates_that_are_fused_into_it():
    program = {0: lower_step(DataStepSpec(1, 2, RESTING_LAYOUTS[1], update="in_forward"))}
    rows = [("F0.0", 0.0, 12.0), ("U0.1", 0.0, 1.0), ("G0.1", 1.0, 3.0), (WAIT_SPAN, 1.0, 3.0)]
    rows += [("U0.0", 5.0, 6.0), ("G0.0", 6.0, 9.0), (WAIT_SPAN, 6.0, 9.0)]
    costs = step_costs(recorded(program, [(0, *row) for row in rows]), 3)
    assert [costs.seconds[0, name] for name in ("F0.0", "U0.1", "U0.0")] == [5.0, 1.0, 1.0]
    assert (costs.overlaps[0, "F0.0", "G0.1"], costs.overlaps[0, "F0.0", "G0.0"]) == (0.0, 2.0)


def test_an_unshard_that_begins_before_its_phase_overlaps_with_the_phase_before():
    found = zero3_trace()
    early = [e._replace(start=9.0, stop=10.5) if e.name == "A0.2" else e for e in found.events]
    costs = measure_costs(Trace(found.program, tuple(early)))
    assert costs.overlaps[0, "A0.2", "M0.0"] == pytest.approx(1.0)


def test_the_typical_step_is_the_one_of_median_duration():
    found = trace()
    slow = [e._replace(step=5, stop=e.stop + 50) for e in found.events if e.step == 3 and e.name == "U0.1"]
    others = [e._replace(step=5) for e in found.events if e.step == 3 and e.name != "U0.1"]
    assert median_step(Trace(PROGRAM, (*slow, *others, *found.events))) in (3, 4)


def test_of_two_sampled_steps_the_typical_one_is_shown_and_simulated():
    found = trace()
    slow = Trace(PROGRAM, tuple(e._replace(start=e.start * 3, stop=e.stop * 3) for e in found.events if e.step == 3))
    both = Trace(PROGRAM, (*slow.events, *(e for e in found.events if e.step == 4)))
    alone = Trace(PROGRAM, tuple(e for e in found.events if e.step == 4))
    assert median_step(both) == 4
    assert measure_costs(both) == measure_costs(alone)


def test_a_program_is_simulated_with_its_costs():
    found = StepCosts({(0, "F0.0"): 2.0, (1, "F0.0"): 3.0}, {})
    times = simulate(PROGRAM, found.cost, overlap=found.overlap)
    assert (times[0][0].end, times[1][0].end) == (2.0, 3.0)


def test_a_collective_waits_for_the_one_ahead_of_it_on_its_lane():
    program = {0: lower_step(DataStepSpec(1, 2))}
    rows = [("F0.0", 0.0, 1.0), ("M0.0", 1.0, 1.0), ("B0.0", 1.0, 2.0), ("R0.0", 2.0, 6.0), ("R0.1", 2.0, 9.0)]
    costs = step_costs(recorded(program, [(0, *row) for row in rows]), 3)
    assert (costs.seconds[0, "R0.0"], costs.seconds[0, "R0.1"]) == (4.0, 3.0)


def test_a_reduction_is_there_when_every_rank_has_done_its_part():
    rows = [("F0.0", 0.0, 1.0), ("M0.0", 1.0, 1.0), ("B0.0", 1.0, 2.0), ("R0.0 sent", 2.0, 2.0)]
    both = [(rank, *row) for rank in range(2) for row in rows]
    both += [(0, "R0.0", 2.0, 3.0), (0, WAIT_SPAN, 2.0, 6.5), (0, "U0.0", 2.0, 7.0)]
    both += [(1, "R0.0", 2.0, 6.0), (1, WAIT_SPAN, 2.0, 6.5), (1, "U0.0", 2.0, 7.0)]
    found = recorded(one_bucket(), both)
    costs = step_costs(found, 3)
    # Rank 0 waits for rank 1's part: 1 second is its own, and not 4.
    assert (costs.seconds[0, "U0.0"], costs.seconds[1, "U0.0"]) == (1.0, 1.0)
    assert simulated_step_seconds(found, 3) == 7.0


def test_a_trace_of_ranks_that_share_memory_is_simulated_with_the_waits_of_shared_weights():
    rows = []
    for rank, end in enumerate((3.0, 8.0)):
        rows += [(rank, "F0.0", 0.0, 1.0), (rank, "M0.0", 1.0, 1.0), (rank, "B0.0", 1.0, end)]
        rows += [(rank, "R0.0 sent", 3.0, 3.0), (rank, "U0.0", end, 9.0), (rank, WAIT_SPAN, end, 8.0)]
        rows += [(rank, "G0.0", 9.0, 9.0)]
    rows = [row for row in rows if row[1] != WAIT_SPAN or row[2] < row[3]]
    found = recorded(one_bucket(1), rows, ranks_by_memory=((0, 1),))
    times = {str(timed.action): timed for timed in simulated_timeline(found, step_costs(found, 3))[0]}
    assert (times["U0.0"].start, times["U0.0"].end) == (8.0, 9.0)


def test_an_update_waits_for_the_last_of_what_it_needs():
    rows = [(0, "F0.0", 0.0, 1.0), (0, "M0.0", 1.0, 1.0), (0, "B0.0", 1.0, 2.0), (0, "R0.0 sent", 2.0, 2.0)]
    rows += [(1, "F0.0", 0.0, 4.0), (1, "M0.0", 4.0, 4.5), (1, "B0.0", 4.5, 8.0), (1, "R0.0 sent", 8.0, 8.0)]
    # Rank 1's loss is there at 4.5; rank 0 goes on at 9.5 with a sum that rank 1 has half a second later.
    rows += [(0, "R0.0", 2.0, 9.0), (0, WAIT_SPAN, 2.0, 9.5), (0, "U0.0", 2.0, 10.0)]
    rows += [(1, "R0.0", 8.0, 10.0), (1, WAIT_SPAN, 8.0, 10.0), (1, "U0.0", 8.0, 10.5)]
    found = recorded(one_bucket(), rows)
    assert step_costs(found, 3).seconds[0, "U0.0"] == 0.5
    assert simulated_step_seconds(found, 3) == 10.5
