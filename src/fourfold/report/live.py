"""Live: the page of a run that is training, served to this machine; it asks for what has changed.

quiet    since when the log has not grown
limit    how long a run may be quiet, as for the launcher's hang detection: a factor of its median step
version  of the cards; changes when any of them may have changed
token    a random word in the address: other users and other pages of this machine do not know it
Law: a folder in any state gives a page: one that does not exist yet, that is being written, or that cannot be read. The
lines of the log are always those that reading the whole file would give. A run is called stopped only if no process
here has its lock and its log is quiet for longer than the limit: the process may be one of another host. Asking for the
lock takes none: the process that is about to take it is not refused. The server answers GET of the page and of its
data, on the loopback interface, to requests that name this machine and have the token; all others are refused, and
learn nothing of the run. It only reads. Its requests take at most a twentieth of a processor.
"""

import hmac
import os
import re
import secrets
import statistics
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs

from fourfold.plan.decode import DecodeError, check_not_pipe
from fourfold.report.document import Card, card, document, encode, render, security_policy, text
from fourfold.report.page import run_document
from fourfold.report.run_record import ReportError, RunRecord, make_record, read_description, read_line
from fourfold.trainer.fault_log import FAULTS_FILE
from fourfold.trainer.heartbeat import FIRST_SECONDS, LIMIT_FACTOR, MAX_SAMPLES, PAUSE_SECONDS
from fourfold.trainer.progress import format_duration, format_seconds
from fourfold.words.errors import os_error_text
from fourfold.words.measures import remaining_seconds
from fourfold.words.run_files import LOG_FILE, PLAN_FILE, SETTINGS_FILE

# ---- the log, as it grows --------------------------------------------------------------------------------------------


MARK_BYTES = 512  # more than a line of a step


class LogTail:
    """Follows a log: reads what was appended, and all of it again where it was cut off or replaced.

    `lines` are those read so far; `num_unreadable` counts lines that were none of a log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        # Of what was read: the file, the number of bytes, and the last of them.
        self._inode, self._offset, self._mark = 0, 0, b""
        self.lines: list[dict[str, Any]] = []
        self.num_unreadable = 0

    def read(self) -> bool:
        """Read what is new; returns whether anything has changed. A file that is missing is empty. Raises OSError."""
        check_not_pipe(self._path)
        had_lines = self._offset > 0
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._forget()
            return had_lines
        with file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset - len(self._mark))
            is_continued = inode == self._inode and file.read(len(self._mark)) == self._mark
            if not is_continued:
                self._forget()
                file.seek(0)
            # A line without its end is left for later.
            chunk = file.read().rpartition(b"\n")[:2]
        whole = b"".join(chunk)
        self._inode, self._offset, self._mark = inode, self._offset + len(whole), (self._mark + whole)[-MARK_BYTES:]
        for line in filter(None, whole.split(b"\n")):
            try:
                self.lines.append(read_line(line))
            except DecodeError:
                self.num_unreadable += 1
        return bool(whole) or (had_lines and not is_continued)


# ---- what the run does -----------------------------------------------------------------------------------------------


PROC_LOCKS = Path("/proc/locks")


def is_locked(path: Path) -> bool | None:
    """Whether a process has locked the file with `flock`; None if the system does not say. Raises OSError.

    Locks of other machines, on a shared file system, are not seen.
    """
    inode = str(path.stat().st_ino)
    try:
        lines = PROC_LOCKS.read_text().splitlines()
    except OSError:
        return None
    # "1: FLOCK  ADVISORY  WRITE 703 08:01:1234 0 EOF". The device is not compared: on btrfs and overlays it is not the
    # file's. A line with an arrow is a process that waits for the lock.
    fields = (line.split() for line in lines)
    return any(
        len(each) > 5 and each[1] == "FLOCK" and each[3] == "WRITE" and each[5].rpartition(":")[2] == inode
        for each in fields
    )


State = Literal["waiting", "starting", "running", "quiet", "stalled", "stopped", "finished"]

MIN_LIMIT_SECONDS = 10.0  # as the default of hang_seconds


class Status(NamedTuple):
    """What a run does; `remaining_seconds` is None unless it runs."""

    state: State
    text: str
    step: int = 0
    num_steps: int = 0
    remaining_seconds: float | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The status as the page draws it. `done` is a fraction."""
        left = [] if self.remaining_seconds is None else [f"{format_duration(self.remaining_seconds)} left"]
        steps = [f"step {self.step:,} of {self.num_steps:,}"] if self.num_steps else []
        done = min(1.0, self.step / self.num_steps) if self.num_steps else 0.0
        return {"state": self.state, "text": self.text, "facts": [*steps, *left], "done": done}


