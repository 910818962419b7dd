"""`fourfold verify`: the training of a plan compared with that of one device, as a table.

    python -m fourfold.cli.verify WORD…      one rank of it, started by launcher/worker.py

Law: the exit code is 1 if any loss, gradient or weight deviates by more than the tolerance.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fourfold.cli import job
from fourfold.cli.output import print_text
from fourfold.environment.world import World, from_environment
from fourfold.words.errors import FourfoldError, Problem
from fourfold.words.text_table import table_lines

if TYPE_CHECKING:
    from fourfold.analysis.verify import VerifyResult

MAX_SHOWN = 40  # tensors; if there are more, those that deviate most


class VerifyError(FourfoldError):
    """A plan whose training differs from that of one device."""

    exit_code = 1


def main(words: Sequence[str]) -> None:
    world = from_environment()
    assert world is not None
    verify(job.parse_job(words, num_processes=world.size, has_run_dir=False), world)


def verify(prepared: job.Job, world: World | None) -> None:
    """Verify in this process; rank 0 prints the result, and raises VerifyError if the plan fails."""
    from fourfold.analysis.verify import TOLERANCE
    from fourfold.analysis.verify import verify as run

    result = run(prepared.task, prepared.plan, seed=prepared.settings.get("seed", 0))
    if result is None:
        return
    print_text("\n".join(format_result(prepared, result)))
    if not result.max_deviation <= TOLERANCE:
        raise VerifyError(_problems(result, TOLERANCE), where="the comparison")


def format_result(prepared: job.Job, result: "VerifyResult") -> list[str]:
    """The table, and notes on what it covers."""
    from fourfold.analysis.verify import TOLERANCE
    from fourfold.step.sequence.dry_run import NOT_CHECKED

    mesh = prepared.plan.mesh
    axes = " × ".join(f"{axis} {mesh.axis_size(axis)}" for axis in ("pp", "dp", "sp", "tp") if mesh.axis_size(axis) > 1)
    num_steps = prepared.task.steps or len(result.loss_deviations)
    steps = f"{num_steps} step{'s' if num_steps > 1 else ''}"
    lines = [f"{prepared.task_name} on {axes or 'one rank'}, compared with one device: {steps} in float64", ""]
    names = sorted(
        result.weight_deviations, key=lambda name: -max(result.weight_deviations[name], result.grad_deviations[name])
    )
    names = [name for name in result.weight_deviations if name in names[:MAX_SHOWN]]
    rows = [("tensor", "gradient", "weight")]
    rows += [
        (name, _format_deviation(result.grad_deviations[name]), _format_deviation(result.weight_deviations[name]))
        for name in names
    ]
    lines += [f"  {line}" for line in table_lines(rows, "<>>")]
    if len(names) < len(result.weight_deviations):
        lines.append(f"  and {len(result.weight_deviations) - len(names)} more, which deviate no more than these")
    lines += ["", f"  loss, by step  {'  '.join(map(_format_deviation, result.loss_deviations))}", ""]
    lines.append(
        f"largest deviation {result.max_deviation:.1e}, of |a − b| / max(1, |b|); the tolerance is {TOLERANCE:.0e}"
    )
    if result.num_dropouts:
        lines.append("dropout is left out: each rank draws its own masks")
    if result.has_randomness:
        lines.append(
            "the model draws random numbers while it trains: they differ between meshes, and results may differ by them"
        )
    if mesh.axis_size("sp") > 1:
        lines.append(f"the dry run of sp = {mesh.axis_size('sp')} does not see {NOT_CHECKED}")
    if result.max_deviation <= TOLERANCE:
        lines.append("the plan trains as one device does")
    return lines


def _format_deviation(deviation: float) -> str:
    return f"{deviation:8.1e}"


def _problems(result: "VerifyResult", tolerance: float) -> list[Problem]:
    kinds: Mapping[str, Mapping[str, float]] = {
        "gradient": result.grad_deviations,
        "weight": result.weight_deviations,
        "loss": {f"step {number}": deviation for number, deviation in enumerate(result.loss_deviations, 1)},
    }
    problems = []
    for kind, each in kinds.items():
        over = {name: deviation for name, deviation in each.items() if not deviation <= tolerance}
        if over:
            name = max(over, key=lambda key: over[key])
            more = f", and {len(over) - 1} more" if len(over) > 1 else ""
            got = f"the {kind} of {name} deviates by {over[name]:.1e}{more}"
            problems.append(Problem(got, f"at most {tolerance:.0e}", "the same with one axis of the mesh at a time"))
    return problems


if __name__ == "__main__":
    main(sys.argv[1:])
