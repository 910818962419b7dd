"""Laws of the simulation: order within lanes, dependencies across them, and errors that show deadlocks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.data.rules.step_program import DataStepSpec, StepSync, lower_step
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS
from fourfold.plan.dependencies import Dependencies
from fourfold.plan.rank_program import lane_of
from fourfold.plan.simulate import makespan, simulate
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action, ProgramError, Verb, parse_program
from fourfold.words.trace_events import LANES


def _is_legal(step):
    if step.update == "in_backward":
        return not (step.has_clip or step.allows_unused or step.has_trust_ratios)
    return step.update == "after" or step.sync == StepSync.GRADIENTS


RESTING = st.sampled_from([RESTING_LAYOUTS[zero] for zero in (0, 1, 2, 3)])
STEPS = st.builds(
    DataStepSpec,
    microbatches=st.integers(1, 4),
    num_buckets=st.integers(1, 5),
    resting_layouts=RESTING,
    has_clip=st.booleans(),
    allows_unused=st.booleans(),
    update=st.sampled_from(["after", "in_backward", "in_forward"]),
    launch_order=st.just(()),
    has_trust_ratios=st.booleans(),
    sync=st.sampled_from(StepSync),
    use_orders=st.none(),
    bucket_stages=st.just(()),
    measures_nominal_count=st.booleans(),
    stage=st.just(0),
    computes=st.just(()),
).filter(_is_legal)
SECONDS = st.floats(0, 10, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def programs_with_costs(draw):
    """A program of the data axis, a cost for each action, and an overlap for each reduction."""
    actions = lower_step(draw(STEPS))
    program = dict.fromkeys(range(draw(st.integers(1, 4))), actions)
    keys = [(rank, action) for rank in program for action in actions]
    costs = {key: draw(SECONDS) for key in keys}
    overlaps = {key: draw(SECONDS) for key in keys if key[1].verb == Verb.REDUCE}
    return program, costs, overlaps


@given(case=programs_with_costs())
def test_no_action_begins_before_its_dependencies_and_its_lane_allow(case):
    program, costs, overlaps = case
    times = simulate(
        program, lambda *key: costs[key], overlap=lambda rank, action, _: overlaps.get((rank, action), 0.0)
    )
    at = {(rank, timed.action): timed for rank, each in times.items() for timed in each}
    dependencies = Dependencies(program)
    for (rank, action), timed in at.items():
        assert timed.end >= timed.start + costs[rank, action]
        for needed in dependencies.of(rank, action):
            dependency, overlap = at[needed], overlaps.get((rank, action), 0.0)
            # What overlaps with an action does not wait for the ranks that end it together.
            assert timed.start >= max(dependency.start, dependency.start + costs[needed] - overlap)
            assert overlap or timed.start >= dependency.end
    for rank, actions in program.items():
        for name in LANES:
            queue = [at[rank, action] for action in actions if lane_of(action) == name]
            assert all(after.start >= before.end for before, after in itertools.pairwise(queue))


@given(case=programs_with_costs())
def test_a_step_takes_at_least_its_longest_lane(case):
    program, costs, overlaps = case
    times = simulate(
        program, lambda *key: costs[key], overlap=lambda rank, action, _: overlaps.get((rank, action), 0.0)
    )
    for rank, actions in program.items():
        for name in LANES:
            assert makespan(times) >= sum(costs[rank, action] for action in actions if lane_of(action) == name) - 1e-9


@given(case=programs_with_costs(), longer=SECONDS)
def test_a_longer_action_never_shortens_a_step(case, longer):
    program, costs, _ = case
    key = next(iter(costs))
    slower = {**costs, key: costs[key] + longer}
    before, after = (simulate(program, lambda *key, of=of: of[key]) for of in (costs, slower))
    assert makespan(after) >= makespan(before) - 1e-9


def test_an_update_waits_for_the_slowest_rank():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1)))
    times = simulate(program, lambda rank, action: 10.0 if (rank, str(action)) == (1, "B0.0") else 1.0)
    assert [str(timed.action) for timed in times[0]] == ["F0.0", "M0.0", "B0.0", "R0.0", "U0.0"]
    assert [timed.start for timed in times[0]] == [0, 1, 2, 12, 13]


def test_a_clipped_update_waits_for_the_norms_of_all_ranks():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1, has_clip=True)))
    times = simulate(program, lambda rank, action: 10.0 if (rank, str(action)) == (1, "M0.1") else 1.0)
    assert [timed.start for timed in times[0] if timed.action.verb == Verb.UPDATE] == [14]


def test_local_sgd_waits_for_the_slowest_rank_only_in_steps_that_average():
    averaging, local = (
        dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1, sync=sync)))
        for sync in (StepSync.WEIGHTS, StepSync.NOTHING)
    )
    slow = {(1, "U0.0"): 10.0}
    times = simulate(averaging, lambda rank, action: slow.get((rank, str(action)), 1.0))
    assert [(str(t.action), t.start) for t in times[0]][3:] == [("U0.0", 3), ("P0.0", 4), ("L0.0", 14)]
    times = simulate(local, lambda rank, action: slow.get((rank, str(action)), 1.0))
    assert makespan({0: times[0]}) == 4


def test_norms_of_update_directions_wait_for_the_gradient_norms_of_all_ranks():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1, has_clip=True, has_trust_ratios=True)))
    costs = {(1, "M0.1"): 10.0, (0, "M0.3"): 5.0}
    times = simulate(program, lambda rank, action: costs.get((rank, str(action)), 1.0))
    for rank in (0, 1):
        start = {str(timed.action): timed.start for timed in times[rank]}
        assert start["M0.3"] >= 14 > start["M0.1"]
        assert start["U0.0"] >= 19


def test_a_reduction_overlaps_with_backward_once_its_bucket_is_ready():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 2)))
    overlaps = {"R0.0": 6.0, "R0.1": 0.0}
    costs = {"B0.0": 10.0}
    times = simulate(program, lambda r, a: costs.get(str(a), 1.0), overlap=lambda r, a, _: overlaps.get(str(a), 0.0))
    assert [(str(t.action), t.start) for t in times[1]][3:] == [("R0.0", 6), ("R0.1", 12), ("U0.0", 12), ("U0.1", 13)]


def test_a_forward_begins_with_the_weights_that_it_uses_first():
    program = {0: lower_step(DataStepSpec(1, 3, RESTING_LAYOUTS[3]))}
    computed = {"A0.2": 0.0, "A0.1": 3.0, "A0.0": 6.0}  # seconds of the forward before it uses the bucket
    costs = {"F0.0": 10.0}
    times = simulate(
        program,
        lambda _, action: costs.get(str(action), 1.0),
        overlap=lambda _, action, needed: computed.get(str(needed.action), 0.0),
    )
    at = {str(timed.action): timed for timed in times[0]}
    assert (at["A0.2"].end, at["F0.0"].start, at["F0.0"].end) == (1.0, 1.0, 11.0)
    assert at["A0.0"].start > at["F0.0"].start


def by_name(times, rank):
    """The times of a rank's actions, by name."""
    return {str(timed.action): timed for timed in times[rank]}


