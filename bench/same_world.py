"""Worlds of `bench.same`: the processes of one checkout and one number of ranks.

Law: a world starts when it is first used and after a failure, and is killed as one process group. No process outlives
its time limit: ranks end themselves too.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

BENCH_ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 180.0
REPLY_SECONDS = 75.0  # a little more than a rank gives itself
LAST_SECONDS = 3.0  # for other ranks to report errors, after the first one
SHOWN_CHARACTERS = 4000  # of a rank's output
ENVIRONMENT = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TERM": "dumb",
}


class WorldFailed(RuntimeError):
    """A rank raised an error other than FourfoldError, ended, or took too long."""


class Rank(NamedTuple):
    """This side of a rank's pipes."""

    requests: Any
    replies: Any


class CheckoutWorld:
    """`size` ranks that import Fourfold from `checkout`/src only."""

    def __init__(self, checkout: Path, size: int, *, folder: Path) -> None:
        self._checkout, self._size, self._folder = checkout, size, folder
        self._parent: subprocess.Popen[bytes] | None = None
        self._ranks: list[Rank] = []
        self._rendezvous_dir: tempfile.TemporaryDirectory[str] | None = None
        self._is_ready = False
        self._failure: WorldFailed | None = None

    def begin(self) -> None:
        """Start the ranks unless they run already; `send` waits until they are ready."""
        if self._parent is not None:
            return
        self._rendezvous_dir = tempfile.TemporaryDirectory(prefix="fourfold-same-world-")
        pipes = [(os.pipe(), os.pipe()) for _ in range(self._size)]
        child_ends = [(requests[0], replies[1]) for requests, replies in pipes]
        ends = [f"{requests}:{replies}" for requests, replies in child_ends]
        with open(self._log("parent"), "wb") as log:
            self._parent = subprocess.Popen(
                [sys.executable, "-m", "bench.same_child", str(self._checkout), self._rendezvous_dir.name, *ends],
                cwd=self._folder,
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "PYTHONPATH": os.pathsep.join([str(self._checkout / "src"), str(BENCH_ROOT)]),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[end for both in child_ends for end in both],
                start_new_session=True,
            )
        for end in [end for both in child_ends for end in both]:
            os.close(end)
        self._ranks = [Rank(os.fdopen(requests[1], "wb"), os.fdopen(replies[0], "rb")) for requests, replies in pipes]
        self._is_ready = False

    def send(self, request: dict[str, Any]) -> None:
        """Send a request to all ranks, once they are ready."""
        self.begin()
        if not self._is_ready:
            try:
                self._replies(START_SECONDS)
            except WorldFailed as error:
                self._failure = error
                return
            self._is_ready = True
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # reported later, as a rank without a reply
                rank.requests.write((json.dumps(request) + "\n").encode())
                rank.requests.flush()

    def outcome(self) -> str:
        """The outcome of the request. Raises WorldFailed."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        outcomes = [reply["outcome"] for reply in self._replies(REPLY_SECONDS)]
        return outcomes[0] if len(set(outcomes)) == 1 else " / ".join(outcomes)

    def end(self) -> None:
        """End the processes of this world."""
        if self._parent is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._parent.pid, signal.SIGKILL)
            self._parent.wait()
            self._parent = None
        for pipe in [pipe for rank in self._ranks for pipe in rank]:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._ranks = []
        if self._rendezvous_dir is not None:
            self._rendezvous_dir.cleanup()
            self._rendezvous_dir = None

    def _log(self, name: str) -> Path:
        assert self._rendezvous_dir is not None
        return Path(self._rendezvous_dir.name) / f"{name}.log"

    def _replies(self, limit: float) -> list[dict[str, Any]]:
        """A line of JSON from each rank. If a rank fails, ends the world and raises WorldFailed."""
        deadline, replies = time.monotonic() + limit, dict[int, dict[str, Any]]()
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                selector.register(rank.replies, selectors.EVENT_READ, number)
            while len(replies) < self._size and time.monotonic() < deadline:
                for key, _ in selector.select(0.2):
                    line = self._ranks[key.data].replies.readline()
                    replies[key.data] = json.loads(line) if line else {"error": f"it ended\n{self._tail(key.data)}"}
                    selector.unregister(key.fileobj)
                    if "error" in replies[key.data]:
                        deadline = min(deadline, time.monotonic() + LAST_SECONDS)
        failed = [f"rank {rank}: {reply['error']}" for rank, reply in sorted(replies.items()) if "error" in reply]
        if not failed and len(replies) < self._size:
            late = next(rank for rank in range(self._size) if rank not in replies)
            failed = [f"rank {late}: no reply within {limit:.0f} s\n{self._tail(late)}"]
        if failed:
            self.end()
            raise WorldFailed("\n".join(each[:SHOWN_CHARACTERS] for each in failed))
        return [replies[rank] for rank in range(self._size)]

    def _tail(self, rank: int) -> str:
        logs = [self._log(name) for name in ("parent", f"rank{rank}")]
        return "".join(log.read_text(errors="replace")[-SHOWN_CHARACTERS:] for log in logs if log.exists())