def judge_status(record: RunRecord, *, is_locked: bool | None, quiet_seconds: float) -> Status:
    """The status of a run. `is_locked`: whether a process of this host trains it; None if the system does not say."""
    step, num_steps = (record.steps[-1]["step"] if record.steps else 0), record.last_step
    if record.finish_line is not None:
        return Status("finished", f"finished: {record.finish_line['finished']:,} steps", step, num_steps)
    limit = limit_seconds(record)
    quiet, state = format_duration(quiet_seconds), _state(record, is_locked, quiet_seconds, limit)
    typical = f"a step takes {format_seconds(_median_seconds(record))}" if record.steps else ""
    texts = {
        "starting": f"starting: no step yet, {quiet}",
        "running": "running",
        "quiet": f"no step for {quiet}, {typical}; an evaluation or a checkpoint may take this long",
        "stalled": f"stalled: nothing for {quiet}; {typical or 'no step has ended'}",
        "stopped": f"stopped: no process of this host trains it, and its log has not grown for {quiet}",
    }
    remaining = _remaining_seconds(record, num_steps - step) if state in ("running", "quiet") else None
    return Status(state, texts[state], step, num_steps, remaining)


def limit_seconds(record: RunRecord) -> float:
    """How long the log may be quiet until something else than a step takes the time."""
    if not record.steps:
        return FIRST_SECONDS
    return max(MIN_LIMIT_SECONDS, LIMIT_FACTOR * _median_seconds(record))


def _state(record: RunRecord, is_locked: bool | None, quiet: float, limit: float) -> State:
    if not is_locked and quiet > (limit if record.steps else MIN_LIMIT_SECONDS):
        return "stopped"
    if not record.steps:
        return "starting" if quiet <= limit else "stalled"
    return "running" if quiet <= limit else "quiet" if quiet <= max(limit, PAUSE_SECONDS) else "stalled"


def _median_seconds(record: RunRecord) -> float:
    return statistics.median(line["seconds"] for line in record.steps[-MAX_SAMPLES:])


def _remaining_seconds(record: RunRecord, num_steps: int) -> float | None:
    steps = record.steps_since_start
    if not steps:
        return None
    first_end, last_end = (line["elapsed_seconds"] for line in (steps[0], steps[-1]))
    return remaining_seconds(len(steps), num_steps, first_end=first_end, last_end=last_end)


# ---- the run ---------------------------------------------------------------------------------------------------------


WATCHED_FILES = (SETTINGS_FILE, PLAN_FILE, FAULTS_FILE, "checkpoints")