def test_a_rank_that_begins_later_is_waited_for():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1)))
    times = simulate(program, lambda rank, action: 1.0, begins={1: 5.0})
    assert [timed.start for timed in times[0]] == [0, 1, 2, 8, 9]
    assert [timed.start for timed in times[1]] == [5, 6, 7, 8, 9]


def test_a_phase_that_unshards_weights_ends_on_all_ranks_together():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1, RESTING_LAYOUTS[3])))
    costs = {(1, "F0.0"): 10.0, (0, "B0.0"): 8.0}
    times = simulate(program, lambda rank, action: costs.get((rank, str(action)), 1.0))
    # A0.0 takes the first second, M0.0 and A0.1 one each.
    assert [(by_name(times, rank)["F0.0"].start, by_name(times, rank)["F0.0"].end) for rank in (0, 1)] == [(1, 11)] * 2
    assert [by_name(times, rank)["B0.0"].end for rank in (0, 1)] == [21, 21]


def test_a_reduction_does_not_wait_for_the_ranks_that_end_its_backward_together():
    program = dict.fromkeys(range(3), lower_step(DataStepSpec(1, 1, RESTING_LAYOUTS[3])))
    costs = {(rank, "B0.0"): seconds for rank, seconds in enumerate((4.0, 6.0, 10.0))}
    times = simulate(
        program,
        lambda rank, action: costs.get((rank, str(action)), 0.0),
        overlap=lambda rank, action, _: {0: 1.0, 1: 1.0, 2: 7.0}[rank] if action.verb == Verb.REDUCE else 0.0,
    )
    # The buckets are launched after 3, 5 and 3 seconds of backwards that all end after 10.
    assert [by_name(times, rank)["R0.0"].start for rank in range(3)] == [5, 5, 5]
    assert [by_name(times, rank)["U0.0"].start for rank in range(3)] == [10, 10, 10]


