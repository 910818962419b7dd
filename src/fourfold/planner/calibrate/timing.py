"""Timing: medians of what all ranks do at the same time, and what all of them take for it.

turn      one run of what is measured, on all ranks at once; at least seven count
steady    turns of which the faster half differs little from the median: no more are needed
deadline  from when on seven turns are enough, steady or not
mean      over the ranks, of what they do together
slowest   the rank that takes longest over all segments: a step ends with it
Law: every rank takes the same number of turns, and computes the same of what all have found, in the form of one rank's.

foreign  a process that is not this one; calibration would measure it too
Law: nothing here is guessed: what measurements depend on is named.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import psutil
import torch

from fourfold.comm.communicator import Communicator
from fourfold.environment.world import num_cores
from fourfold.planner.predict.calibration import CalibrationError, MachineIdentity
from fourfold.words.errors import Problem

# ---- on each rank ----------------------------------------------------------------------------------------------------


NUM_TURNS = 7
NUM_UNTIMED = 2
MAX_TURNS = 3 * NUM_TURNS
BURST_ELEMENTS = 2**16
STEADY = 0.05  # between the lower quartile and the median
Points = list[tuple[float, float]]
"""(size, seconds), of this rank."""


def is_steady(seconds: Sequence[float]) -> bool:
    """Whether the median of these turns would change little with more of them."""
    quartile = quantiles(seconds, n=4)[0]
    return median(seconds) - quartile <= STEADY * median(seconds)


def now() -> float:
    """Seconds of a clock, once a GPU in use has done all that it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Turns:
    """How many turns are taken. `deadline`: by `time.monotonic`."""

    def __init__(self, ranks: Communicator, deadline: float) -> None:
        self.ranks, self._deadline = ranks, deadline

    def begin(self) -> None:
        """All ranks begin to measure together. Collective.

        A link of limited rate lets a first burst pass faster; in a step, messages come one behind the other.
        """
        if self.ranks.num_hosts > 1:
            self.ranks.all_reduce(torch.zeros(BURST_ELEMENTS, device=self.ranks.device))
        self.ranks.barrier()

    def is_over(self) -> bool:
        """Whether the deadline has passed on a rank. Collective."""
        return any(self.ranks.all_gather_json(time.monotonic() > self._deadline))

    def take(self, turn: Callable[[], float]) -> int:
        """Take turns until those of all ranks are steady; returns how many count: the last ones. Collective.

        `turn` returns the seconds by which that is judged.
        """
        for _ in range(NUM_UNTIMED):
            turn()
        seconds: list[float] = []
        while True:
            seconds += [turn() for _ in range(NUM_TURNS)]
            if len(seconds) >= MAX_TURNS or self._are_enough(seconds):
                return len(seconds)

    def _are_enough(self, seconds: Sequence[float]) -> bool:
        found = self.ranks.all_gather_json([is_steady(seconds), time.monotonic() > self._deadline])
        return all(steady for steady, _ in found) or any(late for _, late in found)

    def median_seconds(self, run: Callable[[], object]) -> float:
        """The median seconds of a call, on this rank. Collective."""
        taken: list[float] = []

        def turn() -> float:
            self.begin()
            start = now()
            run()
            taken.append(now() - start)
            return taken[-1]

        return median(taken[-self.take(turn) :])


# ---- of all ranks ----------------------------------------------------------------------------------------------------


def mean_over_ranks(value: Any, ranks: Communicator) -> Any:
    """The mean of a number, or of the numbers in lists and dicts of them. Collective."""
    return _mean(ranks.all_gather_json(value))


def of_slowest_rank(rows: list[list[float]], ranks: Communicator) -> list[list[float]]:
    """The rows of the rank whose numbers add up to most. Collective."""
    return max(ranks.all_gather_json(rows), key=lambda each: sum(map(sum, each)))


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([each[key] for each in values]) for key in first}
    if isinstance(first, list):
        return [_mean(each) for each in zip(*values, strict=True)]
    return sum(values) / len(values)


# ---- Machine: what a calibration holds for, and whether other processes are at work ---------------------------------

SAMPLE_SECONDS = 1.0
NUM_NAMED = 3
CPUINFO = Path("/proc/cpuinfo")


def this_machine(num_ranks: int, *, threads: int, hosts: int = 1) -> MachineIdentity:
    """What measurements of these ranks hold for. `threads`: of one rank."""
    processor = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return MachineIdentity(processor, num_cores(), version("torch"), threads, num_ranks // hosts, hosts)


def _processor() -> str:
    """The name of the processor, as the kernel has it."""
    if CPUINFO.exists():
        names = [line.partition(":")[2].strip() for line in CPUINFO.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


class Busy(NamedTuple):
    """A process, and the cores that it uses."""

    name: str
    pid: int
    cores: float


def busiest_processes(seconds: float = SAMPLE_SECONDS) -> list[Busy]:
    """The processes that use most, of the others, over some time."""
    before = _cpu_seconds()
    time.sleep(seconds)
    used = [
        Busy(name, pid, (spent - before[pid, name]) / seconds)
        for (pid, name), spent in _cpu_seconds().items()
        if (pid, name) in before
    ]
    return sorted((each for each in used if each.cores > 0.01), key=lambda each: -each.cores)


def _cpu_seconds() -> dict[tuple[int, str], float]:
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = {}
    for process in psutil.process_iter(["pid", "name", "cpu_times"]):
        times = process.info["cpu_times"]
        if process.info["pid"] not in own and times is not None:
            found[process.info["pid"], process.info["name"] or "?"] = times.user + times.system
    return found


def check_quiet() -> float:
    """The load average; raises CalibrationError if it is above the number of cores, and names who is at work."""
    load, cores = os.getloadavg()[0], num_cores()
    if load > cores:
        busy = busiest_processes()
        names = [f"{each.name} (pid {each.pid}) {each.cores:.1f} cores" for each in busy[:NUM_NAMED]]
        at_work = f": {', '.join(names)}" if names else ""
        got = f"load average {load:.1f} on {cores} cores{at_work}"
        need = f"at most {cores}, as many as there are cores: what others use is measured too"
        # `fourfold train … plan=auto` has no force=, and finds what was measured by this command.
        attempt = "the same when they have ended, or fourfold plan calibrate with force=true"
        raise CalibrationError(Problem(got, need, attempt), where="calibration")
    return load
