"""Progress: one status line on a terminal, redrawn in place; a few plain lines in a log.

line     where a run stands: step, loss, throughput, fraction of time spent waiting, time left
message  a text above the line, such as an evaluation or a warning
Law: steps redraw a terminal at most four times a second, and add a line to a log every 2 to 60 seconds. An output that
cannot be written (`| head` has ended) never stops the run.
"""

import atexit
import contextlib
import dataclasses
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from fourfold.environment.launchers import OPEN_MPI, detected_launchers
from fourfold.environment.standard_streams import print_stderr, redirect_to_null
from fourfold.words.errors import os_error_text
from fourfold.words.terminal_text import escape_controls, wrap_lines
from fourfold.words.units import format_si, format_three_digits

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

REDRAW_SECONDS = 0.25
NUM_LOG_LINES = 20
LOG_INTERVAL_SECONDS = (2.0, 60.0)  # least and most between two lines of a log
BAR_WIDTHS = (30, 20, 10)  # the widest that fits is drawn; none on a narrower terminal
MIN_CELLS = 2  # step and loss


@dataclasses.dataclass(frozen=True)
class ProgressLine:
    """Where a run stands. Loss, throughput and waiting are means of the last steps.

    units_per_second  over all ranks
    waiting_fraction  see `measures.waiting_fraction`
    wait              what the run waits for at the moment; "" while it trains
    """

    step: int
    num_steps: int
    loss: float
    units_per_second: float
    unit: str
    waiting_fraction: float
    remaining_seconds: float | None
    wait: str = ""


