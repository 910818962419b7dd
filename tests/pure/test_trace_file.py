"""Laws of traces: their file, their clocks, and the time by action."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.trace import utilization
from fourfold.trace.trace_file import (
    Event,
    Interval,
    RankEvents,
    Trace,
    TraceError,
    clock_offset_bounds,
    decode_trace,
    encode_trace,
    merged_waits,
)
from fourfold.words.mesh import Mesh
from fourfold.words.program import Verb
from fourfold.words.trace_events import COMPUTE_LANE, REDUCE_LANE, WAIT_SPAN
from tests.recorded_traces import PROGRAM, trace, zero1_trace

NANO = st.integers(0, 10**12)


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
    again = decode_trace(encode_trace(Trace(PROGRAM, tuple(found), Mesh(cp=2), ((0, 1),))))
    assert (again.program, again.mesh, again.ranks_by_memory) == (PROGRAM, Mesh(cp=2), ((0, 1),))
    for before, after in zip(found, again.events, strict=True):
        assert before[:4] == after[:4]
        assert after[4:] == pytest.approx(before[4:], rel=0, abs=0.6e-9)


def test_a_trace_without_a_mesh_is_one_of_data_ranks_that_share_no_memory():
    data = json.loads(encode_trace(trace()))
    del data["otherData"]["mesh"], data["otherData"]["ranks_by_memory"]
    assert decode_trace(json.dumps(data).encode()) == decode_trace(encode_trace(trace()))
    data["otherData"]["mesh"] = {"depth": 2}
    with pytest.raises(TraceError):
        decode_trace(json.dumps(data).encode())


def test_time_by_action_adds_up_to_the_step():
    spent = utilization.seconds_by_category(trace(late=1.0))
    assert sum(seconds for name, seconds in spent.items() if name != utilization.REDUCE_TIME) == pytest.approx(14.0)
    assert spent["data"] == pytest.approx(1.0)
    assert spent["reduce"] == pytest.approx(3.5)
    assert spent["forward"] == pytest.approx(1.0)


def test_all_gathers_are_a_category_in_the_background():
    spent = utilization.seconds_by_category(zero1_trace())
    assert spent["gather"] == pytest.approx(4.0)
    assert spent["between actions"] == pytest.approx(5.0)
    own = [seconds for name, seconds in spent.items() if name not in utilization.BACKGROUND_TIMES]
    assert sum(own) == pytest.approx(10.0)


def test_every_verb_has_a_time_category():
    assert set(utilization.CATEGORIES) == set(Verb)


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8))
def test_overlapping_waits_count_once(spans):
    waits = [Event(0, 3, WAIT_SPAN, COMPUTE_LANE, float(min(span)), float(max(span))) for span in spans]
    covered = {second for wait in waits for second in range(int(wait.start), int(wait.stop)) if 10 <= second < 40}
    assert RankEvents(waits).busy_seconds(Interval(10.0, 40.0)) == 30 - len(covered)
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
    assert names == {"rank 0", "rank 1", "compute", "reduce", "send", "gather", "data"}
    assert {row["cat"] for row in rows if row["name"] == "wait"} == {"wait"}
    assert all(row["dur"] >= 0 for row in rows if row["ph"] == "X")
