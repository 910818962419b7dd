"""Traces written by hand: what two ranks recorded in a few steps, in whole and half seconds."""

from fourfold.axes.data.rules.step_program import DataStepSpec, lower_step
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS
from fourfold.trace.trace_file import Event, Trace
from fourfold.words.trace_events import COMPUTE_LANE, DATA_LANE, GATHER_LANE, REDUCE_LANE, WAIT_SPAN

PROGRAM = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 2)))


def trace(*, late: float = 0.0) -> Trace:
    """Two ranks, two steps: rank 1 is `late` seconds slower in backward, and rank 0 waits for it to update."""
    found = []
    for step in (3, 4):
        begin = 100.0 * step
        for rank in range(2):
            end = begin + 5 + (late if rank else 0.0)
            rows = [
                ("step", COMPUTE_LANE, begin - 1, begin + 12 + late),
                ("data", DATA_LANE, begin - 1, begin),
                ("F0.0", COMPUTE_LANE, begin, begin + 1),
                ("M0.0", COMPUTE_LANE, begin + 1, begin + 1.5),
                ("B0.0", COMPUTE_LANE, begin + 1.5, end),
                ("R0.0 ready", REDUCE_LANE, end - 2, end - 2),
                ("R0.0 sent", REDUCE_LANE, end - 2, end - 2),
                ("R0.1 ready", REDUCE_LANE, end, end),
                ("R0.1 sent", REDUCE_LANE, end, end),
                ("R0.0", REDUCE_LANE, begin + 3 + late, begin + 5 + late),
                ("R0.1", REDUCE_LANE, begin + 5 + late, begin + 6.5 + late),
                ("U0.0", COMPUTE_LANE, end, begin + 6 + late),
                (WAIT_SPAN, COMPUTE_LANE, end, begin + 5 + late),
                ("U0.1", COMPUTE_LANE, begin + 6 + late, begin + 8 + late),
                (WAIT_SPAN, COMPUTE_LANE, begin + 6 + late, begin + 6.5 + late),
                (WAIT_SPAN, COMPUTE_LANE, begin + 6 + late, begin + 6.25 + late),
            ]
            found += [Event(rank, step, *row) for row in rows if row[0] != WAIT_SPAN or row[3] > row[2]]
    return Trace(PROGRAM, tuple(found))


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
        ("G0.0", GATHER_LANE, 5.0, 6.5),
        ("U0.1", COMPUTE_LANE, 6.5, 7.0),
        ("G0.1", GATHER_LANE, 7.0, 9.5),
    ]
    program = {0: lower_step(DataStepSpec(1, 2, RESTING_LAYOUTS[1]))}
    return Trace(program, tuple(Event(0, 3, *row) for row in found))


def zero3_trace() -> Trace:
    """One step of zero 3 with two buckets: the second unshard of a phase begins when the first is used."""
    rows = [
        ("A0.1", GATHER_LANE, 0.0, 2.0),
        ("F0.0", COMPUTE_LANE, 0.0, 10.0),
        (WAIT_SPAN, COMPUTE_LANE, 0.0, 2.0),
        ("A0.0", GATHER_LANE, 2.0, 5.0),
        ("M0.0", COMPUTE_LANE, 10.0, 11.0),
        ("A0.2", GATHER_LANE, 11.0, 12.0),
        ("B0.0", COMPUTE_LANE, 11.0, 24.0),
        (WAIT_SPAN, COMPUTE_LANE, 11.0, 12.0),
        ("A0.3", GATHER_LANE, 12.0, 20.0),
        (WAIT_SPAN, COMPUTE_LANE, 15.0, 20.0),
        ("R0.0", REDUCE_LANE, 24.0, 25.0),
        ("R0.1", REDUCE_LANE, 25.0, 26.0),
        ("U0.0", COMPUTE_LANE, 24.0, 26.0),
        (WAIT_SPAN, COMPUTE_LANE, 24.0, 25.0),
        ("U0.1", COMPUTE_LANE, 26.0, 27.0),
    ]
    program = dict.fromkeys(range(2), lower_step(DataStepSpec(1, 2, RESTING_LAYOUTS[3])))
    return Trace(program, tuple(Event(rank, 3, *row) for rank in range(2) for row in rows))
