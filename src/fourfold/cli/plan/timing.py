"""Plan timing: the first plans of a decision are run here for a few steps, beside the best baseline.

    python -m fourfold.cli.plan.timing PLANS RESULT WORD…      one rank of it, started by launcher/worker.py

PLANS   a JSON file: the plans as TOML
RESULT  the JSON file that rank 0 writes: seconds of a step, by plan
Law: plans are timed in one job and in turns; each starts with the same weights and the same batches.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fourfold.cli import job
from fourfold.environment.atomic_file import write_atomically
from fourfold.environment.temporary_folder import temporary_folder
from fourfold.environment.world import from_environment
from fourfold.plan.plan import Plan

Launch = Callable[[Sequence[str], int], int]


def main(plans: str, result: str, words: Sequence[str]) -> None:
    """One rank."""
    from fourfold.planner.time_plans import time_plans

    world = from_environment()
    assert world is not None
    timed = [Plan.from_toml(text) for text in json.loads(Path(plans).read_text(encoding="utf-8"))]
    prepared = job.parse_job([*words, *_fitting(timed[0])], num_processes=world.size, has_run_dir=False)
    seconds = time_plans(prepared.task, timed, seed=prepared.settings.get("seed", 0))
    if world.rank == 0:
        write_atomically(Path(result), json.dumps(seconds).encode())


def _fitting(plan: Plan) -> list[str]:
    """Words with which a command line has as many ranks, whatever plan is in its settings file."""
    return ["pp=1", "cp=1", "tp=1", "ulysses=1", "shard=none", f"dp={plan.mesh.size}"]


def measure_plans(plans: Sequence[Plan], words: Sequence[str], launch: Launch) -> list[float] | None:
    """Seconds of a step of each plan, measured here; None if the ranks failed, which the launcher has reported.

    words   name the task; launch  starts a command in so many processes, and returns the exit code
    """
    with temporary_folder() as folder:
        request, result = folder / "plans.json", folder / "seconds.json"
        request.write_text(json.dumps([plan.to_toml() for plan in plans]), encoding="utf-8")
        command = ["-m", "fourfold.cli.plan.timing", str(request), str(result), *words]
        if launch(command, plans[0].mesh.size) != 0:
            return None
        return json.loads(result.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
