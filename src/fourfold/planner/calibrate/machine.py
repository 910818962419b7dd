"""Machine: what a calibration holds for, and whether other processes are at work.

foreign  a process that is not this one; calibration would measure it too
Law: nothing here is guessed: what measurements depend on is named.
"""

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from fourfold.environment.world import num_cores
from fourfold.planner.predict.calibration import CalibrationError, MachineIdentity
from fourfold.words.errors import Problem

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
