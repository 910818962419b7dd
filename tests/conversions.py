"""Conversions: the scripts of examples/conversions train on two ranks as the plain script does on one device.

plain      the script for one device, NAME.py
converted  the same script for Accelerate (NAME_accelerate.py) and for Fourfold (NAME_fourfold.py)
Law: each converted script prints, once, the losses that the plain one prints.

`python -m tests.conversions` runs them all, as CI does.
"""

import difflib
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "conversions"
NAMES = ("resnet", "gpt2", "loop")
# Torch may abort at exit where a script does not end the process group, and Accelerate's need not.
AND_END = (
    "import runpy, sys, torch.distributed as dist; "
    "runpy.run_path(sys.argv[1], run_name='__main__'); dist.destroy_process_group()"
)
LAUNCHERS = {
    "accelerate": (
        *("torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
        *("--no-python", sys.executable, "-c", AND_END),
    ),
    "fourfold": ("fourfold", "run", "-n", "2"),
}
# The sum over two half batches rounds differently, and training amplifies that: here by up to 2e-4 of a loss.
TOLERANCE = 5e-3
TIME_LIMIT_SECONDS = 300
# Without it Accelerate trains two models that know nothing of each other, where there are no GPUs.
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def script(name: str, kind: str = "") -> Path:
    return FOLDER / f"{name}{'_' * bool(kind)}{kind}.py"


def changed_lines(plain: str, converted: str) -> list[str]:
    """The lines that a conversion removes, with - in front, and those that it adds, with +; blank ones left out."""
    before, after = ([line for line in text.splitlines() if line.strip()] for text in (plain, converted))
    return [line[0] + line[2:] for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]


def num_changed_lines(plain: str, converted: str) -> int:
    return len(changed_lines(plain, converted))


def losses(output: str) -> list[tuple[str, float]]:
    """What a script prints: each epoch with its loss."""
    return [(epoch, float(loss)) for epoch, loss in re.findall(r"epoch (\d+): (?:validation )?loss (\S+)", output)]


def is_same_training(found: Sequence[tuple[str, float]], expected: Sequence[tuple[str, float]]) -> bool:
    """Whether the same epochs, each once, have the same losses."""
    if not expected or [epoch for epoch, _ in found] != [epoch for epoch, _ in expected]:
        return False
    pairs = zip(found, expected, strict=True)
    return all(math.isclose(mine, theirs, rel_tol=TOLERANCE) for (_, mine), (_, theirs) in pairs)


def run(*command: str) -> list[tuple[str, float]]:
    """The losses that a Python command prints."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    ended = subprocess.run(
        [sys.executable, *(["-m"] if not command[0].endswith(".py") else []), *command],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIME_LIMIT_SECONDS,
        check=True,
    )
    return losses(ended.stdout)


def main() -> None:
    """Run every script, and exit with an error where a converted one trains otherwise than the plain one."""
    for name in NAMES:
        expected = run(str(script(name)))
        print(f"{name}: {', '.join(f'{loss:.4f}' for _, loss in expected)}", flush=True)
        for kind, launcher in LAUNCHERS.items():
            found, changed = run(*launcher, str(script(name, kind))), script(name, kind).read_text()
            if not is_same_training(found, expected):
                sys.exit(f"{script(name, kind).name} printed {found}, and {script(name).name} {expected}")
            print(f"  {kind}, 2 ranks: the same, {num_changed_lines(script(name).read_text(), changed)} lines changed")


if __name__ == "__main__":
    main()
