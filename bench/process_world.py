"""Process world: the rank processes of one configuration under measurement.

world   the processes of one configuration; they sleep except in their turns
turn    some untimed and some timed steps of all ranks of one world
Law: at the end of its `with` block every process of a world has ended, and none outlives its time limit.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Self

from bench.measurement import machine_cpu_seconds
from fourfold.launcher.process_defaults import malloc_variables
from fourfold.testing.network_namespaces import Hosts

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_SECONDS = 0.05


class WorldError(RuntimeError):
    """A rank has ended early, or the world has exceeded its time limit; the text holds what the ranks printed."""


class World(AbstractContextManager["World"]):
    """`python -m MODULE` once per rank: started and ready on entry, ended on exit in any case."""

    def __init__(
        self,
        configuration: str,
        case: str,
        *,
        num_ranks: int,
        limit_seconds: int,
        module: str = "bench.worker",
        hosts: Hosts | None = None,
    ):
        self._name = f"{configuration} on {case}"
        self._command = [sys.executable, "-m", module, configuration, case, str(limit_seconds)]
        self._ranks, self._hosts = num_ranks, hosts
        self._deadline = time.monotonic() + limit_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="fourfold-bench-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ready_replies: list[dict] = []
        """The first reply of each rank, when it was ready."""

    def __enter__(self) -> Self:
        try:
            for rank in range(self._ranks):
                self._processes.append(self._start(rank))
            self.ready_replies = self._read_replies()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin
            with suppress(BrokenPipeError):
                process.stdin.close()  # the end of its turns: the rank exits
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout
            process.stdout.close()
        self._folder.cleanup()

    def run_turn(
        self, *, untimed: int, timed: int, sample: Callable[[Sequence[int]], None] | None = None
    ) -> list[dict]:
        """Make all ranks step at once; returns their results by rank.

        `sample(pids)` is called about 20 times a second meanwhile. Each result gets `others`: the processor seconds
        per second that all other processes have used.
        """
        cpu, begin, busy = self._cpu_seconds(), time.monotonic(), machine_cpu_seconds()
        pids = [process.pid for process in self._processes]
        results = self.request({"untimed": untimed, "timed": timed}, (lambda: sample(pids)) if sample else None)
        others_seconds = machine_cpu_seconds() - busy - (self._cpu_seconds() - cpu)
        others = max(0.0, others_seconds / (time.monotonic() - begin))
        return [result | {"others": others} for result in results]

    def request(self, request: Mapping[str, object], on_tick: Callable[[], None] | None = None) -> list[dict]:
        """Send a request to all ranks; returns their replies by rank."""
        line = json.dumps(request) + "\n"
        for process in self._processes:
            assert process.stdin
            # A rank that is gone is reported, with its log, when its reply is missing.
            with suppress(BrokenPipeError):
                process.stdin.write(line.encode())
                process.stdin.flush()
        return self._read_replies(on_tick)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._ranks, "LOCAL_WORLD_SIZE": self._ranks}
        rank_variables = {name: str(number) for name, number in numbers.items()}
        command = [*self._command, f"file://{self._folder.name}/rendezvous"]
        if self._hosts is not None:
            rank_variables = self._hosts.rank_environ(rank, self._ranks)
            command = self._hosts.host_of(rank, self._ranks).command(command)
        # Fourfold's ranks get the variables of `fourfold run`, the peers' ranks those of torchrun.
        malloc_settings = malloc_variables() if self._command[3].startswith("fourfold") else {}
        environment = {
            **os.environ,
            **malloc_settings,
            **rank_variables,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *inherited]),
        }
        pipe = subprocess.PIPE
        with open(Path(self._folder.name) / f"rank{rank}.log", "wb") as log:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=environment)

    def _cpu_seconds(self) -> float:
        """Processor seconds of all ranks so far, all threads."""
        ticks = 0
        for process in self._processes:
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _read_replies(self, on_tick: Callable[[], None] | None = None) -> list[dict]:
        """One JSON line from every rank, by rank."""
        replies: dict[int, dict] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(replies) < self._ranks:
                events = selector.select(SAMPLE_SECONDS if on_tick else 1.0)
                for key, _ in events:
                    stream = self._processes[key.data].stdout
                    line = stream.readline() if stream else b""
                    if not line:
                        raise WorldError(f"{self._name}: rank {key.data} ended early\n{self._logs()}")
                    replies[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
                if time.monotonic() > self._deadline:
                    raise WorldError(f"{self._name}: past its time limit\n{self._logs()}")
                if on_tick and not events:
                    on_tick()
        return [replies[rank] for rank in range(self._ranks)]

    def _logs(self) -> str:
        logs = sorted(Path(self._folder.name).glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
