"""Plan machine: where a plan is to run: a described cluster, or this machine as it was measured.

Law: what a plan is priced with is always said; a measurement of another machine is never used for this one.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fourfold.cli.output import print_text
from fourfold.cli.plan.arguments import WHERE
from fourfold.cli.run import Run
from fourfold.environment.world import num_cores
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.planner.predict.clusters import Cluster, ProductEfficiency, Tier
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.predict.prices import Prices
from fourfold.planner.search.answer import PREDICTION_ERROR
from fourfold.words.errors import Problem, SettingError

if TYPE_CHECKING:
    from fourfold.cli.job import Job
    from fourfold.planner.predict.calibration import Calibration, MachineIdentity

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
    from fourfold.cli.plan.calibrate import calibrate, find_calibration, format_calibrated
    from fourfold.launcher.process_defaults import MAX_DEFAULT_PROCESSES
    from fourfold.planner.predict.calibration import CalibrationError, task_key

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
    from fourfold.planner.predict.calibration import other_conditions

    ranks = "1 rank" if devices == 1 else f"{devices} ranks"
    text = f"measuring this machine once, for {' '.join(words)} on {ranks}: less than a minute"
    others = other_conditions(_identity(devices), key)
    return f"{text}\nwhat was measured with {', '.join(others)} does not hold here" if others else text


def calibrated_machine(source: FactsSource, devices: int) -> Machine | None:
    """This machine with so many ranks; None if it has not been measured for this task. Raises FourfoldError.

    Where it has not been measured for any task, the task's facts are not asked for: they take seconds.
    """
    from fourfold.cli.plan.calibrate import find_calibration
    from fourfold.planner.predict.calibration import has_calibrations, task_key

    if not has_calibrations(_identity(devices)):
        return None
    calibration = find_calibration(task_key(source), devices)
    return None if calibration is None else _as_measured(calibration)


def _identity(devices: int) -> "MachineIdentity":
    from fourfold.cli.plan.calibrate import threads_of_rank
    from fourfold.planner.calibrate.timing import this_machine as identify

    return identify(devices, threads=threads_of_rank(devices))


def _as_measured(calibration: "Calibration") -> Machine:
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


def calibration_run(prepared: "Job") -> Run:
    """The task of a job and the arguments that it was given."""
    arguments = prepared.settings["extra_settings"]
    return Run(prepared.task_name, texts={name: _text(value) for name, value in sorted(arguments.items())})


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
