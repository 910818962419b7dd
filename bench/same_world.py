"""Worlds of `bench.same`: the processes of one checkout and one number of ranks.

Law: a world is started when it is first asked, again after one that failed, and ended by process id. No process
outlives its limit: the children end themselves, too.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BENCH_ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0
REPLY_SECONDS = 75.0  # a little more than a child gives itself
LAST_SECONDS = 3.0  # for the other ranks to tell of an error, once one has
SHOWN_BYTES = 1200


class WorldFailed(RuntimeError):
    """A rank raised an error that is no FourfoldError, ended, or took too long."""


class CheckoutWorld:
    """`size` processes with `checkout`/src on their path and nothing of another checkout."""

    def __init__(self, checkout: Path, size: int, *, folder: Path) -> None:
        self._checkout, self._size, self._folder = checkout, size, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._meeting: tempfile.TemporaryDirectory[str] | None = None

    def ask(self, request: dict[str, Any]) -> str:
        """What came of a request, alike on all ranks. Raises WorldFailed."""
        if not self._processes:
            self._start()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # told below, as a rank without a reply
                process.stdin.write((json.dumps(request) + "\n").encode())
                process.stdin.flush()
        outcomes = [reply["outcome"] for reply in self._replies(REPLY_SECONDS)]
        return outcomes[0] if len(set(outcomes)) == 1 else " / ".join(outcomes)

    def end(self) -> None:
        """End the processes of this world."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    assert pipe is not None
                    pipe.close()
        self._processes = []
        if self._meeting is not None:
            self._meeting.cleanup()
            self._meeting = None

    def _start(self) -> None:
        self._meeting = tempfile.TemporaryDirectory(prefix="fourfold-same-world-")
        for rank in range(self._size):
            places = {"RANK": rank, "WORLD_SIZE": self._size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self._size}
            fixed = {
                "PYTHONPATH": os.pathsep.join([str(self._checkout / "src"), str(BENCH_ROOT)]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "TERM": "dumb",
            }
            with open(self._log(rank), "wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-m",
                            "bench.same_child",
                            f"{self._meeting.name}/meeting",
                            str(self._checkout),
                        ],
                        cwd=self._folder,
                        env={**os.environ, **{name: str(place) for name, place in places.items()}, **fixed},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                    )
                )
        self._replies(START_SECONDS)

    def _log(self, rank: int) -> Path:
        assert self._meeting is not None
        return Path(self._meeting.name) / f"rank{rank}.log"

    def _replies(self, limit: float) -> list[dict[str, Any]]:
        """A line of JSON from each rank. A world in which one fails is ended; then WorldFailed."""
        deadline, replies = time.monotonic() + limit, dict[int, dict[str, Any]]()
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while len(replies) < self._size and time.monotonic() < deadline:
                for key, _ in waiting.select(0.2):
                    stream = self._processes[key.data].stdout
                    line = stream.readline() if stream is not None else b""
                    replies[key.data] = json.loads(line) if line else {"error": f"it ended\n{self._tail(key.data)}"}
                    waiting.unregister(key.fileobj)
                    if "error" in replies[key.data]:
                        deadline = min(deadline, time.monotonic() + LAST_SECONDS)
        failed = [f"rank {rank}: {reply['error']}" for rank, reply in sorted(replies.items()) if "error" in reply]
        if not failed and len(replies) < self._size:
            late = next(rank for rank in range(self._size) if rank not in replies)
            failed = [f"rank {late}: no reply within {limit:.0f} s\n{self._tail(late)}"]
        if failed:
            self.end()
            raise WorldFailed(failed[0][-SHOWN_BYTES:])
        return [replies[rank] for rank in range(self._size)]

    def _tail(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")[-SHOWN_BYTES:]
