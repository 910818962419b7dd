"""`fourfold verify`: a plan's training beside one device's, as a table.

    python -m fourfold.cli.verify WORD…      one rank of it, in a world of a launcher's

Law: the exit code is 1 where something is further off than the tolerance.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fourfold.cli import job
from fourfold.environment.world import World, from_environment
from fourfold.words.errors import FourfoldError, Problem
from fourfold.words.terminal_text import escape_controls
from fourfold.words.text_table import align_columns

if TYPE_CHECKING:
    from fourfold.analysis.verify import VerifyResult

MAX_SHOWN = 40  # tensors; of more, the furthest


class VerifyError(FourfoldError):
    """A plan whose training is not that of one device."""

    exit_code = 1


def main(words: Sequence[str]) -> None:
    world = from_environment()
    assert world is not None
    verify(job.parse_job(words, num_processes=world.size), world)


def verify(work: job.Job, world: World | None) -> None:
    """Verify in this process; rank 0 says what was found. Raises VerifyError there."""
    from fourfold.analysis.verify import TOLERANCE
    from fourfold.analysis.verify import verify as run

    verdict = run(work.task, work.plan, seed=work.settings.get("seed", 0))
    if verdict is None:
        return
    print(escape_controls("\n".join(format_result(work, verdict))), flush=True)
    if not verdict.max_deviation <= TOLERANCE:
        raise VerifyError(_problems(verdict, TOLERANCE), where="what was compared")


def format_result(work: job.Job, verdict: "VerifyResult") -> list[str]:
    """The lines of the table, and what is to be known about it."""
    from fourfold.analysis.verify import TOLERANCE
    from fourfold.step.sequence.dry_run import NOT_CHECKED

    mesh = work.plan.mesh
    axes = " × ".join(f"{axis} {mesh.axis_size(axis)}" for axis in ("pp", "dp", "sp", "tp") if mesh.axis_size(axis) > 1)
    steps = f"{work.task.steps} step{'s' if work.task.steps > 1 else ''}"
    lines = [f"{work.task_name} on {axes or 'one rank'}, beside one device: {steps} in float64", ""]
    names = sorted(
        verdict.weight_deviations, key=lambda name: -max(verdict.weight_deviations[name], verdict.grad_deviations[name])
    )
    names = [name for name in verdict.weight_deviations if name in names[:MAX_SHOWN]]
    rows = [("tensor", "gradient", "weight")]
    rows += [
        (name, _format_deviation(verdict.grad_deviations[name]), _format_deviation(verdict.weight_deviations[name]))
        for name in names
    ]
    lines += [f"  {line}" for line in align_columns(rows, "<>>")]
    if len(names) < len(verdict.weight_deviations):
        lines.append(f"  and {len(verdict.weight_deviations) - len(names)} more, none of them further off")
    lines += ["", f"  loss, by step  {'  '.join(map(_format_deviation, verdict.loss_deviations))}", ""]
    lines.append(
        f"largest deviation {verdict.max_deviation:.1e}, of |a − b| / max(1, |b|); the tolerance is {TOLERANCE:.0e}"
    )
    if verdict.num_dropouts:
        lines.append("dropout is left out: what is dropped is drawn by each rank")
    if verdict.has_randomness:
        lines.append("the model draws random numbers while it trains: each mesh has other ones, and may differ by them")
    if mesh.axis_size("sp") > 1:
        lines.append(f"the dry run of sp = {mesh.axis_size('sp')} does not see {NOT_CHECKED}")
    if verdict.max_deviation <= TOLERANCE:
        lines.append("the plan gives the training of one device")
    return lines


def _format_deviation(far: float) -> str:
    return f"{far:8.1e}"


def _problems(verdict: "VerifyResult", tolerance: float) -> list[Problem]:
    kinds: Mapping[str, Mapping[str, float]] = {
        "gradient": verdict.grad_deviations,
        "weight": verdict.weight_deviations,
        "loss": {f"step {number}": far for number, far in enumerate(verdict.loss_deviations, 1)},
    }
    problems = []
    for kind, each in kinds.items():
        over = {name: far for name, far in each.items() if not far <= tolerance}
        if over:
            name = max(over, key=lambda key: over[key])
            more = f", and {len(over) - 1} more" if len(over) > 1 else ""
            got = f"the {kind} of {name} is {over[name]:.1e} off{more}"
            problems.append(Problem(got, f"at most {tolerance:.0e}", "the same with one axis of the mesh at a time"))
    return problems


if __name__ == "__main__":
    main(sys.argv[1:])
