"""Checkpoint store: the checkpoints of one run, as folders.

step-00000100           a checkpoint: complete, because it gets this name by a rename
.part-…                 an unfinished one: being written, or left by a killed process
damaged-step-00000100   one that failed its verification, set aside
retention               how many of the newest good ones are kept, and how many of the best
Law: the newest good checkpoint is never removed, and neither is one that may be good and cannot be read here.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fourfold.checkpoint.manifest_file import STEP_DIR_NAME, read_manifest, verify_checkpoint
from fourfold.environment.atomic_file import fsync_path
from fourfold.plan.checkpoint_manifest import Manifest
from fourfold.words.errors import CheckpointError, Problem, UnreadableCheckpointError

CHECKPOINTS_DIR = "checkpoints"
REPLACED_PREFIX = ".part-replaced-"
MAX_DAMAGED = 1000  # checkpoints of one step that are set aside


class Retention(NamedTuple):
    """Which checkpoints are kept: the newest `num_newest`, and the `num_best` with the best values of `metric`.

    mode  "min": the least value is the best; "max": the greatest
    """

    num_newest: int = 2
    num_best: int = 1
    metric: str = "loss"
    mode: str = "min"


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

    def prune(self, retention: Retention) -> None:
        """Remove all checkpoints but those that `retention` keeps, and unfinished ones up to the newest.

        Damaged ones do not count, and those newer than all good ones stay: a resume will set them aside.
        """
        steps, unreadable = self.steps(), set[int]()
        manifests = self._manifests(unreadable)
        good = [step for step in manifests if self._has_all_files(step, manifests[step])]
        kept = {*good[-retention.num_newest :], *_best_steps(manifests, retention), *unreadable}
        for step in steps:
            if step not in kept and step < max(good, default=0):
                # Rename it first: a checkpoint that is half removed must not have a checkpoint's name.
                os.rename(self.step_dir(step), self.path / f".part-old-step-{step:08d}")
        if steps:
            self.remove_partial(steps[-1])

    def _manifests(self, unreadable: set[int] | None = None) -> dict[int, Manifest]:
        """The manifests of all checkpoints that have a good one, oldest first.

        Adds to `unreadable` the steps of those that may be good and cannot be read here.
        """
        found = {}
        for step in self.steps():
            try:
                found[step] = read_manifest(self.step_dir(step))
            except UnreadableCheckpointError:
                (set() if unreadable is None else unreadable).add(step)
            except CheckpointError:
                continue
        return found

    def _has_all_files(self, step: int, manifest: Manifest) -> bool:
        """Whether all files are there with their sizes. Their content is not read: this is asked after every save."""
        try:
            sizes = {name: (self.step_dir(step) / name).stat().st_size for name in manifest.files}
        except OSError:
            return False
        return sizes == {name: entry.num_bytes for name, entry in manifest.files.items()}

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
        """The step with the best validation, by the run's own measure; None if that was not measured."""
        manifests = self._manifests()
        if not manifests:
            return None
        newest = manifests[max(manifests)]
        return next(iter(_best_steps(manifests, Retention(metric=newest.best_metric, mode=newest.best_mode))), None)

    def best_value(self, retention: Retention) -> float | None:
        """The best value of `retention.metric` among the checkpoints; None if none has it."""
        manifests = self._manifests()
        steps = _best_steps(manifests, retention._replace(num_best=1))
        return manifests[steps[0]].measures[retention.metric] if steps else None


def _best_steps(manifests: Mapping[int, Manifest], retention: Retention) -> list[int]:
    """The steps with the best values, best first; of equal ones the older is better."""
    sign = 1 if retention.mode == "min" else -1
    values = {step: manifest.measures.get(retention.metric, math.nan) for step, manifest in manifests.items()}
    ranked = sorted((sign * value, step) for step, value in values.items() if not math.isnan(value))
    return [step for _, step in ranked[: retention.num_best]]


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
