"""`fourfold plan calibrate`: measures this machine with all ranks of a job at work, and stores what was measured.

Law: measurements are refused while others use the machine, unless they are forced, which the file then says.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.cli.job import Job
from fourfold.cli.launch import launch_ranks
from fourfold.cli.run import Run
from fourfold.environment.world import World, num_cores
from fourfold.launcher.process_defaults import THREAD_VARIABLES
from fourfold.plan.plan import Plan
from fourfold.planner.predict.calibration import (
    Calibration,
    CalibrationError,
    MachineIdentity,
    calibration_path,
    check_writable,
    decode_calibration,
    encode_calibration,
    read_calibration,
    write_calibration,
)
from fourfold.words.errors import Problem, os_error_text

WHERE = "fourfold plan calibrate"


class Calibrated(NamedTuple):
    """A calibration, where it is stored, and what was left out of it. `unstored`: why it could not be stored; or ""."""

    calibration: Calibration
    path: Path
    left_out: list[str]
    seconds: float
    unstored: str = ""


def calibrate(run: Run, num_ranks: int, *, key: str, is_forced: bool = False) -> Calibrated | None:
    """Measure this machine for the task of a run; None if ranks failed, which the launcher has reported.

    key        of the task: `task_key`
    is_forced  measure although other processes are at work
    Raises CalibrationError.
    """
    from fourfold.planner.calibrate.timing import check_quiet, this_machine

    machine = this_machine(num_ranks, threads=threads_of_rank(num_ranks))
    load = os.getloadavg()[0] if is_forced else check_quiet()
    path = calibration_path(machine, key)
    try:
        check_writable(path)
    except OSError as error:
        got = f"{path} could not be written: {os_error_text(error)}"
        problem = Problem(got, "a folder that can be written to", "XDG_CACHE_HOME=FOLDER")
        raise CalibrationError(problem, where=WHERE) from None
    begin = time.perf_counter()
    run = dataclasses.replace(run, decided=Plan(dp=num_ranks))
    result = launch_ranks("measure", run, machine=machine, load=load, is_forced=is_forced).result
    if result is None:
        return None
    calibration = decode_calibration(result["calibration"].encode(), where=WHERE)
    unstored = ""
    try:
        write_calibration(path, calibration)
    except OSError as error:  # a disk that has become full meanwhile: what was measured can be used all the same
        unstored = os_error_text(error)
    return Calibrated(calibration, path, result["left_out"], time.perf_counter() - begin, unstored)


def find_calibration(key: str, num_ranks: int) -> Calibration | None:
    """What was measured here for the task of this `task_key` and as many ranks; None: nothing yet.

    Raises CalibrationError for a file that is damaged, or of another machine.
    """
    from fourfold.planner.calibrate.timing import this_machine

    machine = this_machine(num_ranks, threads=threads_of_rank(num_ranks))
    path = calibration_path(machine, key)
    try:
        return read_calibration(path, machine)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CalibrationError(Problem(f"{path}: {os_error_text(error)}", "a file"), where=WHERE) from None


def threads_of_rank(num_ranks: int) -> int:
    """The threads with which `fourfold train` starts a rank."""
    given = next((os.environ[name] for name in THREAD_VARIABLES if os.environ.get(name, "").isdecimal()), None)
    return int(given) if given else max(1, num_cores() // num_ranks)


def format_calibrated(calibrated: Calibrated) -> list[str]:
    """What was measured, in a few lines."""
    calibration, path, left_out, seconds, unstored = calibrated
    machine = calibration.machine
    products, passes = calibration.operations.products, calibration.operations.passes
    lines = [
        f"{machine.processor}, {machine.cores} cores, torch {machine.torch}: {machine.ranks_per_host} ranks"
        f" × {machine.threads} thread{'s' if machine.threads > 1 else ''}, measured in {seconds:.0f} s",
        f"  products {products.sizes[-1] / products.seconds[-1] / 1e9:.0f} GFLOP/s,"
        f" memory {passes.sizes[-1] / passes.seconds[-1] / 1e9:.1f} GB/s of a rank while all are at work",
        f"  {len(calibration.segments)} segments; load average {calibration.load:.1f} before",
    ]
    if calibration.is_forced:
        lines.append("  forced: other processes may have been at work")
    lines += [f"  left out: {text}" for text in left_out]
    return [*lines, f"not stored in {path}: {unstored}" if unstored else f"stored in {path}"]


def measure_rank(prepared: Job, world: World, *, machine: list[Any], load: float, is_forced: bool) -> dict[str, Any]:
    """One rank of it: the calibration as text, and what was left out."""
    from fourfold.comm import init
    from fourfold.planner.calibrate.rank import Conditions, measure
    from fourfold.planner.task_facts.source import TaskFacts

    ranks = init.init_communicator()
    conditions = Conditions(MachineIdentity(*machine), load, is_forced)
    source = TaskFacts(prepared.task)
    measured = measure(prepared.task, source, ranks, conditions, say=_say if world.rank == 0 else _say_nothing)
    return {"calibration": encode_calibration(measured.calibration).decode(), "left_out": measured.left_out}


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None: ...
