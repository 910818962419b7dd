"""Laws of pipeline programs: what the checker finds, what the timeline shows."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.pipeline.rules.checker import deadlock_problems, program_problems, read_written
from fourfold.axes.pipeline.rules.edges import add_nominal_count, add_sends
from fourfold.axes.pipeline.rules.schedules import SCHEDULES, compute_actions, schedule_problems
from fourfold.axes.pipeline.rules.spec import PipelineSpec
from fourfold.axes.pipeline.show import timeline_text
from fourfold.words.errors import format_problems
from fourfold.words.program import Action, Verb, format_program, parse_program
from tests.pipeline_sizes import SYNCHRONOUS, sizes, whole_step

SENDS = {Verb.SEND_FORWARD, Verb.SEND_BACKWARD}
RECEIVES = {Verb.RECEIVE_FORWARD: [(Verb.SEND_FORWARD, -1)], Verb.RECEIVE_BACKWARD: [(Verb.SEND_BACKWARD, 1)]}


def inputs_of(action, present):
    """What an action uses, by rules of its own: the oracle of this file."""
    verb, stage, i = action.verb, action.stage, action.index
    backwards = [Action(Verb.BACKWARD, stage, i), Action(Verb.BACKWARD_INPUT, stage, i)]
    after = [Action(each.verb, stage + 1, i) for each in backwards]
    wanted = {
        Verb.FORWARD: [Action(Verb.RECEIVE_FORWARD, stage, i)],
        Verb.BACKWARD: [Action(Verb.FORWARD, stage, i), Action(Verb.RECEIVE_BACKWARD, stage, i)],
        Verb.BACKWARD_INPUT: [Action(Verb.FORWARD, stage, i), Action(Verb.RECEIVE_BACKWARD, stage, i)],
        Verb.BACKWARD_WEIGHT: [backwards[1]],
        Verb.SEND_FORWARD: [Action(Verb.FORWARD, stage, i)],
        Verb.SEND_BACKWARD: backwards,
    }.get(verb, [])
    if not any(each.verb in SENDS for each in present):
        wanted += {Verb.FORWARD: [Action(Verb.FORWARD, stage - 1, i)], Verb.BACKWARD: after}.get(verb, [])
        wanted += after if verb == Verb.BACKWARD_INPUT else []
    return [each for each in wanted if each in present]


def ends(lists):
    """Whether a program ends, found by trying every index again and again."""
    at, done, present = [0] * len(lists), set(), {action for actions in lists for action in actions}

    def can_end(action):
        sends = [Action(verb, action.stage + step, action.index) for verb, step in RECEIVES.get(action.verb, [])]
        return done.issuperset([*inputs_of(action, present), *sends])

    moved = True
    while moved:
        moved = False
        for index, actions in enumerate(lists):
            while at[index] < len(actions) and can_end(actions[at[index]]):
                done.add(actions[at[index]])
                at[index] += 1
                moved = True
    return all(place == len(actions) for place, actions in zip(at, lists, strict=True))


def swapped(lists, index, place):
    """The program with two neighbouring actions of an index swapped."""
    new = [list(each) for each in lists]
    new[index][place : place + 2] = reversed(new[index][place : place + 2])
    return new


@st.composite
def swaps(draw):
    """A program of a schedule, plain or with sends, and one swap of neighbours in it."""
    schedule, size = draw(sizes())
    lists = compute_actions(schedule, **size)
    lists = draw(st.sampled_from([lists, add_sends(lists, PipelineSpec(**size).num_stages)]))
    index = draw(st.integers(0, size["pp"] - 1))
    return lists, swapped(lists, index, draw(st.integers(0, len(lists[index]) - 2)))


@given(case=swaps())
def test_any_swap_of_neighbours_that_makes_a_program_wrong_is_found(case):
    before, after = case
    assert ends(before)
    assert not deadlock_problems(before)
    assert bool(deadlock_problems(after)) == (not ends(after))


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_every_swap_in_a_small_program_is_judged_right_and_many_are_wrong(schedule):
    spec = PipelineSpec(3, 3, 2 if schedule == "interleaved" else 1)
    lists = add_sends(SCHEDULES[schedule].make(spec), spec.num_stages)
    verdicts = []
    for index, each in enumerate(lists):
        for place in range(len(each) - 1):
            new = swapped(lists, index, place)
            verdicts.append(ends(new))
            assert bool(deadlock_problems(new)) != verdicts[-1]
            assert bool(program_problems(dict(enumerate(new)), spec)) != verdicts[-1]
    assert 0.2 < verdicts.count(False) / len(verdicts) < 1


def check_nominal_count(program):
    """All ranks come to the count that they wait in together, behind the first loss and in front of all backwards."""
    fronts = []
    for actions, counted in zip(program, add_nominal_count(program), strict=True):
        (place,) = [place for place, action in enumerate(counted) if action.verb == Verb.MEASURE]
        assert (*counted[:place], *counted[place + 1 :]) == actions
        fronts.append(counted[:place])
    done = {action for front in fronts for action in front}
    last_stage = max(action.stage for actions in program for action in actions)
    assert Action(Verb.FORWARD, last_stage, 0) in done
    assert not any(action.verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT) for action in done)
    sends = [Action(Verb.SEND_FORWARD, each.stage - 1, each.index) for each in done if each.verb in RECEIVES]
    assert done.issuperset(sends)


@given(case=sizes(), data=st.data())
def test_a_program_in_random_order_is_judged_right(case, data):
    schedule, size = case
    size |= {"microbatches": min(3, size["microbatches"])} if schedule in {"gpipe", "1f1b", "zero-bubble"} else {}
    lists = [list(each) for each in compute_actions(schedule, **size)]
    index = data.draw(st.integers(0, size["pp"] - 1))
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(0, len(lists[index]) - 2))
        lists[index][place : place + 2] = reversed(lists[index][place : place + 2])
    program = add_sends(lists, PipelineSpec(**size).num_stages)
    if ends(program):
        assert not program_problems(dict(enumerate(program)), whole_step(size))
        if not read_written(format_program(dict(enumerate(map(tuple, lists)))), whole_step(size))[1]:
            check_nominal_count(program)
    else:
        assert program_problems(dict(enumerate(program)), whole_step(size))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_program_of_sixteen_stages_is_checked_within_half_a_second(schedule):
    spec = PipelineSpec(8, 128, 2) if schedule == "interleaved" else PipelineSpec(16, 128)
    lists = add_sends(SCHEDULES[schedule].make(spec), spec.num_stages)
    seconds = []
    for _ in range(3):  # the best of three: other processes of a test run share the caches
        begin = time.process_time()
        assert not deadlock_problems(lists)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.5


@given(case=sizes(st.sampled_from(SYNCHRONOUS)), has_sends=st.booleans())
def test_a_written_program_that_was_printed_is_read_again(case, has_sends):
    schedule, size = case
    lists, spec = compute_actions(schedule, **size), PipelineSpec(**size)
    lists = add_sends(lists, spec.num_stages) if has_sends else lists
    assert read_written(format_program(dict(enumerate(map(tuple, lists)))), spec) == (lists, [])


@given(case=sizes())
def test_a_row_of_the_timeline_has_the_actions_in_order(case):
    schedule, size = case
    lists = compute_actions(schedule, **size)
    has_stages = PipelineSpec(**size).num_stages > size["pp"]
    for index, (line, actions) in enumerate(zip(timeline_text(lists).splitlines(), lists, strict=True)):
        head, *cells = line.split()
        names = [str(each) if has_stages else f"{each.verb.value}{each.index}" for each in actions]
        assert head == str(index)
        assert [cell for cell in cells if cell != "·" and set(cell) != {"─"}] == names


def test_the_timeline_of_1f1b():
    assert timeline_text(compute_actions("1f1b", pp=2, microbatches=3)).splitlines() == [
        "0  F0 F1 ·  ·  B0 ── F2 B1 ── ·  B2 ──",
        "1  ·  F0 B0 ── F1 B1 ── F2 B2 ──",
    ]
    assert timeline_text(compute_actions("1f1b", pp=2, microbatches=3), width=14).splitlines() == [
        "0  F0 F1 ·  …",
        "1  ·  F0 B0 …",
    ]


def problems_of(text, pp=3, microbatches=3):
    """By problem of a written program: what it is, and what it should be."""
    return [(problem.got, problem.need) for problem in read_written(text, PipelineSpec(pp, microbatches))[1]]


def test_all_that_is_wrong_with_a_written_program_is_said_at_once():
    assert problems_of("""
        0: F0.0 F0.1 F0.1 B0.0 F0.2 B0.1 B0.2 I0.2 U0.0  # four of these are wrong
        1: B1.0 F1.0 F1.1 B1.1 F2.0 F1.7
        5: F0.0
    """) == [
        ("index 5", "an index below pp = 3"),
        ("index 0: F0.1 2 times", "each action once"),
        ("index 0: U0.0", "F, B, I, W and their messages; the rest is added"),
        ("index 1: F2.0", "stage 2 on index 2"),
        ("index 1: F1.7", "a microbatch from 0 to 2"),
        ("index 0: B0.2 and I0.2", "one backward, whole or in halves"),
        ("index 1 forgets F1.2, B1.2", "each action once"),
        ("index 2 forgets F2.0, B2.0, F2.1, B2.1, F2.2, B2.2", "each action once"),
        ("index 0: F0.0 F0.1 ▸B0.0 F0.2 B0.1 B0.2 …", "B1.0 of index 1"),
        ("index 1:           ▸B1.0 F1.0 F1.1 B1.1", "F1.0 in front of it"),
    ]
    assert problems_of("0: F0.0 X3 B0.0\nhello\n0: F0.1", pp=1)[1:] == [
        ("line 2: 'hello'", "RANK: ACTION ACTION …"),
        ("line 3: 0 again", "one line per rank"),
    ]


def test_a_written_program_has_all_of_its_messages_or_none():
    good = "0: F0.0 S0.0 C0.0 B0.0\n1: V1.0 F1.0 B1.0 D1.0"
    assert (
        problems_of(good, 2, 1) == problems_of(good.replace(" C0.0", " D0.0").replace("D", "X")[:0] or good, 2, 1) == []
    )
    assert problems_of(good.replace(" C0.0", ""), 2, 1) == [("index 0 forgets C0.0", "each action once")]
    assert problems_of(good.replace("B1.0", "B1.0 S1.0"), 2, 1) == [
        ("index 1: S1.0", "no message: nothing crosses there")
    ]


@given(case=sizes(st.just("zero-bubble")), data=st.data())
def test_a_written_program_may_have_whole_and_halved_backwards(case, data):
    _, size = case
    lists = compute_actions("zero-bubble", **size)
    for actions in (mixed := [list(each) for each in lists]):
        for action in list(actions):
            if action.verb == Verb.BACKWARD_INPUT and data.draw(st.booleans()):
                actions[actions.index(action)] = Action(Verb.BACKWARD, action.stage, action.index)
                actions.remove(Action(Verb.BACKWARD_WEIGHT, action.stage, action.index))
    assert not program_problems(dict(enumerate(mixed)), whole_step(size))
    program = add_sends(mixed, size["pp"])
    assert not program_problems(dict(enumerate(program)), whole_step(size))


def test_a_deadlock_is_shown_as_a_grid_with_marks():
    program = parse_program("0: F0.0 S0.0 C0.0 B0.0\n1: F1.0 V1.0 B1.0 D1.0")
    assert format_problems(deadlock_problems(list(program.values()))).splitlines() == [
        "2 problems",
        "  index 0: F0.0 S0.0 ▸C0.0 B0.0             need D1.0 of index 1",
        "  index 1:           ▸F1.0 V1.0 B1.0 D1.0   need V1.0 in front of it",
    ]


def test_a_written_program_that_the_edges_cannot_carry_is_refused():
    assert problems_of("0: F0.0 F0.1 B0.1 B0.0", pp=1, microbatches=2) == [
        (
            "index 0: B0.1 before B0.0",
            "the microbatches of a stage in order: gradients are complete after the last one",
        ),
    ]
    # The second stage of each place in turn: the activations arrive in another order than they are used.
    text = "0: F0.0 F2.0 F0.1 F2.1 B2.0 B2.1 B0.0 B0.1\n1: F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1"
    found = read_written(text, PipelineSpec(2, 2, interleave=2))[1]
    assert [(each.got, each.need) for each in found] == [
        ("index 1: V1.1", "V3.0 in its place: index 0 sends in this order"),
    ]
    assert compute_actions("written", pp=1, microbatches=1, program="0: F0.0 B0.0") == (
        (Action(Verb.FORWARD, 0, 0), Action(Verb.BACKWARD, 0, 0)),
    )
    (missing,) = schedule_problems("written", pp=2, microbatches=2)
    assert "program=FILE" in missing.attempt
