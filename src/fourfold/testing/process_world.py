"""Worlds of processes that many tests share: the spawned tests.

case  a function of a module, named as "package.module:function"; every rank calls it, and its result is JSON
Law: a world joins one process group by a file, every case has a time limit, and a failure shows every rank's traceback.
A world that a case has broken is killed, and the next case gets a new one.

The ranks of a host are forks of one process: importing torch and torch._dynamo takes three seconds, and starting its
fork none.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from fourfold.environment.processes import end_with_parent
from fourfold.testing.network_namespaces import Hosts

TIME_LIMIT_SECONDS = 300.0
START_TIMEOUT_SECONDS = 300.0
CASES_PER_GC = 16
STDERR = 2
BACKEND = "FOURFOLD_TESTING_BACKEND"
IMPORTED_ONCE = ("torch.distributed", "torch._dynamo", "fourfold.trainer.train")
"""Torch's optimizers import torch._dynamo at their first step, which takes more than a second: the oracle makes one."""


class CaseFailed(AssertionError):
    """At least one rank raised, died or did not answer; the message holds every rank's traceback."""


class SpawnedWorld:
    """`size` processes, started at the first case; on `hosts`, if given.

    num_gpus  of this machine: the ranks use them in turn and meet over NCCL. 0: the CPU and gloo. Where there are more
              ranks than GPUs they share them, each round as a host of its own: NCCL takes a GPU once per host
    """

    def __init__(self, size: int, *, root: Path, hosts: Hosts | None = None, num_gpus: int = 0) -> None:
        self.size, self._root, self._hosts, self._num_gpus = size, root, hosts, num_gpus
        self._processes: list[subprocess.Popen[Any]] = []
        """One per host: it has forked the ranks of the host, and ends with them."""
        self._jobs: list[TextIO] = []
        self._answers: list[TextIO] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, case: str, *, time_limit_seconds: float = TIME_LIMIT_SECONDS, **arguments: Any) -> list[Any]:
        """The results of `case(**arguments)`, by rank. Raises CaseFailed."""
        if not self._processes:
            self._start()
        for jobs in self._jobs:
            jobs.write(json.dumps({"case": case, "arguments": arguments}) + "\n")
        answers = self._read_answers(time.monotonic() + time_limit_seconds)
        if all(answer is not None and "result" in answer for answer in answers):
            return [answer["result"] for answer in answers if answer is not None]
        self.kill()
        raise CaseFailed(f"{case} on {self.size} ranks\n" + "\n".join(map(_format_answer, range(self.size), answers)))

    def kill(self) -> None:
        """Kill the processes of this world."""
        for process in self._processes:
            process.kill()  # and the kernel its ranks
        for process in self._processes:
            process.wait()
        for jobs in self._jobs:
            with contextlib.suppress(BrokenPipeError):
                jobs.close()
        for answers in self._answers:
            answers.read()  # until the rank is gone
            answers.close()
        self._processes, self._jobs, self._answers = [], [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fourfold-world-")
        num_hosts = 1 if self._hosts is None else len(self._hosts.hosts)
        per_host = self.size // num_hosts
        for first in range(0, self.size, per_host):
            self._start_host(range(first, first + per_host))
        if not all(self._read_answers(time.monotonic() + START_TIMEOUT_SECONDS)):
            self.kill()
            raise CaseFailed(f"a world of {self.size} ranks did not start")

    def _start_host(self, ranks: Sequence[int]) -> None:
        """Start the process that forks the ranks of one host."""
        assert self._folder is not None
        specs, far_ends = [], []
        for rank in ranks:
            (jobs_out, jobs_in), (answers_out, answers_in) = os.pipe(), os.pipe()
            self._jobs.append(os.fdopen(jobs_in, "w", buffering=1))
            self._answers.append(os.fdopen(answers_out))
            specs.append({"jobs": jobs_out, "answers": answers_in, "variables": self._variables(rank)})
            far_ends += [jobs_out, answers_in]
        rendezvous = f"{self._folder.name}/rendezvous"
        command = [sys.executable, "-m", "fourfold.testing.process_world", rendezvous, json.dumps(specs)]
        if self._hosts is not None:
            command = self._hosts.host_of(ranks[0], self.size).command(command)
        # A name that torch deprecates fails our tests before it warns our users.
        inherited = [os.environ["PYTHONWARNINGS"]] if os.environ.get("PYTHONWARNINGS") else []
        warn = ",".join([*inherited, "error:`torch.distributed:FutureWarning"])
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": warn}
        files: dict[str, Any] = {"pass_fds": far_ends, "stdin": subprocess.DEVNULL, "stdout": STDERR}
        self._processes.append(subprocess.Popen(command, cwd=self._root, env=environ, **files))
        _close(far_ends)

    def _variables(self, rank: int) -> dict[str, str]:
        if self._hosts is not None:
            return self._hosts.rank_environ(rank, self.size)
        host, local_rank = divmod(rank, self._num_gpus or self.size)
        local_size = min(self._num_gpus or self.size, self.size)
        places = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
        variables = {name: str(place) for name, place in places.items()}
        if self._num_gpus:
            variables |= {"NCCL_HOSTID": f"host {host}", "NCCL_SOCKET_IFNAME": "lo", BACKEND: "nccl"}
        return variables

    def _read_answers(self, deadline: float) -> list[dict[str, Any] | None]:
        """One line of JSON from each rank; None from a rank that ended or did not answer in time."""
        answers: list[dict[str, Any] | None] = [None] * self.size
        pending = {pipe: rank for rank, pipe in enumerate(self._answers)}
        failed = False
        while pending and time.monotonic() < deadline:
            # Not `select`: a session of many tests has more than 1024 files open.
            with selectors.DefaultSelector() as selector:
                for pipe in pending:
                    selector.register(pipe, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select(0.2)]
            for pipe in [pipe for pipe in pending if pipe in ready]:
                rank = pending.pop(pipe)
                line = pipe.readline()
                answers[rank] = json.loads(line) if line else None
                if (not line or "error" in (answers[rank] or {})) and not failed:
                    # The other ranks may be waiting for the one that failed: give them a little time to answer.
                    failed, deadline = True, min(deadline, time.monotonic() + 8.0)
        return answers


def _format_answer(rank: int, answer: dict[str, Any] | None) -> str:
    if answer is None:
        return f"---- rank {rank}: no answer (it died, or hung past the time limit)"
    return f"---- rank {rank}: " + ("ok" if "result" in answer else str(answer["error"]))


def _fork_ranks(rendezvous: str, specs: Sequence[dict[str, Any]]) -> None:
    """Fork the ranks of this host, so that torch is imported once for all; return when they have ended."""
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    gc.freeze()  # makes later collections quick
    parent, pipes = os.getpid(), {end for spec in specs for end in (spec["jobs"], spec["answers"])}
    for end in pipes:
        os.set_inheritable(end, False)  # a program that a case starts is not to keep them open
    for spec in specs:
        if os.fork() == 0:
            end_with_parent(parent)
            _close(pipes - {spec["jobs"], spec["answers"]})
            os.environ.update(spec["variables"])
            _serve(rendezvous, os.fdopen(spec["jobs"]), os.fdopen(spec["answers"], "w"))
    _close(pipes)
    for _ in specs:
        os.wait()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _serve(rendezvous: str, jobs: TextIO, answers: TextIO) -> NoReturn:
    """The main loop of one rank: join, then run a case per line until the input ends."""
    import torch
    import torch.distributed as dist

    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    backend = os.environ.get(BACKEND, "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    _write_answer(answers, {"started": True})
    for number, line in enumerate(jobs):
        if number % CASES_PER_GC == CASES_PER_GC - 1:
            gc.collect()  # a case's garbage may still hold process groups
        job = json.loads(line)
        try:
            module, name = job["case"].split(":")
            result = getattr(importlib.import_module(module), name)(**job["arguments"])
            dist.barrier()
            _destroy_groups(dist)
            _write_answer(answers, {"result": result})
        except BaseException:
            _write_answer(answers, {"error": traceback.format_exc()})
    # Skips the group's own shutdown: another rank may be gone already.
    os._exit(0)


def _destroy_groups(dist: Any) -> None:
    """Destroy all groups but the world's: each has threads that poll, and hundreds of cases make thousands of them."""
    from fourfold.torch_kit.torch_private import (
        all_process_groups,  # not on top: it imports torch, as this file does not
    )

    for group in [group for group in all_process_groups(dist) if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def _write_answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    _fork_ranks(sys.argv[1], json.loads(sys.argv[2]))