@pytest.mark.parametrize(("ranks_by_memory", "start"), [((), 3), (((0, 1),), 12), (((0,), (1,)), 3)])
def test_an_update_of_weights_that_a_host_shares_waits_for_its_ranks_backwards(ranks_by_memory, start):
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1, RESTING_LAYOUTS[1])))
    costs = {(1, "B0.0"): 10.0, (0, "R0.0"): 0.0, (1, "R0.0"): 0.0}
    times = simulate(
        program,
        lambda rank, action: costs.get((rank, str(action)), 1.0),
        overlap=lambda rank, action, _: 9.0 * rank if action.verb == Verb.REDUCE else 0.0,
        ranks_by_memory=ranks_by_memory,
    )
    assert by_name(times, 0)["U0.0"].start == start


def test_weights_of_which_each_rank_has_its_own_are_updated_while_others_compute_backward():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1)))
    costs = {(1, "B0.0"): 10.0, (0, "R0.0"): 0.0, (1, "R0.0"): 0.0}
    times = simulate(
        program,
        lambda rank, action: costs.get((rank, str(action)), 1.0),
        overlap=lambda rank, action, _: 9.0 * rank if action.verb == Verb.REDUCE else 0.0,
        ranks_by_memory=((0, 1),),
    )
    assert by_name(times, 0)["U0.0"].start == 3


def test_an_update_within_backward_does_not_wait_for_the_backwards_of_its_host():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 2, RESTING_LAYOUTS[2], update="in_backward")))
    costs = {(1, "B0.0"): 10.0, (0, "R0.0"): 0.0, (1, "R0.0"): 0.0}
    times = simulate(
        program,
        lambda rank, action: costs.get((rank, str(action)), 1.0),
        overlap=lambda rank, action, _: 9.0 * rank if str(action) == "R0.0" else 0.0,
        ranks_by_memory=((0, 1),),
    )
    assert (by_name(times, 0)["U0.0"].start, by_name(times, 0)["U0.1"].start) == (3, 13)


@pytest.mark.parametrize(("ranks_by_memory", "start"), [((), 3), (((0, 1),), 9)])
def test_no_rank_stores_gradients_before_all_ranks_of_its_host_have_used_the_last_ones(ranks_by_memory, start):
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1, update="in_forward")))
    costs = {(1, "U0.0"): 9.0}
    times = simulate(program, lambda rank, action: costs.get((rank, str(action)), 1.0), ranks_by_memory=ranks_by_memory)
    assert by_name(times, 0)["B0.0"].start == start


def test_reductions_do_not_queue_behind_gathers():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 2, RESTING_LAYOUTS[2], update="in_backward")))
    times = by_name(simulate(program, lambda _, action: 10.0 if action.verb == Verb.GATHER else 1.0), 0)
    # F M B take 3 seconds, then R0.0 one; U0.0 begins at 4, and its gather at 5.
    assert (times["R0.1"].start, times["U0.1"].start) == (4, 5)
    assert (times["G0.0"].start, times["G0.1"].start, times["G0.1"].end) == (5, 15, 25)


def test_a_measure_that_waits_for_its_sum_ends_on_all_ranks_together():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 1, has_clip=True)))
    costs = {(1, "M0.0"): 6.0, (1, "M0.1"): 10.0}
    times = simulate(program, lambda rank, action: costs.get((rank, str(action)), 1.0))
    assert [by_name(times, rank)["M0.0"].end for rank in (0, 1)] == [2, 7]
    assert [by_name(times, rank)["M0.1"].end for rank in (0, 1)] == [19, 19]


def test_reductions_in_different_orders_are_a_deadlock_reported_with_each_ranks_position():
    program = parse_program("0: F0.0 M0.0 B0.0 R0.0 R0.1 U0.0 U0.1\n1: F0.0 M0.0 B0.0 R0.1 R0.0 U0.0 U0.1")
    with pytest.raises(ProgramError) as caught:
        simulate(program, lambda rank, action: 1.0)
    message = str(caught.value)
    assert "it cannot end" in message
    assert "rank 0, reduce: F0.0 M0.0 B0.0 ▸R0.0 R0.1 U0.0 U0.1   need rank 1 to come to R0.0 too" in message
    assert "▸R0.1 R0.0" in message


