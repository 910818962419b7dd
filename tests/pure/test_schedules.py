"""Laws of schedules: complete, in order, able to end, with the bubbles and the memory of their papers."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.pipeline.asynchronous import batch_actions, drain_actions, num_stashed, weight_version
from fourfold.plan.pipeline.bubble import expected_bubble, simulated_bubble
from fourfold.plan.pipeline.checker import program_problems, read_written
from fourfold.plan.pipeline.in_flight import peak_in_flight
from fourfold.plan.pipeline.rendezvous import as_entries, deadlock_problems, fuse_exchanges
from fourfold.plan.pipeline.schedules import SCHEDULES, compute_actions, schedule_problems
from fourfold.plan.pipeline.sends import add_sends
from fourfold.plan.pipeline.spec import BlockCosts, PipelineSpec, owner_of
from fourfold.plan.pipeline.timeline_text import timeline_text
from fourfold.words.program import Action, Verb, format_program

SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
COSTS = st.builds(BlockCosts, *[st.integers(1, 5)] * 3)


ANY_SCHEDULE = st.sampled_from(list(SCHEDULES))


@st.composite
def sizes(draw, schedules=ANY_SCHEDULE):
    """A schedule and sizes that it can be made for."""
    schedule, pp = draw(schedules), draw(st.integers(1, 5))
    if schedule == "interleaved":
        return schedule, {"pp": pp, "microbatches": pp * draw(st.integers(1, 3)), "interleave": draw(st.integers(2, 3))}
    if schedule == "pipedream":
        return schedule, {"pp": pp, "microbatches": 1, "num_batches": draw(st.integers(1, 8))}
    if schedule == "2bw":
        return schedule, {"pp": pp, "microbatches": draw(st.integers(pp, 7)), "num_batches": draw(st.integers(1, 3))}
    limit = {"max_in_flight": draw(st.none() | st.integers(1, 9)), "costs": draw(COSTS)}
    return schedule, {
        "pp": pp,
        "microbatches": draw(st.integers(1, 10)),
        **(limit if schedule == "zero-bubble" else {}),
    }


def spec_of(size):
    return PipelineSpec(**size)


def whole_step(size):
    """The sizes of a synchronous step with as many microbatches."""
    spec = spec_of(size)
    return PipelineSpec(spec.pp, spec.microbatches * spec.num_batches, spec.interleave)


@given(case=sizes())
def test_every_schedule_is_complete_and_ends_with_and_without_blocking_sends(case):
    schedule, size = case
    names = ("pp", "microbatches", "interleave", "max_in_flight")
    assert not schedule_problems(schedule, **{name: size[name] for name in names if name in size})
    lists = compute_actions(schedule, **size)
    halves = (Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT) if schedule == "zero-bubble" else (Verb.BACKWARD,)
    spec = whole_step(size)
    wanted = itertools.product((Verb.FORWARD, *halves), range(spec.num_stages), range(spec.microbatches))
    placed = sorted(
        (index, action.verb, action.stage, action.index) for index, each in enumerate(lists) for action in each
    )
    assert placed == sorted((owner_of(stage, spec.pp), verb, stage, i) for verb, stage, i in wanted)
    with_sends = add_sends(lists, spec.num_stages)
    assert not program_problems(dict(enumerate(lists)), spec)
    assert not program_problems(dict(enumerate(with_sends)), spec)
    assert not deadlock_problems(fuse_exchanges(with_sends))


@given(case=sizes())
def test_exchanges_keep_all_actions_and_the_order_of_computing(case):
    schedule, size = case
    before = add_sends(compute_actions(schedule, **size), spec_of(size).num_stages)
    computing = {Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT}
    for actions, entries in zip(before, fuse_exchanges(before), strict=True):
        after = [action for entry in entries for action in entry]
        assert sorted(map(str, after)) == sorted(map(str, actions))
        assert [a for a in after if a.verb in computing] == [a for a in actions if a.verb in computing]
        assert all(len(entry) == 1 or not computing & {action.verb for action in entry} for entry in entries)


def test_gpipe_needs_no_exchange_and_1f1b_does():
    gpipe, one_f_one_b = (add_sends(compute_actions(name, pp=4, microbatches=8), 4) for name in ("gpipe", "1f1b"))
    assert fuse_exchanges(gpipe) == as_entries(gpipe)
    assert len(deadlock_problems(as_entries(one_f_one_b))) == 4
    fused = [entry for entries in fuse_exchanges(one_f_one_b) for entry in entries if len(entry) > 1]
    assert fused
    assert all({action.verb for action in entry} == {Verb.SEND_BACKWARD, Verb.RECEIVE_FORWARD} for entry in fused)


@given(case=sizes(st.sampled_from(SYNCHRONOUS)))
def test_backwards_run_in_order_of_microbatch_on_every_stage(case):
    schedule, size = case
    for actions in compute_actions(schedule, **size):
        for stage in {action.stage for action in actions}:
            for verb in (Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT):
                order = [action.index for action in actions if (action.verb, action.stage) == (verb, stage)]
                assert order == sorted(order)


@given(pp=st.integers(1, 6), rounds=st.integers(1, 4), interleave=st.integers(2, 3))
def test_bubbles_of_gpipe_1f1b_and_interleaved_are_those_of_their_papers(pp, rounds, interleave):
    for schedule, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", interleave)):
        lists = compute_actions(schedule, pp=pp, microbatches=pp * rounds, interleave=v)
        formula = (pp - 1) / (v * pp * rounds)
        assert expected_bubble(schedule, PipelineSpec(pp, pp * rounds, v)) == pytest.approx(formula)
        assert simulated_bubble(lists) == pytest.approx(formula)
        assert simulated_bubble(add_sends(lists, pp * v)) == pytest.approx(formula)


# In tenths: a forward, and by how much the halves of a backward differ from it.
@given(pp=st.integers(1, 6), more=st.integers(0, 9), slower=st.integers(0, 5), faster=st.integers(0, 5))
def test_bubbles_of_zero_bubble_are_those_of_h1_and_h2(pp, more, slower, faster):
    costs = BlockCosts(1.0, 1 + slower / 10, 1 - faster / 10)
    for limit, fillings in ((None, 1), (2 * pp - 1, 2)):
        spec = PipelineSpec(pp, (limit or pp) + more, max_in_flight=limit, costs=costs)
        formula = (pp - 1) * (sum(costs[:2]) - fillings * costs.backward_weight) / (spec.microbatches * sum(costs))
        lists = SCHEDULES["zero-bubble"].make(spec)
        assert simulated_bubble(lists, costs) <= formula + 0.03
        assert pp == 1 or expected_bubble("zero-bubble", spec) == pytest.approx(formula)


@given(case=sizes(st.just("zero-bubble")))
def test_zero_bubble_keeps_its_limit_and_never_waits_longer_than_1f1b_with_the_same_memory(case):
    _, size = case
    lists = compute_actions("zero-bubble", **size)
    limit = size["max_in_flight"] or size["pp"]
    assert all(peak_in_flight(actions).microbatches <= limit for actions in lists)
    if limit >= size["pp"]:
        drained = compute_actions("1f1b", pp=size["pp"], microbatches=size["microbatches"])
        assert simulated_bubble(lists, size["costs"]) <= simulated_bubble(drained, size["costs"]) + 1e-9


@given(pp=st.integers(1, 6), rounds=st.integers(1, 4))
def test_microbatches_in_flight_are_those_of_the_papers(pp, rounds):
    m = pp * rounds
    peaks = {
        name: [peak_in_flight(actions).microbatches for actions in compute_actions(name, pp=pp, microbatches=m)]
        for name in ("gpipe", "1f1b", "zero-bubble")
    }
    assert peaks["gpipe"] == [m] * pp
    assert peaks["1f1b"] == [min(m, pp - stage) for stage in range(pp)]
    assert max(peaks["zero-bubble"]) == pp
    interleaved = compute_actions("interleaved", pp=pp, microbatches=m, interleave=2)
    for index, actions in enumerate(interleaved):
        peak = peak_in_flight(actions)
        assert peak.microbatches == min(2 * m, 2 * (pp - 1 - index) + pp + 1)
        assert set(peak.by_stage) == {index, pp + index}
        assert max(peak.by_stage.values()) <= peak.microbatches <= sum(peak.by_stage.values())


def test_a_weight_gradient_that_waits_keeps_its_microbatch_in_flight():
    actions = [Action(Verb(letter), 0, i) for letter in "FIW" for i in range(3)]
    assert peak_in_flight(actions) == (3, {0: 3}, 3)


@given(case=sizes(st.sampled_from(["pipedream", "2bw"])))
def test_asynchronous_steps_and_drain_are_the_whole_list_and_wait_for_no_later_step(case):
    schedule, size = case
    spec, lists = spec_of(size), compute_actions(schedule, **size)
    steps = [batch_actions(spec, batch) for batch in range(spec.num_batches)]
    parts = [*steps, drain_actions(spec, spec.num_batches)]
    assert tuple(tuple(itertools.chain(*each)) for each in zip(*parts, strict=True)) == lists
    for number in range(1, len(parts) + 1):
        first = tuple(tuple(itertools.chain(*each)) for each in zip(*parts[:number], strict=True))
        assert not deadlock_problems(fuse_exchanges(add_sends(first, spec.pp)))


@given(case=sizes(st.sampled_from(["pipedream", "2bw"])))
def test_an_asynchronous_stage_has_the_version_that_a_batch_uses_and_drops_none_that_it_needs(case):
    schedule, size = case
    spec = spec_of(size)
    for stage, actions in enumerate(compute_actions(schedule, **size)):
        newest, stash = 0, {0}
        pending = {}  # by batch: its microbatches whose backward has not run
        for action in actions:
            batch = action.index // spec.microbatches
            if action.verb == Verb.FORWARD:
                pending.setdefault(batch, set(range(batch * spec.microbatches, (batch + 1) * spec.microbatches)))
                assert weight_version(schedule, spec, stage, batch) in stash
                if schedule == "pipedream":  # no newer one than it has to be: 1F1B gives just this one
                    assert weight_version(schedule, spec, stage, batch) == newest
            else:
                pending[batch].remove(action.index)
                newest += not pending[batch]
                unfinished = [each for each in range(batch, batch + 2 + spec.pp) if pending.get(each, {0})]
                needed = {weight_version(schedule, spec, stage, each) for each in unfinished}
                stash = {each for each in stash | {newest} if each in needed or each == newest}
                assert len(stash) <= num_stashed(schedule, spec, stage)


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_asynchronous_schedules_have_no_bubble_once_filled(schedule):
    size = {"pp": 4, "microbatches": 1 if schedule == "pipedream" else 4}
    waits = []
    for num_batches in (10, 20):
        computing = 3 * num_batches * size["microbatches"]
        waits.append(simulated_bubble(compute_actions(schedule, **size, num_batches=num_batches)) * computing)
    assert waits[0] == pytest.approx(waits[1])
    assert expected_bubble(schedule, PipelineSpec(**size)) == 0


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_program_of_sixteen_stages_is_checked_within_half_a_second(schedule):
    size = {"pp": 16, "microbatches": 128, "interleave": 2 if schedule == "interleaved" else 1}
    spec = PipelineSpec(**size)
    entries = fuse_exchanges(add_sends(compute_actions(schedule, **size), spec.num_stages))
    begin = time.process_time()
    assert not deadlock_problems(entries)
    assert time.process_time() - begin < 0.5


@given(case=sizes(st.sampled_from(SYNCHRONOUS)), has_sends=st.booleans())
def test_a_written_program_that_was_printed_is_read_again(case, has_sends):
    schedule, size = case
    lists, spec = compute_actions(schedule, **size), spec_of(size)
    lists = add_sends(lists, spec.num_stages) if has_sends else lists
    assert read_written(format_program(dict(enumerate(lists))), spec) == (lists, [])


@given(case=sizes())
def test_a_row_of_the_timeline_has_the_actions_in_order(case):
    schedule, size = case
    lists = compute_actions(schedule, **size)
    has_stages = spec_of(size).num_stages > size["pp"]
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
