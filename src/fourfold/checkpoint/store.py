"""Shelf: the checkpoints of one run, as folders.

step-00000100           a checkpoint: complete, since it has got this name by a rename
.part-…                 one being written, or left by a process that was killed
damaged-step-00000100   one that failed its verification, set aside
Law: a checkpoint is taken away only when a newer one is on the disk; the last K and the best stay.
"""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from fourfold.checkpoint.manifest_file import STEP_DIR_NAME, read_manifest, verify_checkpoint
from fourfold.environment.atomic_file import fsync_path
from fourfold.words.errors import CheckpointError, Problem

CHECKPOINTS_DIR = "checkpoints"


class CheckpointStore:
    """The checkpoints of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / CHECKPOINTS_DIR

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, oldest first; whether they are good is another question."""
        if not self.path.is_dir():
            return []
        found = ((entry.name, STEP_DIR_NAME.fullmatch(entry.name)) for entry in self.path.iterdir())
        # A number with more zeros in front is a name that no checkpoint has.
        return sorted(int(match[1]) for name, match in found if match and self.step_dir(int(match[1])).name == name)

    def step_dir(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def staging_dir(self, step: int, token: str) -> Path:
        """Where a checkpoint is written; `token` tells apart the attempts of a run."""
        return self.path / f".part-{token}-step-{step:08d}"

    def commit(self, staging_dir: Path, step: int) -> None:
        """Give a complete checkpoint its name, on the disk."""
        fsync_path(staging_dir)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.step_dir(step), self.path / f".part-replaced-{staging_dir.name.removeprefix('.part-')}")
        os.rename(staging_dir, self.step_dir(step))
        fsync_path(self.path)

    def prune(self, *, num_kept: int) -> None:
        """Take away all but the last `keep` and the best, and what is left of attempts to save before them."""
        steps = self.steps()
        best = self.best_step()
        for step in steps[:-num_kept]:
            if step != best:
                # Renamed first: half a checkpoint must not bear the name of one.
                gone = self.path / f".part-old-step-{step:08d}"
                os.rename(self.step_dir(step), gone)
        self.remove_partial(steps[-1])

    def remove_partial(self, last_step: int | None = None) -> None:
        """Take away what processes that were killed, or failed, have left; up to step `last`, or all of it."""
        for entry in self.path.glob(".part-*"):
            # Another rank may be at the next checkpoint already. What has no step is not ours.
            step = entry.name.rpartition("-")[2]
            if step.isdecimal() and (last_step is None or int(step) <= last_step):
                shutil.rmtree(entry, ignore_errors=True)

    def quarantine(self, step: int) -> None:
        """Take the name of a checkpoint from one that is damaged."""
        for number in range(1, 1000):
            target = self.path / (f"damaged-step-{step:08d}" + (f"-{number}" if number > 1 else ""))
            if not target.exists():
                os.rename(self.step_dir(step), target)
                return

    def best_step(self) -> int | None:
        """The step whose validation loss is the least; None where none was measured."""
        losses = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                loss = read_manifest(self.step_dir(step)).valid.get("loss")
                if loss is not None:
                    losses[step] = loss
        return min(losses, key=lambda step: losses[step]) if losses else None


def newest_valid(folder: Path, *, step: int | None = None) -> Path:
    """The newest checkpoint of a run that passes its verification, or the one of `step`. Raises CheckpointError."""
    shelf = CheckpointStore(folder)
    steps = shelf.steps() if step is None else [step]
    problems: Sequence[str] = []
    for each in reversed(steps):
        problems = verify_checkpoint(shelf.step_dir(each))
        if not problems:
            return shelf.step_dir(each)
    raise CheckpointError(
        [Problem(text) for text in problems] or Problem(f"{shelf.path} holds no checkpoint", "at least one")
    )


def resume_hint(folder: Path) -> str:
    """What the command that trains the run in this folder will do when it is given again."""
    steps = CheckpointStore(folder).steps()
    if not steps:
        return "nothing is saved, and the same command begins again"
    return f"the same command goes on from step {steps[-1]}"