class LiveRun:
    """Follows the folder of a run. Several threads may use it."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.resolve().name
        self._lock = threading.Lock()
        self._tail = LogTail(path / LOG_FILE)
        self._stamps: tuple[Any, ...] = ()
        self._prefix, self._number = secrets.token_hex(4), 0
        self._record: RunRecord | None = None
        self._shown = document(self.name, "", ())
        self._grown_at = time.monotonic()

    def view(self, since: str = "") -> dict[str, Any]:
        """The data of the page as it is now; without figures and cards if the reader has version `since`."""
        with self._lock:
            try:
                self._update()
                status = self._status()
            except (OSError, ReportError) as error:
                said = os_error_text(error) if isinstance(error, OSError) else str(error)
                status = Status("waiting", f"{self.path} cannot be read: {said}")
            view = {**self._shown, "version": f"{self._prefix}-{self._number}", "status": status.shown}
            return {name: view[name] for name in ("title", "under", "status")} if since == view["version"] else view

    def _update(self) -> None:
        had_record = self._record is not None
        has_grown = self._tail.read()
        stamps = tuple(map(self._stamp, WATCHED_FILES))
        if has_grown or not had_record:
            self._grown_at = self._log_time()
        if not has_grown and stamps == self._stamps:
            return
        # First: if reading fails, the next view tries again.
        self._stamps, self._record, self._shown = (), None, document(self.name, "", ())
        self._number += 1
        if all((self.path / name).is_file() for name in (SETTINGS_FILE, PLAN_FILE)):
            settings, plan = read_description(self.path)
            record = make_record(self.path, settings, plan, self._tail.lines)
            self._record, self._shown = record, run_document(record, _unreadable_card(self._tail.num_unreadable))
        self._stamps = stamps

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """Changes when the file does."""
        try:
            status = (self.path / name).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size

    def _log_time(self) -> float:
        """When the log grew last, on the monotonic clock; now, if the file system's clock is ahead."""
        try:
            age = time.time() - (self.path / LOG_FILE).stat().st_mtime
        except FileNotFoundError:
            age = 0.0
        return time.monotonic() - max(0.0, age)

    def _status(self) -> Status:
        if self._record is None:
            lacks = "has no plan yet" if self.path.is_dir() else "does not exist yet"
            return Status("waiting", f"{self.path} {lacks}: waiting for it")
        try:
            locked = is_locked(self.path / LOG_FILE)
        except FileNotFoundError:
            locked = False
        quiet = max(0.0, time.monotonic() - self._grown_at)
        return judge_status(self._record, is_locked=locked, quiet_seconds=quiet)


def _unreadable_card(number: int) -> Card | None:
    lines = "1 line of the log is" if number == 1 else f"{number:,} lines of the log are"
    return card("Unreadable lines", text(f"{lines} invalid, and left out here."), wide=True) if number else None


# ---- the server ------------------------------------------------------------------------------------------------------


ADDRESS = "127.0.0.1"
# A page of another site may let its own name lead to this machine (DNS rebinding); its requests carry that name. Any
# port: an SSH tunnel may have another one at its other end.
OWN_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
REQUEST_SECONDS = 10
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """Serves one run until `shutdown`, or until an exception ends `serve_forever`."""

    daemon_threads = True

    def __init__(self, run: LiveRun, *, port: int = 0) -> None:
        """`port` 0 takes a free one. Raises OSError if the port cannot be had."""
        self.run, self.token = run, secrets.token_urlsafe(16)
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error; any other is shown, and the server goes on."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer  # type: ignore[assignment]
    timeout = REQUEST_SECONDS
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        if not self._names_this_machine():
            self.send_error(403, "Forbidden")
            return
        # Nothing of the address is parsed before the token is checked: a parser may raise for what a stranger sends.
        address, _, query = self.path.partition("?")
        path = f"/{self.server.token}/"
        folder, name = address[: len(path)], address[len(path) :]
        if not hmac.compare_digest(folder.encode(), path.encode()) or name not in ("", "data"):
            self.send_error(404, "Not Found")
            return
        if name == "data":
            (since,) = parse_qs(query).get("since", [""])[-1:]
            self._send(encode(self.server.run.view(since)), "application/json")
        else:
            self._send(render(self.server.run.view()), "text/html; charset=utf-8")

    def _refuse_method(self) -> None:
        self.send_error(405, "Method Not Allowed")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method

    def _names_this_machine(self) -> bool:
        """Whether the request has one Host header, with a name of this machine."""
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and OWN_NAMES.fullmatch(hosts[0].strip()) is not None

    def _send(self, answer: str, kind: str) -> None:
        content = answer.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        policy = f"{security_policy()}; frame-ancestors 'none'"
        for name, value in {**HEADERS, "Content-Security-Policy": policy}.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "fourfold"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal shows the address, and not every request."""
