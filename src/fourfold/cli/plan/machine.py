"""Plan machine: where a plan is to run: a described cluster, or this machine as it was measured.

calibration  what was measured of this machine with all ranks of a job at work, for a task; it is stored
Law: what a plan is priced with is always said; a measurement of another machine is never used for this one. This
machine is not measured while others use it, unless that is forced, which the file then says.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.cli.job import Job
from fourfold.cli.launch import launch_ranks
from fourfold.cli.output import print_text
from fourfold.cli.plan.arguments import WHERE
from fourfold.cli.run import Run
from fourfold.environment.world import World, num_cores
from fourfold.launcher.process_defaults import MAX_DEFAULT_PROCESSES, THREAD_VARIABLES
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.planner.predict.calibration import (
    Calibration,
    CalibrationError,
    MachineIdentity,
    calibration_path,
    check_writable,
    decode_calibration,
    encode_calibration,
    has_calibrations,
    other_conditions,
    read_calibration,
    task_key,
    write_calibration,
)
from fourfold.planner.predict.clusters import Cluster, ProductEfficiency, Tier
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.predict.prices import Prices
from fourfold.planner.search.search import PREDICTION_ERROR
from fourfold.words.errors import Problem, SettingError, os_error_text

CALIBRATING = "fourfold plan calibrate"
RANKS_PER_CORE = 2  # at most, of ranks that measure this machine


class Machine(NamedTuple):
    """Where the task is to run. `text`: for people; `is_here`: it is this machine, as measured."""

    cluster: Cluster
    prices: Prices
    text: str
    is_here: bool

    @property
    def mixed_precision(self) -> str:
        """The 16-bit precision that the devices are fast in; "keep" if they have none."""
        dtypes = self.cluster.flops_per_second
        return next((name for name, row in COMPUTE_FORMATS.items() if row.dtype in dtypes), "keep")

    def peak_flops(self, precision: str) -> float | None:
        """Operations a second that a device does at most in this precision; None: not known."""
        row = COMPUTE_FORMATS.get(precision)
        return self.cluster.flops_per_second.get(row.dtype if row else "float32")

    def with_fewer(self, num_devices: int, source: FactsSource) -> "Machine | None":
        """The machine of which so many devices are used; None: it was not measured with as many, for this task."""
        return calibrated_machine(source, num_devices) if self.is_here else self


def described_machine(name: str, *, devices: int | None, network: float | None) -> Machine:
    """The cluster of this name or file. Raises FourfoldError.

    devices  how many there are to be; None: those of the cluster
    network  bytes a second that a rank sends to another host; None: the cluster's
    """
    from fourfold.planner.predict.clusters import RooflinePrices, load_cluster

    cluster = load_cluster(name)
    if network is not None:
        if cluster.network is None:
            got = f"network = …, and {name} is one host"
            problem = Problem(got, "a cluster with a network", "a table [network] in its file")
            raise SettingError(problem, where=WHERE)
        cluster = dataclasses.replace(cluster, network=cluster.network._replace(bandwidth=network))
    if devices is not None:
        cluster = cluster.resized(devices)
    hosts = f"{cluster.hosts} hosts" if cluster.hosts > 1 else "one host"
    count = "1 device" if cluster.num_devices == 1 else f"{cluster.num_devices:,} devices"
    return Machine(cluster, RooflinePrices(cluster), f"{count} of {cluster.name}, {hosts}", is_here=False)


def this_machine(run: Run, source: FactsSource, devices: int, *, is_forced: bool = False) -> Machine:
    """This machine with so many ranks. If it has not been measured for this task, it is now. Raises FourfoldError.

    run        has the task; source: its facts
    is_forced  measure although other processes are at work
    """
    most = max(MAX_DEFAULT_PROCESSES, RANKS_PER_CORE * num_cores())
    if devices > most:
        got, need = f"devices = {devices}, on this machine of {num_cores()} cores", f"at most {most} ranks here"
        raise SettingError(Problem(got, need, "cluster=dgx-a100, or a file that describes the machine"), where=WHERE)
    key = task_key(source)
    calibration = find_calibration(key, devices)
    if calibration is None:
        print_text(why_measured(run.words, key, devices))
        measured = calibrate(run, devices, key=key, is_forced=is_forced)
        if measured is None:
            raise CalibrationError(Problem("the ranks that measure this machine failed", "", "fourfold doctor"))
        print_text("\n".join(format_calibrated(measured)) + "\n")
        calibration = measured.calibration
    return _as_measured(calibration)


def why_measured(words: Sequence[str], key: str, devices: int) -> str:
    """Why this machine is measured now. `key`: of the task."""
    ranks = "1 rank" if devices == 1 else f"{devices} ranks"
    text = f"measuring this machine once, for {' '.join(words)} on {ranks}: less than a minute"
    others = other_conditions(_identity(devices), key)
    return f"{text}\nwhat was measured with {', '.join(others)} does not hold here" if others else text


def calibrated_machine(source: FactsSource, devices: int) -> Machine | None:
    """This machine with so many ranks; None if it has not been measured for this task. Raises FourfoldError.

    Where it has not been measured for any task, the task's facts are not asked for: they take seconds.
    """
    if not has_calibrations(_identity(devices)):
        return None
    calibration = find_calibration(task_key(source), devices)
    return None if calibration is None else _as_measured(calibration)


def _identity(devices: int) -> MachineIdentity:
    from fourfold.planner.calibrate.timing import this_machine as identify

    return identify(devices, threads=threads_of_rank(devices))


def _as_measured(calibration: Calibration) -> Machine:
    import torch

    from fourfold.environment.host_limits import available_bytes
    from fourfold.planner.predict.calibrated_prices import CalibratedPrices

    measured = calibration.machine
    rates = calibration.operations
    passes = rates.passes
    device, memory_bytes = "cpu", float("inf")
    if torch.cuda.is_available():  # each rank has one of them
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        device, memory_bytes = "cuda", float(min(each.total_memory for each in gpus))
    elif (available := available_bytes()) is not None:
        memory_bytes = available / measured.ranks_per_host
    cluster = Cluster(
        name="this machine",
        device=device,
        devices_per_host=measured.ranks_per_host,
        hosts=measured.hosts,
        memory_bytes=memory_bytes,
        # Convolutions may do better than products.
        flops_per_second={
            "float32": max(each.sizes[-1] / each.seconds[-1] for each in (rates.products, rates.convolution))
        },
        memory_bandwidth=passes.sizes[-1] / passes.seconds[-1],
        # Not used: measured prices are those of CalibratedPrices.
        products=ProductEfficiency(1.0, 0.0),
        host=Tier(0.0, passes.sizes[-1] / passes.seconds[-1]),
        network=None,
        prediction_error=PREDICTION_ERROR,
    )
    ranks = "1 rank" if measured.ranks_per_host == 1 else f"{measured.ranks_per_host} ranks"
    return Machine(cluster, CalibratedPrices(calibration), f"{ranks} of this machine, as measured", is_here=True)


def calibration_run(prepared: Job) -> Run:
    """The task of a job and the arguments that it was given."""
    arguments = prepared.settings["extra_settings"]
    return Run(prepared.task_name, texts={name: _text(value) for name, value in sorted(arguments.items())})


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ---- calibration -----------------------------------------------------------------------------------------------------


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
    from fourfold.planner.calibrate.timing import check_quiet

    machine = _identity(num_ranks)
    load = os.getloadavg()[0] if is_forced else check_quiet()
    path = calibration_path(machine, key)
    try:
        check_writable(path)
    except OSError as error:
        got = f"{path} could not be written: {os_error_text(error)}"
        problem = Problem(got, "a folder that can be written to", "XDG_CACHE_HOME=FOLDER")
        raise CalibrationError(problem, where=CALIBRATING) from None
    begin = time.perf_counter()
    run = dataclasses.replace(run, decided=Plan(dp=num_ranks))
    result = launch_ranks("measure", run, machine=machine, load=load, is_forced=is_forced).result
    if result is None:
        return None
    calibration = decode_calibration(result["calibration"].encode(), where=CALIBRATING)
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
    machine = _identity(num_ranks)
    path = calibration_path(machine, key)
    try:
        return read_calibration(path, machine)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CalibrationError(Problem(f"{path}: {os_error_text(error)}", "a file"), where=CALIBRATING) from None


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
    measured = measure(prepared.task, source, ranks, conditions, say=_say if world.rank == 0 else lambda text: None)
    return {"calibration": encode_calibration(measured.calibration).decode(), "left_out": measured.left_out}


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
