"""Checkpoint store: the checkpoints of one run, as folders.

step-00000100           a checkpoint: complete, because it gets this name by a rename
.part-…                 an unfinished one: being written, or left by a killed process
damaged-step-00000100   one that failed its verification, set aside
Law: a checkpoint is removed only when a newer one is on the disk. The last `num_kept` and the best are kept.
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
REPLACED_PREFIX = ".part-replaced-"
MAX_DAMAGED = 1000  # checkpoints of one step that are set aside


class CheckpointStore:
    """The checkpoints of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / CHECKPOINTS_DIR

    def steps(self) -> list[int]:
        """The steps of all checkpoints, damaged or not, oldest first."""
        if not self.path.is_dir():
            return []
        matches = ((entry.name, STEP_DIR_NAME.fullmatch(entry.name)) for entry in self.path.iterdir())
        # A step with extra leading zeros is not a checkpoint's name.
        return sorted(int(match[1]) for name, match in matches if match and self.step_dir(int(match[1])).name == name)

    def step_dir(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def staging_dir(self, step: int, token: str) -> Path:
        """Where a checkpoint is written; attempts of a run have different tokens."""
        return self.path / f".part-{token}-step-{step:08d}"

    def commit(self, staging_dir: Path, step: int) -> None:
        """Give a complete checkpoint its name, and wait until the disk has it."""
        fsync_path(staging_dir)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.step_dir(step), self.path / f"{REPLACED_PREFIX}{staging_dir.name.removeprefix('.part-')}")
        os.rename(staging_dir, self.step_dir(step))
        fsync_path(self.path)

    def prune(self, *, num_kept: int) -> None:
        """Remove all checkpoints but the last `num_kept` and the best, and unfinished ones up to the newest."""
        steps = self.steps()
        best = self.best_step()
        for step in steps[:-num_kept]:
            if step != best:
                # Rename it first: a checkpoint that is half removed must not have a checkpoint's name.
                os.rename(self.step_dir(step), self.path / f".part-old-step-{step:08d}")
        self.remove_partial(steps[-1])

    def remove_partial(self, last_step: int | None = None) -> None:
        """Remove what killed or failed attempts have left; with `last_step`, only of steps up to it."""
        self._put_back()
        for entry in self.path.glob(".part-*"):
            # Another rank may be writing the next checkpoint already. A name without a step is not ours.
            step = entry.name.rpartition("-")[2]
            if step.isdecimal() and (last_step is None or int(step) <= last_step):
                shutil.rmtree(entry, ignore_errors=True)

    def _put_back(self) -> None:
        """Give a checkpoint its name again that was to be replaced when the process was killed."""
        for entry in self.path.glob(f"{REPLACED_PREFIX}*"):
            step = entry.name.rpartition("-")[2]
            if step.isdecimal() and not self.step_dir(int(step)).exists():
                os.rename(entry, self.step_dir(int(step)))

    def quarantine(self, step: int) -> None:
        """Set a damaged checkpoint aside, under another name."""
        for number in range(1, MAX_DAMAGED):
            target = self.path / (f"damaged-step-{step:08d}" + (f"-{number}" if number > 1 else ""))
            if not target.exists():
                os.rename(self.step_dir(step), target)
                return

    def best_step(self) -> int | None:
        """The step with the least validation loss; None if none was measured."""
        losses = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                loss = read_manifest(self.step_dir(step)).valid.get("loss")
                if loss is not None:
                    losses[step] = loss
        return min(losses, key=lambda step: losses[step]) if losses else None


def newest_valid(folder: Path, *, step: int | None = None) -> Path:
    """The newest checkpoint of a run that passes its verification, or that of `step`. Raises CheckpointError."""
    store = CheckpointStore(folder)
    steps = store.steps() if step is None else [step]
    problems: Sequence[str] = []
    for candidate in reversed(steps):
        problems = verify_checkpoint(store.step_dir(candidate))
        if not problems:
            return store.step_dir(candidate)
    raise CheckpointError(
        [Problem(text) for text in problems] or Problem(f"{store.path} holds no checkpoint", "at least one")
    )


def resume_hint(folder: Path) -> str:
    """What the same command will do next with the run in this folder."""
    steps = CheckpointStore(folder).steps()
    if not steps:
        return "nothing is saved, and the same command starts over"
    return f"the same command resumes from step {steps[-1]}"