@given(step=STEPS.filter(lambda step: step.num_buckets > 1 and step.sync == StepSync.GRADIENTS), data=st.data())
def test_any_swap_of_two_reductions_on_one_rank_is_a_deadlock(step, data):
    actions = list(lower_step(step))
    positions = [i for i, action in enumerate(actions) if action.verb == Verb.REDUCE]
    one, other = data.draw(st.lists(st.sampled_from(positions), min_size=2, max_size=2, unique=True))
    swapped = list(actions)
    swapped[one], swapped[other] = actions[other], actions[one]
    with pytest.raises(ProgramError, match="cannot end"):
        simulate({0: tuple(actions), 1: tuple(swapped)}, lambda rank, action: 1.0)


def test_a_pipeline_follows_the_same_dependency_rule():
    program = parse_program("0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 B1.0 F1.1 B1.1")
    times = simulate(program, lambda rank, action: 1.0, mesh=Mesh(pp=2))
    assert [(str(t.action), t.start) for t in times[0]] == [("F0.0", 0), ("F0.1", 1), ("B0.0", 3), ("B0.1", 5)]
    assert [(str(t.action), t.start) for t in times[1]] == [("F1.0", 1), ("B1.0", 2), ("F1.1", 3), ("B1.1", 4)]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("0: B0.0 F0.0", "need F0.0 of rank 0"),
        ("0: F0.0 B0.1", "need F0.1 of rank 0, which is in no program"),
        ("0: F0.0 B0.0\n1: B1.0 F1.0", "need F1.0 of rank 1"),
        ("0: F0.0 S0.0\n1: F1.0", "need V1.0 of rank 1, which is in no program"),
        ("0: F0.0\n1: V1.0 F1.0", "need S0.0 of rank 0, which is in no program"),
        ("0: F0.0 R0.0 R0.0", "need each action once"),
    ],
)
def test_a_deadlock_is_reported_with_the_missing_action(text, missing):
    with pytest.raises(ProgramError) as caught:
        simulate(parse_program(text), lambda rank, action: 1.0, mesh=Mesh(pp=2))
    assert missing in str(caught.value)


def test_each_data_rank_depends_on_its_counterpart_in_the_stage_before():
    program = parse_program("0: F0.0\n1: F0.0\n2: F1.0\n3: F1.0")
    forward = Action(Verb.FORWARD, 1, 0)
    assert [Dependencies(program, Mesh(pp=2, dp=2)).of(rank, forward)[0].rank for rank in (2, 3)] == [0, 1]


def test_a_message_that_comes_does_not_wait_for_one_that_goes():
    program = parse_program("0: F0.0 S0.0 F0.1 S0.1 C0.0 B0.0 C0.1 B0.1\n1: V1.0 F1.0 B1.0 D1.0 V1.1 F1.1 B1.1 D1.1")
    costs = {Verb.FORWARD: 1.0, Verb.BACKWARD: 2.0, Verb.SEND_FORWARD: 0.5, Verb.SEND_BACKWARD: 5.0}
    times = simulate(program, lambda rank, action: costs.get(action.verb, 0.0), mesh=Mesh(pp=2))
    starts = {str(timed.action): timed.start for each in times.values() for timed in each}
    assert (starts["F1.0"], starts["F1.1"]) == (1.5, 4.5)  # while D1.0 is under way, from 4.5 to 9.5
    assert (starts["B0.0"], starts["D1.1"], starts["B0.1"]) == (9.5, 9.5, 14.5)


def test_the_first_forward_of_a_stage_waits_for_a_tied_weight():
    program = parse_program("0: T0.0 F0.0 S0.0 Y0.0 C0.0 B0.0\n1: T1.0 V1.0 F1.0 B1.0 D1.0 Y1.0")
    times = simulate(program, lambda rank, action: 7.0 if str(action) == "T0.0" else 1.0, mesh=Mesh(pp=2))
    starts = {str(timed.action): timed.start for each in times.values() for timed in each}
    assert (starts["F0.0"], starts["S0.0"]) == (0.0, 1.0)
    assert (starts["T1.0"], starts["V1.0"], starts["F1.0"]) == (7.0, 8.0, 9.0)
