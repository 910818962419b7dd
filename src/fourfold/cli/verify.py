"""`fourfold verify`: the training of a plan, or of a script, compared with that of one device, as a table.

    python -m fourfold.cli.verify STEPS SCRIPT.py [argument…]      one rank of a script, started by launcher/worker.py

Law: the exit code is 1 if any number deviates by more than its bound.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.cli.output import print_text
from fourfold.environment.world import from_environment
from fourfold.words.errors import FourfoldError, Problem, SettingError

if TYPE_CHECKING:
    from fourfold.cli.job import Job
    from fourfold.verification.comparison import VerifyResult


SCRIPT_STEPS = 10


class VerifyError(FourfoldError):
    """A plan whose training differs from that of one device."""

    exit_code = 1


def verify(prepared: "Job") -> None:
    """Verify in this process; rank 0 prints the result, and raises VerifyError if the plan fails."""
    from fourfold.verification.command import verify as run

    seed = prepared.settings.get("seed", 0)
    report(run(prepared.task, prepared.plan, seed=seed, name=prepared.task_name))


def run_script(words: Sequence[str], processes: str | None) -> int:
    """`fourfold verify SCRIPT.py`; returns the exit code. All words but `steps=` are the script's own."""
    from fourfold.cli.launch import launch
    from fourfold.launcher.process_defaults import check_num_processes, default_num_processes

    given = [word.partition("=")[2] for word in words if word.startswith("steps=")]
    steps = given[-1] if given else str(SCRIPT_STEPS)
    if not steps.isdecimal() or int(steps) < 1:
        problem = Problem(f"steps = {steps}", "a whole number of steps to compare, at least 1", "steps=10")
        raise SettingError(problem, where="fourfold verify")
    command = [word for word in words if not word.startswith("steps=")]
    world = from_environment()
    num_processes = check_num_processes(processes, world) or default_num_processes()
    if world is None and num_processes > 1:
        return launch(["-m", "fourfold.cli.verify", steps, *command], num_processes).exit_code
    verify_script(command, steps=int(steps))
    return 0


def verify_script(command: Sequence[str], *, steps: int) -> None:
    """Run one rank of a script, and compare its first steps; rank 0 prints the result, as `verify` does."""
    from fourfold.comm.init import world
    from fourfold.launcher.worker import run_program
    from fourfold.verification.script import ScriptVerifier

    verifier = ScriptVerifier(Path(command[0]).name, steps=steps)
    with verifier.watching():
        run_program(command)
    report(verifier.result if world().rank == 0 else None)


def report(result: "VerifyResult | None") -> None:
    """Print what rank 0 has found. Raises VerifyError where numbers deviate."""
    if result is None:
        return
    if not result.num_steps:
        raise SettingError(result.problems, where="fourfold verify")
    print_text(str(result))
    if not result.ok:
        raise VerifyError(result.problems, where="the comparison")


if __name__ == "__main__":
    verify_script(sys.argv[2:], steps=int(sys.argv[1]))
