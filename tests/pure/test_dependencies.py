"""Laws of dependencies on a mesh: which ranks an action meets, and what a message, a measure and an unshard need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.data.rules.step_program import DataStepSpec, StepSync, UseOrders, lower_evaluation, lower_step
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS
from fourfold.plan.dependencies import Dependencies
from fourfold.plan.simulate import makespan, simulate
from fourfold.words.mesh import Mesh
from fourfold.words.program import LOSS, NOMINAL_COUNT, Action, ProgramError, Verb, bucket_of, parse_program

MESHES = st.builds(Mesh, pp=st.just(1), dp=st.integers(1, 3), cp=st.integers(1, 2), tp=st.integers(1, 3))
ZERO = st.integers(0, 3)


def actions(text: str) -> list[Action]:
    return list(parse_program(f"0: {text}")[0])


def action(text: str) -> Action:
    return actions(text)[0]


@given(mesh=MESHES, zero=ZERO)
def test_a_bucket_is_reduced_gathered_and_unsharded_among_the_ranks_that_differ_on_dp_and_cp(mesh, zero):
    program = dict.fromkeys(range(mesh.size), lower_step(DataStepSpec(2, 3, RESTING_LAYOUTS[zero])))
    dependencies = Dependencies(program, mesh)
    for rank, own in program.items():
        for each in own:
            if each.verb in (Verb.REDUCE, Verb.GATHER, Verb.UNSHARD):
                assert tuple(dependencies.participants(rank, each)) == mesh.peers(rank, "dp", "cp")
            elif each.verb in (Verb.FORWARD, Verb.BACKWARD):
                assert tuple(dependencies.participants(rank, each)) == mesh.peers(rank, "cp", "tp")
            else:
                assert list(dependencies.participants(rank, each)) == [rank]


def test_tensor_peers_do_not_wait_for_each_others_reductions():
    mesh = Mesh(dp=2, tp=2)
    program = dict.fromkeys(range(4), lower_step(DataStepSpec(1, 1)))
    slow = {(1, "R0.0"): 10.0}  # ranks 1 and 3 hold the second shard of the matrices
    times = simulate(program, lambda rank, each: slow.get((rank, str(each)), 1.0), mesh=mesh)
    ends = {rank: {str(t.action): t.end for t in times[rank]}["R0.0"] for rank in program}
    assert ends == {0: 4.0, 2: 4.0, 1: 13.0, 3: 13.0}


def test_data_ranks_of_two_stages_do_not_meet_and_the_norm_is_of_all_stages():
    text = "F{0}.0 M{0}.0 B{0}.0 R{0}.0 M{0}.1 U{0}.0"
    program = parse_program("\n".join(f"{rank}: {text.format(rank // 2)}" for rank in range(4)))
    mesh = Mesh(pp=2, dp=2)
    times = simulate(program, lambda rank, each: 10.0 if (rank, str(each)) == (2, "R1.0") else 1.0, mesh=mesh)
    start = {rank: {str(t.action)[0] + str(t.action)[2:]: t.start for t in times[rank]} for rank in program}
    ends = {rank: {str(t.action): t.end for t in times[rank]} for rank in program}
    assert ends[2]["R1.0"] == ends[3]["R1.0"] > ends[0]["R0.0"]
    slowest = max(ends[rank][f"M{rank // 2}.1"] for rank in program)
    assert all(start[rank]["U.0"] >= slowest for rank in program)


def test_ranks_that_share_sequences_run_each_forward_and_backward_together():
    mesh = Mesh(dp=2, cp=2)
    program = dict.fromkeys(range(4), lower_step(DataStepSpec(1, 1)))
    times = simulate(program, lambda rank, each: 10.0 if (rank, str(each)) == (1, "F0.0") else 1.0, mesh=mesh)
    ends = {rank: {str(t.action): t.end for t in times[rank]} for rank in program}
    assert [ends[rank]["F0.0"] for rank in range(4)] == [10, 10, 1, 1]
    alone = simulate(program, lambda rank, each: 10.0 if (rank, str(each)) == (1, "F0.0") else 1.0)
    assert {str(t.action): t.end for t in alone[0]}["F0.0"] == 1


def test_the_first_backward_waits_for_the_nominal_count_of_every_rank():
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(2, 1, measures_nominal_count=True)))
    assert [str(each) for each in program[0]] == ["F0.0", "M0.4", "B0.0", "F0.1", "M0.0", "B0.1", "R0.0", "U0.0"]
    times = simulate(program, lambda rank, each: 10.0 if (rank, str(each)) == (1, "F0.0") else 1.0)
    start = {str(t.action): t.start for t in times[0]}
    assert (start["M0.4"], start["B0.0"]) == (1, 11)
    needs = Dependencies(program).of(0, Action(Verb.BACKWARD, 0, 0))
    assert {need.rank for need in needs if need.action == Action(Verb.MEASURE, 0, NOMINAL_COUNT)} == {0, 1}


@given(
    microbatches=st.integers(1, 4),
    num_buckets=st.integers(1, 5),
    update=st.sampled_from(["after", "in_backward", "in_forward"]),
    data=st.data(),
)
def test_a_forward_or_backward_waits_for_all_unshards_of_its_phase_and_for_no_other(
    microbatches, num_buckets, update, data
):
    order = st.lists(st.integers(0, num_buckets - 1), max_size=6).map(tuple)  # a tied weight occurs again
    orders = data.draw(st.builds(UseOrders, order, order, order))
    step = DataStepSpec(microbatches, num_buckets, RESTING_LAYOUTS[3], update=update, use_orders=orders)
    program = {0: lower_step(step)}
    dependencies = Dependencies(program)
    unshards = [each for each in program[0] if each.verb == Verb.UNSHARD]
    assert len(set(unshards)) == len(unshards) == microbatches * (len(orders.forward) + len(orders.backward))
    for each in program[0]:
        if each.verb in (Verb.FORWARD, Verb.BACKWARD):
            needed = [a for _, a in dependencies.of(0, each) if a.verb == Verb.UNSHARD]
            expected = orders.forward if each.verb == Verb.FORWARD else orders.backward
            assert [bucket_of(a, num_buckets) for a in needed] == list(expected)
            position = program[0].index(each)
            assert needed == [a for a in program[0][position - len(needed) : position] if a.verb == Verb.UNSHARD]
    evaluation = lower_evaluation(step)
    assert [bucket_of(a, num_buckets) for a in evaluation[:-2]] == list(orders.evaluate)
    assert evaluation[-2:] == (Action(Verb.FORWARD, 0, 0), Action(Verb.MEASURE, 0, LOSS))


def test_an_unshard_waits_for_an_update_of_its_bucket_that_stands_before_it():
    step = DataStepSpec(1, 2, RESTING_LAYOUTS[3], update="in_forward")
    program = {0: lower_step(step)}
    assert [str(each) for each in program[0][:5]] == ["U0.1", "U0.0", "A0.1", "A0.0", "F0.0"]
    dependencies = Dependencies(program)
    assert [str(need.action) for need in dependencies.of(0, action("A0.1"))] == ["U0.1"]
    late = {0: lower_step(step._replace(update="after"))}
    assert Dependencies(late).of(0, action("A0.0")) == []


def test_an_unshard_waits_for_the_end_of_the_phase_in_front_of_it():
    program = {0: lower_step(DataStepSpec(2, 1, RESTING_LAYOUTS[3]))}
    needed = {str(a): [str(need.action) for need in Dependencies(program).of(0, a)] for a in program[0]}
    assert [needed[f"A0.{use}"] for use in range(4)] == [[], ["F0.0"], ["B0.0"], ["M0.0"]]


@given(microbatches=st.integers(1, 4), num_buckets=st.integers(1, 5), zero=ZERO)
def test_each_reduction_completes_its_own_bucket_and_an_update_waits_for_all_of_its_bucket(
    microbatches, num_buckets, zero
):
    program = {0: lower_step(DataStepSpec(microbatches, num_buckets, RESTING_LAYOUTS[zero]))}
    dependencies = Dependencies(program)
    for each in program[0]:
        if each.verb == Verb.UPDATE:
            reduced = [a for _, a in dependencies.of(0, each) if a.verb == Verb.REDUCE]
            rounds = microbatches if zero >= 2 else 1
            assert [a.index for a in reduced] == [r * num_buckets + each.index for r in range(rounds)]


PIPELINE = "0: F0.0 S0.0 C0.0 B0.0\n1: V1.0 F1.0 S1.0 C1.0 B1.0 D1.0\n2: V2.0 F2.0 B2.0 D2.0"


def test_messages_between_stages_carry_activations_forwards_and_gradients_backwards():
    dependencies = Dependencies(parse_program(PIPELINE), Mesh(pp=3))
    expected = {
        (1, "V1.0"): [(0, "S0.0")],
        (1, "F1.0"): [(1, "V1.0")],
        (1, "S1.0"): [(1, "F1.0")],
        (1, "C1.0"): [(2, "D2.0")],
        (1, "B1.0"): [(1, "F1.0"), (1, "C1.0")],
        (1, "D1.0"): [(1, "B1.0")],
        (2, "B2.0"): [(2, "F2.0")],
        (0, "F0.0"): [],
    }
    for (rank, text), needed in expected.items():
        assert [(need.rank, str(need.action)) for need in dependencies.of(rank, action(text))] == needed


def test_a_pipeline_with_messages_takes_as_long_as_its_messages():
    received = (Verb.RECEIVE_FORWARD, Verb.RECEIVE_BACKWARD)  # they take no time once the message is there
    times = simulate(parse_program(PIPELINE), lambda _, each: float(each.verb not in received), mesh=Mesh(pp=3))
    assert makespan(times) == 6 + 4  # six compute actions and four messages, one after the other


def test_each_rank_receives_from_the_rank_with_its_place_on_the_other_axes():
    mesh = Mesh(pp=2, dp=2, tp=2)
    lines = [f"{rank}: " + ("F0.0 S0.0" if rank < 4 else "V1.0 F1.0") for rank in range(8)]
    dependencies = Dependencies(parse_program("\n".join(lines)), mesh)
    for rank in range(4, 8):
        assert [need.rank for need in dependencies.of(rank, action("V1.0"))] == [rank - 4]


def test_two_stages_on_one_rank_need_no_message():
    program = parse_program("0: F0.0 S0.0 V2.0 F2.0\n1: V1.0 F1.0 S1.0 F3.0")
    dependencies = Dependencies(program, Mesh(pp=2))
    assert [str(need.action) for need in dependencies.of(0, action("F2.0"))] == ["V2.0"]
    folded = parse_program("0: F0.0 S0.0 F3.0\n1: V1.0 F1.0 F2.0")
    dependencies = Dependencies(folded, Mesh(pp=2))
    assert [(need.rank, str(need.action)) for need in dependencies.of(1, action("F2.0"))] == [(1, "F1.0")]


def test_local_steps_average_among_the_ranks_of_a_stage_and_a_tensor_place():
    mesh = Mesh(dp=2, tp=2)
    program = dict.fromkeys(range(4), lower_step(DataStepSpec(1, 1, sync=StepSync.WEIGHTS)))
    needs = Dependencies(program, mesh).of(0, action("L0.0"))
    assert [need.rank for need in needs] == [0, 2]


def test_a_rank_outside_of_the_mesh_is_refused():
    with pytest.raises(ProgramError, match="rank 2"):
        Dependencies(parse_program("2: F0.0"), Mesh(dp=2))
