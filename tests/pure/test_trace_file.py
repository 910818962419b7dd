"""Laws of traces: their file, their clocks, and the costs that they give."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan import cost, step_breakdown
from fourfold.plan.data.step_program import DataStepSpec, lower_step
from fourfold.plan.data.zero import RESTING_LAYOUTS
from fourfold.plan.simulate import makespan, simulate
from fourfold.plan.trace_file import (
    Event,
    Trace,
    TraceError,
    clock_offset_bounds,
    decode_trace,
    encode_trace,
    merged_waits,
    waiting_seconds_within,
)
from fourfold.words.mesh import Mesh
from fourfold.words.program import Verb
from fourfold.words.trace_events import COMPUTE_LANE, REDUCE_LANE, WAIT_SPAN

NANO = st.integers(0, 10**12)
PROGRAM = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 2)))


@st.composite
def events(draw):
    start = draw(NANO)
    name, lane = draw(
        st.sampled_from(
            [("F0.0", COMPUTE_LANE), ("R0.1", REDUCE_LANE), (WAIT_SPAN, COMPUTE_LANE), ("R0.1 ready", REDUCE_LANE)]
        )
    )
    stop = start if " " in name else start + draw(NANO)
    return Event(draw(st.integers(0, 1)), draw(st.integers(1, 900)), name, lane, start / 1e9, stop / 1e9)


@given(found=st.lists(events(), max_size=20))
def test_a_trace_survives_a_round_trip_through_its_file(found):
    again = decode_trace(encode_trace(Trace(PROGRAM, tuple(found), Mesh(sp=2))))
    assert (again.program, again.mesh) == (PROGRAM, Mesh(sp=2))
    for before, after in zip(found, again.events, strict=True):
        assert before[:4] == after[:4]
        assert after[4:] == pytest.approx(before[4:], rel=0, abs=0.6e-9)


def test_a_trace_without_a_mesh_is_one_of_data_ranks():
    data = json.loads(encode_trace(trace()))
    del data["otherData"]["mesh"]
    assert decode_trace(json.dumps(data).encode()) == decode_trace(encode_trace(trace()))
    data["otherData"]["mesh"] = {"depth": 2}
    with pytest.raises(TraceError):
        decode_trace(json.dumps(data).encode())


def trace(*, late: float = 0.0) -> Trace:
    """Two ranks, two steps: rank 1 is `late` seconds slower in backward, and rank 0 waits for it to update."""
    found = []
    for step in (3, 4):
        begin = 100.0 * step
        for rank in range(2):
            end = begin + 5 + (late if rank else 0.0)
            rows = [
                ("step", COMPUTE_LANE, begin - 1, begin + 12 + late),
                ("data", COMPUTE_LANE, begin - 1, begin),
                ("F0.0", COMPUTE_LANE, begin, begin + 1),
                ("M0.0", COMPUTE_LANE, begin + 1, begin + 1.5),
                ("B0.0", COMPUTE_LANE, begin + 1.5, end),
                ("R0.0 ready", REDUCE_LANE, end - 2, end - 2),
                ("R0.0 sent", REDUCE_LANE, end - 2, end - 2),
                ("R0.1 ready", REDUCE_LANE, end, end),
                ("R0.1 sent", REDUCE_LANE, end, end),
                ("R0.0", REDUCE_LANE, begin + 3 + late, begin + 4 + late),
                ("R0.1", REDUCE_LANE, begin + 5 + late, begin + 6 + late),
                ("U0.0", COMPUTE_LANE, end, begin + 6 + late),
                (WAIT_SPAN, COMPUTE_LANE, end, begin + 5 + late),
                ("U0.1", COMPUTE_LANE, begin + 6 + late, begin + 8 + late),
                (WAIT_SPAN, COMPUTE_LANE, begin + 6 + late, begin + 6.5 + late),
                (WAIT_SPAN, COMPUTE_LANE, begin + 6 + late, begin + 6.25 + late),
            ]
            found += [Event(rank, step, *row) for row in rows if row[0] != WAIT_SPAN or row[3] > row[2]]
    return Trace(PROGRAM, tuple(found))


def test_costs_exclude_waits():
    found = cost.measure_costs(trace(late=3.0))
    assert found.seconds[0, "U0.0"] == pytest.approx(1.0)
    assert found.seconds[0, "U0.1"] == pytest.approx(1.5)
    assert found.seconds[1, "B0.0"] == pytest.approx(6.5)
    assert found.overlaps[0, "R0.0", "B0.0"] == pytest.approx(2.0)
    assert found.overlaps[0, "R0.1", "B0.0"] == 0.0


def test_a_simulated_step_ends_when_the_measured_one_did():
    for late in (0.0, 3.0):
        recorded = trace(late=late)
        times = cost.simulated_timeline(recorded)
        # The only difference: the simulation leaves out the wait for the second reduction.
        assert makespan(times) == pytest.approx(makespan(cost.measured_timeline(recorded, 3)), rel=0.1)


def test_every_action_that_was_measured_is_compared():
    recorded = trace()
    rows = cost.compare_timelines(recorded, 3, cost.simulated_timeline(recorded))
    assert {(row.rank, row.action) for row in rows} == {(r, str(a)) for r, actions in PROGRAM.items() for a in actions}
    assert all(row.measured == pytest.approx(row.simulated) for row in rows)


def test_time_by_action_adds_up_to_the_step():
    spent = step_breakdown.seconds_by_category(trace(late=1.0))
    assert sum(seconds for name, seconds in spent.items() if name != step_breakdown.REDUCE_TIME) == pytest.approx(14.0)
    assert spent["data"] == pytest.approx(1.0)
    assert spent["reduce"] == pytest.approx(2.0)
    assert spent["forward"] == pytest.approx(1.0)


def zero1_trace() -> Trace:
    """One step of zero 1: each bucket is updated, then its weights are all-gathered. There are no waits."""
    found = [
        ("step", COMPUTE_LANE, 0.0, 10.0),
        ("F0.0", COMPUTE_LANE, 0.0, 1.0),
        ("M0.0", COMPUTE_LANE, 1.0, 1.5),
        ("B0.0", COMPUTE_LANE, 1.5, 4.0),
        ("R0.0", REDUCE_LANE, 3.0, 3.5),
        ("R0.1", REDUCE_LANE, 4.0, 4.5),
        ("U0.0", COMPUTE_LANE, 4.5, 5.0),
        ("G0.0", REDUCE_LANE, 5.0, 6.5),
        ("U0.1", COMPUTE_LANE, 6.5, 7.0),
        ("G0.1", REDUCE_LANE, 7.0, 9.5),
    ]
    program = {0: lower_step(DataStepSpec(1, 2, RESTING_LAYOUTS[1]))}
    return Trace(program, tuple(Event(0, 3, *row) for row in found))


def zero3_trace() -> Trace:
    """One step of zero 3 with two buckets: the second unshard of a phase begins when the first is used."""
    rows = [
        ("A0.1", REDUCE_LANE, 0.0, 2.0),
        ("F0.0", COMPUTE_LANE, 0.0, 10.0),
        (WAIT_SPAN, COMPUTE_LANE, 0.0, 2.0),
        ("A0.0", REDUCE_LANE, 2.0, 5.0),
        ("M0.0", COMPUTE_LANE, 10.0, 11.0),
        ("A0.2", REDUCE_LANE, 11.0, 12.0),
        ("B0.0", COMPUTE_LANE, 11.0, 24.0),
        (WAIT_SPAN, COMPUTE_LANE, 11.0, 12.0),
        ("A0.3", REDUCE_LANE, 12.0, 20.0),
        (WAIT_SPAN, COMPUTE_LANE, 15.0, 20.0),
        ("R0.0", REDUCE_LANE, 24.0, 25.0),
        ("R0.1", REDUCE_LANE, 25.0, 26.0),
        ("U0.0", COMPUTE_LANE, 25.0, 26.0),
        ("U0.1", COMPUTE_LANE, 26.0, 27.0),
    ]
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 2, RESTING_LAYOUTS[3])))
    return Trace(program, tuple(Event(rank, 3, *row) for rank in range(2) for row in rows))


def test_unshards_overlap_with_the_forward_or_backward_that_uses_them():
    recorded = zero3_trace()
    costs = cost.measure_costs(recorded)
    assert (costs.seconds[0, "F0.0"], costs.seconds[0, "B0.0"]) == (8.0, 7.0)
    overlaps = {(action, needed): seconds for (rank, action, needed), seconds in costs.overlaps.items() if not rank}
    assert [overlaps["F0.0", "A0.1"], overlaps["F0.0", "A0.0"]] == [0.0, 3.0]
    assert [overlaps["B0.0", "A0.2"], overlaps["B0.0", "A0.3"]] == [0.0, 3.0]
    times = {str(timed.action): timed for timed in cost.simulated_timeline(recorded)[0]}
    measured = {str(timed.action): timed for timed in cost.measured_timeline(recorded, 3)[0]}
    assert all(times[name].end == pytest.approx(measured[name].end) for name in measured)
    spent = step_breakdown.seconds_by_category(recorded)
    assert spent["unshard"] == 14.0


def test_an_unshard_that_begins_before_its_phase_overlaps_with_the_phase_before():
    recorded = zero3_trace()
    early = [e._replace(start=9.0, stop=10.5) if e.name == "A0.2" else e for e in recorded.events]
    costs = cost.measure_costs(Trace(recorded.program, tuple(early)))
    assert costs.overlaps[0, "A0.2", "M0.0"] == pytest.approx(2.0)


def test_all_gathers_are_a_category_of_their_own():
    spent = step_breakdown.seconds_by_category(zero1_trace())
    assert spent["gather"] == pytest.approx(4.0)
    assert spent["between actions"] == pytest.approx(1.0)
    assert sum(seconds for name, seconds in spent.items() if name != step_breakdown.REDUCE_TIME) == pytest.approx(10.0)


def test_every_verb_has_a_time_category():
    assert set(step_breakdown.CATEGORIES) == set(Verb)


def test_the_typical_step_is_the_one_of_median_duration():
    recorded = trace()
    slow = [e._replace(step=5, stop=e.stop + 50) for e in recorded.events if e.step == 3 and e.name == "U0.1"]
    others = [e._replace(step=5) for e in recorded.events if e.step == 3 and e.name != "U0.1"]
    assert cost.median_step(Trace(PROGRAM, (*slow, *others, *recorded.events))) in (3, 4)


def test_of_two_sampled_steps_the_typical_one_is_shown_and_simulated():
    recorded = trace()
    slow = Trace(PROGRAM, tuple(e._replace(start=e.start * 3, stop=e.stop * 3) for e in recorded.events if e.step == 3))
    both = Trace(PROGRAM, (*slow.events, *(e for e in recorded.events if e.step == 4)))
    alone = Trace(PROGRAM, tuple(e for e in recorded.events if e.step == 4))
    assert cost.median_step(both) == 4
    assert cost.measure_costs(both).seconds == cost.measure_costs(alone).seconds


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8))
def test_overlapping_waits_count_once(spans):
    waits = [Event(0, 3, WAIT_SPAN, COMPUTE_LANE, float(min(span)), float(max(span))) for span in spans]
    within = Event(0, 3, "U0.0", COMPUTE_LANE, 10.0, 40.0)
    covered = {second for wait in waits for second in range(int(wait.start), int(wait.stop)) if 10 <= second < 40}
    assert waiting_seconds_within(waits, within) == len(covered)
    joined = merged_waits(waits)
    assert sum(each.seconds for each in joined) == len({s for w in waits for s in range(int(w.start), int(w.stop))})


@given(
    offset=st.integers(-(10**15), 10**15),
    delays=st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=2, max_size=8),
)
def test_the_true_clock_offset_lies_within_the_bounds(offset, delays):
    now, mine, theirs = 10**9, [], []
    for first, second in delays:
        mine.append(now + first)
        theirs.append(now + second + offset)
        now += 10**6  # a round ends after both have begun it
    least, most = clock_offset_bounds(mine, theirs)
    assert least <= offset <= most


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"traceEvents": [], "otherData": {"program": "0: Q"}}'])
def test_an_invalid_trace_file_is_refused(data):
    with pytest.raises(TraceError, match=r"no trace of a run"):
        decode_trace(data)


def test_a_trace_file_is_in_perfettos_format():
    rows = json.loads(encode_trace(trace(late=1.0)))["traceEvents"]
    assert {row["ph"] for row in rows} == {"M", "X", "i"}
    assert {row["pid"] for row in rows} == {0, 1}
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "compute", "reduce", "send"}
    assert {row["cat"] for row in rows if row["name"] == "wait"} == {"wait"}
    assert all(row["dur"] >= 0 for row in rows if row["ph"] == "X")


def test_a_program_is_simulated_with_its_costs():
    found = cost.ActionCosts({(0, "F0.0"): 2.0, (1, "F0.0"): 3.0}, {})
    times = simulate(PROGRAM, found.cost, overlap=found.overlap)
    assert (times[0][0].end, times[1][0].end) == (2.0, 3.0)
