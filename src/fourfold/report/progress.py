"""Progress: one calm line on a terminal, a few plain ones in a log.

line  where a run stands: step, loss, throughput, share of time not spent computing, time left
note  a text of its own (an evaluation, a warning), shown above the line
Law: showing never floods: at most a few redraws a second on a terminal, a line in 2 to 60 seconds in a log. A run
is worth more than what is shown of it: where nobody reads any more (`| head`), it goes on unseen.
"""

import atexit
import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from fourfold.environment.standard_streams import print_stderr, redirect_to_null
from fourfold.words.errors import os_error_text
from fourfold.words.progress import ProgressLine
from fourfold.words.terminal_text import escape_controls
from fourfold.words.units import format_si, format_three_digits

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

REDRAW_SECONDS = 0.25
NUM_LOG_LINES = 20
LOG_INTERVAL_SECONDS = (2.0, 60.0)  # the least and the most between two lines of a log
BAR_WIDTHS = (30, 20, 10)  # what is tried, widest first; none where the terminal is narrower
MIN_CELLS = 2  # step and loss


class Progress:
    """Shows a run to a person. Made and used on one rank only. `live=False`: plain lines, on a terminal too."""

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
        self._is_output_open = True
        self._console: Console | None = None
        self._live: Live | None = None

    def start(self, text: str) -> None:
        """The run begins; `text` says what runs and how."""
        self._began_at = self._clock()
        self._print(text)

    def show_step(self, line: ProgressLine) -> None:
        """A step is done. Draws at most every quarter of a second; in a log when a line is due."""
        self._last = line
        now = self._clock()
        if self._shown_at is not None and now - self._shown_at < self._interval(line, now):
            return
        self._shown_at = now
        self._draw(line)

    def print_message(self, text: str) -> None:
        """A text of its own, above the line."""
        self._print(text)

    def finish(self, text: str) -> None:
        """The run has ended well: the last step's line, then `text`."""
        self.close()
        self._print(text)

    def close(self) -> None:
        """Give the terminal back, with the last line on it. May be called again."""
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
        least, most = LOG_INTERVAL_SECONDS
        return min(max(total / NUM_LOG_LINES, least), most)

    def _draw(self, line: ProgressLine) -> None:
        self._drawn = line
        with self._tolerating_write_errors():
            self._draw_now(line)

    def _draw_now(self, line: ProgressLine) -> None:
        console = self._get_console()
        if not self._is_live():
            self._print("   ".join(format_cells(line)))
            return
        if self._live is None:
            from rich.live import Live

            # No thread that redraws: it would take the interpreter from the training loop. A rank that ends early
            # must still show the cursor again, so the end of the process closes too.
            self._live = Live(console=console, auto_refresh=False)
            atexit.register(self.close)
            self._live.start()
        from rich.text import Text

        self._live.update(
            Text.assemble(*fit_to_width(line, console.width), no_wrap=True, overflow="crop"), refresh=True
        )

    def _print(self, text: str) -> None:
        from rich.text import Text

        with self._tolerating_write_errors():
            self._get_console().print(Text(escape_controls(text)), soft_wrap=True)

    @contextlib.contextmanager
    def _tolerating_write_errors(self) -> Iterator[None]:
        """Within: what cannot be written is told once on stderr, and the rest is not shown."""
        try:
            yield
        except OSError as error:
            if self._is_output_open:
                self._is_output_open = False
                print_stderr(
                    f"fourfold: the output could not be written: {os_error_text(error)}; the run goes on unseen"
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

            class Told(Console):
                def on_broken_pipe(self) -> None:  # rich's own ends the process
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

            self._console = Told(file=self._file, highlight=False)
        return self._console


def format_cells(line: ProgressLine) -> list[str]:
    """The parts of a line, each of a width that does not change during a run."""
    width = len(str(line.num_steps))
    parts = [
        f"step {line.step:>{width}}/{line.num_steps}",
        f"loss {format_loss(line.loss):>6}",
        f"{format_si(line.units_per_second):>7} {line.unit}/s",
        f"waiting {round(100 * line.waiting_fraction):>2} %",
    ]
    if line.remaining_seconds is not None:
        parts.append(f"{format_duration(line.remaining_seconds):>7} left")
    return parts


def fit_to_width(line: ProgressLine, width: int) -> list[tuple[str, str]]:
    """The line for a terminal of `width` columns, as (text, style): a bar where there is room, else fewer cells."""
    parts = format_cells(line)
    every = len(parts)
    while len(parts) > MIN_CELLS and len("   ".join(parts)) >= width:
        parts.pop(2 if len(parts) == 3 else 3)  # waiting and time left go first, then the rate
    room = width - len("   ".join(parts)) - 4
    bar = next((length for length in BAR_WIDTHS if length <= room), 0) if len(parts) == every else 0
    done = round(bar * line.step / max(1, line.num_steps))
    drawn = [("━" * done, "cyan"), ("━" * (bar - done), "bright_black"), ("   ", "")] if bar else []
    styles = ("bold", "bold", "", "", "")
    spaced = [(text + ("   " if i + 1 < len(parts) else ""), styles[i]) for i, text in enumerate(parts)]
    return drawn + spaced


def format_loss(value: float) -> str:
    """A loss in about five digits: 2.3026, 12.346, 123.46, 1.23e+04."""
    size = abs(value)
    return (
        f"{value:.4f}"
        if size < 10
        else f"{value:.3f}"
        if size < 100
        else f"{value:.2f}"
        if size < 1000
        else f"{value:.2e}"
    )


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