class Progress:
    """Shows a run's progress, on one rank only. `live=False`: plain lines, even on a terminal."""

    def __init__(
        self, file: TextIO | None = None, *, live: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = sys.stdout if file is None else file
        self._allows_live = live
        self._clock = clock
        self._shown_at: float | None = None
        self._began_at = clock()
        self._last: ProgressLine | None = None
        self._drawn: ProgressLine | None = None
        self._wait_shown_at: float | None = None
        """When a wait was shown, since the last step."""
        self._lock = threading.RLock()
        """Of the output: waits are shown by a thread of their own."""
        self._is_output_open = True
        self._console: Console | None = None
        self._live: Live | None = None

    def start(self, text: str) -> None:
        """Begin; `text` says what runs and how."""
        self._began_at = self._clock()
        self.print_message(text)

    def show_step(self, line: ProgressLine) -> None:
        """Show a finished step, if a redraw or a line of the log is due."""
        self._last, self._wait_shown_at = line, None
        now = self._clock()
        if self._shown_at is not None and now - self._shown_at < self._interval(line, now):
            return
        self._shown_at = now
        self._draw(line)

    def show_wait(self, text: str) -> None:
        """Show in place of the rest of the line what the run waits for; in a log, at first and once a minute."""
        now = self._clock()
        is_due = self._wait_shown_at is None or now - self._wait_shown_at >= LOG_INTERVAL_SECONDS[1]
        if not (is_due or self._is_live()):
            return
        self._wait_shown_at = now
        if self._last is not None:
            self._draw(dataclasses.replace(self._last, wait=text))
        elif is_due:
            self.print_message(text)

    def finish(self, text: str) -> None:
        """End after a successful run: the last step's line, then `text`."""
        self.close()
        self.print_message(text)

    def close(self) -> None:
        """Show the last step, if that is still to do, and give the terminal back. Further calls do nothing."""
        if self._last is not None and self._last is not self._drawn:
            self._draw(self._last)
        if self._live is not None:
            live, self._live = self._live, None
            atexit.unregister(self.close)
            with self._tolerating_write_errors():
                live.stop()

    def _interval(self, line: ProgressLine, now: float) -> float:
        if self._is_live():
            return REDRAW_SECONDS
        total = now - self._began_at + (line.remaining_seconds or 0.0)
        shortest, longest = LOG_INTERVAL_SECONDS
        return min(max(total / NUM_LOG_LINES, shortest), longest)

    def _draw(self, line: ProgressLine) -> None:
        self._drawn = line
        with self._tolerating_write_errors():
            self._draw_now(line)

    def _draw_now(self, line: ProgressLine) -> None:
        console = self._get_console()
        if not self._is_live():
            self.print_message(format_log_line(line))
            return
        if self._live is None:
            from rich.live import Live

            # No redraw thread: it would take the interpreter lock from the training loop. A rank that ends early must
            # show the cursor again, hence atexit.
            self._live = Live(console=console, auto_refresh=False)
            atexit.register(self.close)
            self._live.start()
        from rich.text import Text

        self._live.update(
            Text.assemble(*fit_to_width(line, console.width), no_wrap=True, overflow="crop"), refresh=True
        )

    def print_message(self, text: str) -> None:
        """Print a message above the line."""
        from rich.text import Text

        with self._tolerating_write_errors():
            self._get_console().print(Text(wrap_lines(escape_controls(text))), soft_wrap=True)

    @contextlib.contextmanager
    def _tolerating_write_errors(self) -> Iterator[None]:
        """Context manager: the first write error is reported on stderr, and from then on nothing is shown."""
        try:
            with self._lock:
                yield
        except OSError as error:
            if self._is_output_open:
                self._is_output_open = False
                print_stderr(
                    f"fourfold: the output could not be written: {os_error_text(error)}; the run continues without it"
                )
            if self._live is not None:
                atexit.unregister(self.close)
                self._live = None
            redirect_to_null(self._file)

    def _is_live(self) -> bool:
        console = self._get_console()
        return self._allows_live and console.is_terminal and not console.is_dumb_terminal

    def _get_console(self) -> "Console":
        if self._console is None:
            from rich.console import Console

            class NonExitingConsole(Console):
                def on_broken_pipe(self) -> None:  # rich's own ends the process
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

            self._console = NonExitingConsole(file=self._file, highlight=False)
        return self._console


def make_progress() -> Progress:
    """The display of a command or a script, on its standard output."""
    # Open MPI gives every rank a terminal even if its own output goes to a file, which redrawn lines would fill.
    return Progress(live=detected_launchers(os.environ)[:1] != [OPEN_MPI])


def format_cells(line: ProgressLine) -> list[str]:
    """The cells of a line, padded so that they rarely move during a run."""
    width = len(str(line.num_steps))
    cells = [f"step {line.step:>{width}}/{line.num_steps}", f"mean loss {format_loss(line.loss):>6}"]
    if line.wait:
        return [*cells, line.wait]
    cells += [
        f"{format_si(line.units_per_second):>7} {line.unit}/s",
        f"waiting {round(100 * line.waiting_fraction):>2} %",
    ]
    if line.remaining_seconds is not None:
        cells.append(f"{format_duration(line.remaining_seconds):>7} left")
    return cells


def format_log_line(line: ProgressLine) -> str:
    """The line for a log: its cells, closer together where they would not fit into 80 columns."""
    texts = [gap.join(format_cells(line)) for gap in ("   ", "  ", " ")]
    return next((text for text in texts if len(text) <= 80), texts[-1])


def fit_to_width(line: ProgressLine, width: int) -> list[tuple[str, str]]:
    """The line for a terminal of `width` columns, as (text, style): a bar if there is room, else fewer cells."""
    cells = format_cells(line)
    if line.wait:
        return [("   ".join(cells)[: width - 1], "bold")]
    num_cells = len(cells)
    while len(cells) > MIN_CELLS and len("   ".join(cells)) >= width:
        cells.pop(2 if len(cells) == 3 else 3)  # waiting and time left go first, then the rate
    room = width - len("   ".join(cells)) - 4
    bar = next((length for length in BAR_WIDTHS if length <= room), 0) if len(cells) == num_cells else 0
    done = round(bar * line.step / max(1, line.num_steps))
    bar_parts = [("━" * done, "cyan"), ("━" * (bar - done), "bright_black"), ("   ", "")] if bar else []
    styles = ("bold", "bold", "", "", "")
    spaced = [(text + ("   " if i + 1 < len(cells) else ""), styles[i]) for i, text in enumerate(cells)]
    return bar_parts + spaced


def format_loss(value: float) -> str:
    """A loss in about five digits: 2.3026, 12.346, 123.46, 1.23e+04."""
    for limit, digits in ((10, 4), (100, 3), (1000, 2)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.2e}"


def format_duration(seconds: float) -> str:
    """A time for people: 0:09, 12:05, 3:07:00, 2d 05h."""
    whole = max(0, round(seconds))
    if whole >= 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600:02}h"
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def format_seconds(seconds: float) -> str:
    """A short time with its unit: 1.7 ms, 4.2 s, 12:05."""
    if seconds >= 99.95:
        return format_duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{format_three_digits(seconds * 1e3)} ms"
