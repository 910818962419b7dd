"""Laws of accelerator utilization: compute time over running time, and every figure of the same steps."""

from hypothesis import given
from hypothesis import strategies as st

from fourfold.trace.utilization import (
    NO_STEPS,
    TimedStep,
    TrainedStep,
    Window,
    add_windows,
    all_ranks,
    epoch_window,
    longest_waiting,
    training_window,
)

SIXTEENTHS = st.integers(0, 64).map(lambda number: number / 16)  # exact in binary


def steps_of(waits: list[float], computes: list[float], *, samples: int = 4, num_bytes: int = 100) -> list[TimedStep]:
    """Steps one after the other, on a clock that starts at 1000."""
    now, found = 1000.0, []
    for wait, compute in zip(waits, computes, strict=True):
        found.append(TimedStep(now, now + wait, now + wait + compute, compute, samples, num_bytes))
        now += wait + compute
    return found


@given(pairs=st.lists(st.tuples(SIXTEENTHS, SIXTEENTHS), min_size=2, max_size=9))
def test_utilization_is_compute_over_running_time_without_the_first_step(pairs):
    waits, computes = map(list, zip(*pairs, strict=True))
    window = epoch_window(steps_of(waits, computes))
    assert window.compute_seconds == sum(computes[1:])
    assert window.running_seconds == sum(computes[1:]) + sum(waits[1:])
    running = window.running_seconds
    assert window.utilization == (sum(computes[1:]) / running if running else None)
    assert (window.num_steps, window.num_samples, window.bytes_read) == (
        len(pairs) - 1,
        4 * (len(pairs) - 1),
        100 * (len(pairs) - 1),
    )


def test_figures_by_hand():
    window = epoch_window(steps_of([9.0, 1.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]))
    assert window == Window(3, 12, 6.0, 8.0, 300)
    assert (window.utilization, window.samples_per_second, window.bytes_per_second) == (0.75, 1.5, 37.5)


def test_a_wait_at_the_barrier_is_not_computing():
    early = [TimedStep(0, 0, 2.0, 1.0, 1), TimedStep(2.0, 2.0, 6.0, 1.0, 1)]
    late = [TimedStep(0, 1.0, 2.0, 1.0, 1), TimedStep(2.0, 5.0, 6.0, 1.0, 1)]
    assert epoch_window(early).utilization == epoch_window(late).utilization == 0.25
    assert all_ranks([epoch_window(early), epoch_window(late)]) == Window(1, 2, 1.0, 4.0, None)


def test_an_epoch_of_one_step_has_no_figure():
    assert epoch_window(steps_of([1.0], [1.0])) == NO_STEPS == epoch_window([])
    assert NO_STEPS.utilization is NO_STEPS.samples_per_second is NO_STEPS.bytes_per_second is None


def test_windows_add_up_by_time_and_unknown_bytes_stay_unknown():
    total = add_windows([Window(1, 2, 1.0, 2.0, 10), Window(3, 6, 3.0, 3.0, 20)])
    assert total == Window(4, 8, 4.0, 5.0, 30)
    assert total.utilization == 0.8
    assert add_windows([total, Window(1, 1, 1.0, 1.0)]).bytes_read is None


@given(
    rows=st.lists(st.tuples(SIXTEENTHS, SIXTEENTHS, SIXTEENTHS), min_size=1, max_size=9),
)
def test_in_training_the_longest_wait_of_any_rank_is_charged(rows):
    """Two ranks whose steps end together: each computes for `compute`, and waits in the step for the later one."""
    found = []
    for rank in range(2):
        waits = [row[rank] for row in rows]
        steps = [
            TrainedStep(number, waits[number], max(row[:2]) - row[rank] + row[2], 8) for number, row in enumerate(rows)
        ]
        found.append(training_window(steps, [[row[0] for row in rows], [row[1] for row in rows]]))
    assert found[0] == found[1]
    assert found[0].compute_seconds == sum(row[2] for row in rows)
    assert found[0].running_seconds == sum(max(row[:2]) + row[2] for row in rows)


def test_the_rank_that_is_waited_for_is_named():
    assert longest_waiting([[0.1, 0.1, 0.1], [0.0, 0.9, 0.0]]) == (1, 0.9)
    assert longest_waiting([[0.5, 0.1], [0.4, 0.1]]) == (0, 0.6)
