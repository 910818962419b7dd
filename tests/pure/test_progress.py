"""The progress line: few redraws on a terminal, few plain lines in a log."""

import dataclasses
import io
import os
from pathlib import Path

import pytest

from fourfold.trainer.progress import (
    LOG_INTERVAL_SECONDS,
    Progress,
    ProgressLine,
    fit_to_width,
    format_cells,
    format_duration,
    format_log_line,
    format_loss,
)
from fourfold.trainer.run_logger import RunResult, format_summary


def line(step: int, *, steps: int = 1000, seconds_left: float | None = 60.0) -> ProgressLine:
    return ProgressLine(
        step=step,
        num_steps=steps,
        loss=2.5,
        units_per_second=12_345.0,
        unit="tokens",
        waiting_fraction=0.08,
        remaining_seconds=seconds_left,
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(*, steps: int, seconds_per_step: float) -> list[str]:
    file, clock = io.StringIO(), Clock()
    progress = Progress(file, clock=clock)
    progress.start("begin")
    for step in range(1, steps + 1):
        clock.now += seconds_per_step
        progress.show_step(line(step, steps=steps, seconds_left=(steps - step) * seconds_per_step))
    progress.finish("end")
    return file.getvalue().splitlines()


def test_a_log_shows_the_first_and_last_step_and_about_twenty_in_all() -> None:
    lines = logged(steps=1000, seconds_per_step=0.12)
    assert lines[0] == "begin"
    assert lines[1].startswith("step    1/1000")
    assert lines[-2].startswith("step 1000/1000")
    assert lines[-1] == "end"
    assert 18 <= len(lines) - 2 <= 23


@pytest.mark.parametrize("seconds_per_step", [0.001, 0.12, 30.0])
def test_log_lines_come_at_bounded_intervals(seconds_per_step: float) -> None:
    shown = len(logged(steps=300, seconds_per_step=seconds_per_step)) - 2
    total = 300 * seconds_per_step
    least, most = LOG_INTERVAL_SECONDS
    assert total / most - 2 <= shown <= total / least + 2


def test_the_last_step_is_shown_once() -> None:
    assert sum(text.startswith("step 5/5") for text in logged(steps=5, seconds_per_step=100.0)) == 1


def test_lines_of_a_run_are_aligned() -> None:
    texts = ["   ".join(format_cells(line(step))) for step in (1, 20, 300, 1000)]
    assert len({len(text) for text in texts}) == 1
    assert texts[0] == "step    1/1000   mean loss 2.5000    12.3 k tokens/s   waiting  8 %      1:00 left"


def test_a_terminal_shows_one_progress_line_with_messages_above_it() -> None:
    file, clock = Terminal(), Clock()
    progress = Progress(file, clock=clock)
    for step in (1, 2, 3):  # within a quarter of a second: drawn once
        progress.show_step(line(step))
    assert file.getvalue().count("/1000") == 1
    progress.print_message("validation 1.5")
    progress.finish("end")
    text = file.getvalue()
    assert "validation 1.5" in text
    assert text.index("validation 1.5") < text.rindex("step    3/1000") < text.rindex("end")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is shown again


@pytest.mark.parametrize("width", range(10, 140, 7))
def test_a_line_fits_its_terminal(width: int) -> None:
    parts = fit_to_width(line(500), width)
    text = "".join(part for part, _ in parts)
    assert text.strip("━ ").startswith("step  500/1000   mean loss 2.5000")
    assert len(text) < width or width < 35
    assert ("━" in text) == (width >= len("   ".join(format_cells(line(500)))) + 14)  # a bar only if all cells fit


def test_a_wait_is_shown_in_the_line_and_in_a_log_once_a_minute() -> None:
    text = "rank 1 waits 0:04 for http://host/x: refused"
    assert format_cells(dataclasses.replace(line(7), wait=text)) == ["step    7/1000", "mean loss 2.5000", text]
    assert fit_to_width(dataclasses.replace(line(7), wait=text), 40)[0][0] == "step    7/1000   mean loss 2.5000   ran"
    file, clock = io.StringIO(), Clock()
    progress = Progress(file, clock=clock)
    progress.show_wait(text)  # before the first step
    progress.show_step(line(7))
    for clock.now in range(100, 200):
        progress.show_wait(text)
    lines = file.getvalue().splitlines()
    assert [text in shown for shown in lines] == [True, False, True, True]
    assert lines[2].startswith("step    7/1000   mean loss 2.5000   rank 1")


def test_messages_are_printed_without_terminal_controls() -> None:
    file = io.StringIO()
    Progress(file).print_message("a\x1b[31m [bold]b[/bold]\r\n\tc")
    assert file.getvalue().splitlines() == ["a\\x1b[31m [bold]b[/bold]\\r", "        c"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0:00"), (9.4, "0:09"), (725, "12:05"), (11_220, "3:07:00"), (190_800, "2d 05h")]
)
def test_durations_are_human_readable(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_losses_keep_their_width_as_they_decrease() -> None:
    assert [format_loss(value) for value in (123.456, 12.3456, 2.30258)] == ["123.46", "12.346", "2.3026"]
    assert format_loss(float("nan")) == "nan"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_continues_if_its_output_cannot_be_written(terminal: bool, capfd: pytest.CaptureFixture[str]) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "w") as file:
        if terminal:
            file.isatty = lambda: True  # type: ignore[method-assign]
        progress = Progress(file)
        progress.start("begin")
        progress.show_step(line(1))
        progress.print_message("half of it")
        progress.finish("end")
    assert capfd.readouterr() == (
        "",
        "fourfold: the output could not be written: broken pipe; the run continues without it\n",
    )


@pytest.mark.parametrize("steps", [0, 2])
def test_a_summary_says_that_nothing_was_left_to_train_and_gives_no_rate_for_it(steps):
    result = RunResult(Path("runs/run"), 8, 0.5, {"loss": 0.25}, 40.0, 1.6, None)
    text = format_summary(result, "samples", steps=steps)
    assert ("samples per second" in text) == ("1.6 s for 2 steps" in text) == bool(steps)
    assert ("all 8 had been done; nothing was left to train" in text) == (not steps)


@pytest.mark.parametrize("num_steps", [20, 250, 20_000, 100_000])
def test_a_line_of_the_log_keeps_all_cells_within_80_columns(num_steps: int):
    shown = dataclasses.replace(line(7), num_steps=num_steps, unit="samples")
    text = format_log_line(shown)
    assert len(text) <= 80
    assert [cell in text for cell in format_cells(shown)] == [True] * 5
