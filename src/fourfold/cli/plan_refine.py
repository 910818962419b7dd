"""Plan refine: `fourfold plan calibrate RUN`, which corrects what was measured of this machine by the trace of a run.

Law: nothing is stored unless the trace is of the plan that the run's folder has, and agrees with what was measured.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.cli import job
from fourfold.cli.plan_run import PlannedRun
from fourfold.words.errors import Problem
from fourfold.words.run_files import CONFIG_FILE

if TYPE_CHECKING:
    from fourfold.plan.trace_file import Trace

TRACE = "trace.json"


def refine_by_run(run: PlannedRun) -> str:
    """Correct the calibration of a run's task by its trace, and store it; returns what changed, as text.

    Raises CalibrationError if nothing was measured for the task yet, and what reading the run raises.
    """
    from fourfold.analysis.calibrate.machine import this_machine
    from fourfold.analysis.task_facts.source import TaskFacts
    from fourfold.cli.plan_calibrate import find_calibration, threads_of_rank
    from fourfold.plan.lowering import lower
    from fourfold.plan.predict.calibrated_prices import CalibratedPrices
    from fourfold.plan.predict.calibration import CalibrationError, calibration_path, task_key, write_calibration
    from fourfold.plan.predict.refinement import refine
    from fourfold.plan.predict.step import predict_step
    from fourfold.plan.topology import Topology

    prepared = job.parse_job([str(run.folder / CONFIG_FILE)], has_run_dir=False)
    source, ranks = TaskFacts(prepared.task), run.plan.mesh.size
    key, machine = task_key(source), this_machine(ranks, threads=threads_of_rank(ranks))
    calibration = find_calibration(key, ranks)
    if calibration is None:
        got = f"nothing measured for {prepared.task_name} on {ranks} ranks, which {run.folder} would refine"
        attempt = f"fourfold plan calibrate {prepared.task_name} -n {ranks}"
        raise CalibrationError(Problem(got, "a calibration of this machine", attempt))
    topology = Topology.regular(hosts=1, ranks_per_host=ranks)
    blueprint = lower(run.plan, source.specs(run.plan), topology, source.update_spec)
    predicted = predict_step(blueprint, source, CalibratedPrices(calibration))
    refined = refine(calibration, _read_trace(run.folder), predicted)
    write_calibration(calibration_path(machine, key), refined.calibration)
    ratios = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in refined.ratios._asdict().items())
    return f"{run.folder} took, of what was measured before: {ratios}; stored in {calibration_path(machine, key)}"


def _read_trace(folder: Path) -> "Trace":
    from fourfold.plan.predict.calibration import CalibrationError
    from fourfold.plan.trace_file import decode_trace

    path = folder / TRACE
    if not path.is_file():
        got, need = f"{folder} has no {TRACE}", "a run that has recorded steps"
        raise CalibrationError(Problem(got, need, "a run of some hundred steps"), where=str(folder))
    return decode_trace(path.read_bytes(), where=str(path))
