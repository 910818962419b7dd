"""Laws of the progress of `fourfold plan`: short, on stderr, and an interrupt says the best so far."""

import io
import sys
import threading

import pytest

from fourfold.cli.plan import progress as plan_progress
from fourfold.cli.plan.progress import CLEAR, interrupted_text, progress_line, shown_progress
from fourfold.planner.search.decision import Progress
from tests.decision_cases import BEST, SLOW

DEEP = Progress("searching", 41, 200, BEST)


class Stream(io.StringIO):
    """A stderr. `written`: set by the first text."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal, self.written = is_terminal, threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_line_says_how_far_it_is_and_the_best_so_far_and_fits(width: int):
    line = progress_line(DEEP, width)
    assert line.startswith("searching, 20 %; best so far 41.0 ms: "[: width - 2])
    assert len(line) < width
    assert progress_line(Progress(), width) == ""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_gets_one_line_and_other_readers_whole_ones(monkeypatch, capsys, is_terminal: bool):
    stream = Stream(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(plan_progress, "FIRST", 0.0)
    with shown_progress(DEEP):
        assert stream.written.wait(30)
    text = stream.getvalue()
    if is_terminal:
        assert "\n" not in text
        assert text.endswith(CLEAR)
    else:
        assert set(text.splitlines()) == {progress_line(DEEP, 80)}
    assert capsys.readouterr().out == ""


def test_an_interrupt_says_the_best_so_far_at_80_columns():
    with pytest.raises(KeyboardInterrupt, match="best so far") as stop, shown_progress(DEEP):
        raise KeyboardInterrupt
    assert str(stop.value) == interrupted_text(DEEP)
    assert max(map(len, str(stop.value).splitlines())) <= 80 - len("fourfold: ")
    with pytest.raises(KeyboardInterrupt, match="no plan that fits was found yet"), shown_progress(Progress()):
        raise KeyboardInterrupt


def test_the_best_so_far_is_the_fastest_that_was_offered():
    progress = Progress()
    for each in (SLOW, BEST, SLOW):
        progress.offer(each)
    assert progress.best is BEST
