"""Checkpoints of your own loop: the same files as those of `ff.train`, saved and loaded where the loop says.

extra   what else the loop wants back, such as the state of a scheduler: plain values, written as JSON
Law: after a load the loop goes on as if it had never ended. A save that fails raises on every rank, and leaves the
checkpoints before it as they are.
"""

import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import json

from fourfold.checkpoint.collect import TrainingState, group_options
from fourfold.checkpoint.manager import (
    AttemptDir,
    CheckpointManager,
    Found,
    OwnState,
    TrainingProgress,
    find_newest_good,
    short_text,
)
from fourfold.checkpoint.pretrained_files import save_pretrained_files
from fourfold.checkpoint.restore import CheckpointReader, restore
from fourfold.checkpoint.store import CheckpointStore, Retention
from fourfold.feed.feed import Feed
from fourfold.plan.decode import DecodeError
from fourfold.plan.json_state import decode_state, encode_state, state_problems
from fourfold.proof.digests.table import TABLE, digest_bytes
from fourfold.step.train_step import TrainStep
from fourfold.words import argument_checks
from fourfold.words.errors import CheckpointError, Problem, SettingError
from fourfold.words.run_files import SETTINGS_FILE

WHERE = "ff.Checkpoints"
DEFAULT_KEPT = Retention().num_newest


class LoadedCheckpoint(NamedTuple):
    """What `Checkpoints.load` has restored.

    step     how many steps the training had done, which `step.num_steps` is now
    extra    what was given to `save` as `extra`
    metrics  what was given to `save` as `metrics`
    folder   the checkpoint
    """

    step: int
    extra: dict[str, Any]
    metrics: dict[str, float]
    folder: Path


class Checkpoints:
    """The checkpoints of a loop of your own, in a folder that all ranks see. Every method is collective.

        checkpoints = ff.Checkpoints("runs/mine", step, feed)
        if loaded := checkpoints.load():
            scheduler.load_state_dict(loaded.extra["scheduler"])
        for batch in feed.repeat():
            step(batch)
            scheduler.step()
            if step.num_steps % 100 == 0:
                checkpoints.save(extra={"scheduler": scheduler.state_dict()})

    A checkpoint has the weights and buffers, the state and the options of the optimizer, what codecs and local steps
    remember, the loss scale, the number of steps, the place in the feed, and torch's random states. Any mesh and any
    plan for the same model loads it. Used as a context manager, the last save has been written when the block ends.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        step: TrainStep,
        feed: Feed | None = None,
        *,
        keep: int = DEFAULT_KEPT,
        tokenizer: Any = None,
    ) -> None:
        """Make no file yet.

        folder  the checkpoints are in its `checkpoints`, where `fourfold checkpoint list FOLDER` finds them
        step    what `ff.parallelize` has returned
        feed    its place in the data is saved and restored; None: the loop reads its data in another way
        keep    how many checkpoints are kept: the newest, and the one with the lowest `metrics["loss"]`
        tokenizer   of a transformers model: the first save writes its files and the model's config into `pretrained`,
                    for `fourfold checkpoint export FOLDER --format hf`

        Raises SettingError for arguments of the wrong kind or a path that is not a folder, and CheckpointError for a
        state that cannot be saved.
        """
        _check_arguments(folder, step, feed, keep, tokenizer)
        here = [os.fspath(folder), secrets.token_hex(4), Path(folder, SETTINGS_FILE).exists(), _path_problems(folder)]
        views = step.all_gather_json(here)
        path, token, self._is_run, problems = views[0]
        problems = [Problem(*each) for each in problems]
        if others := sorted({view[0] for view in views} - {path}):
            problems.append(Problem(f"{path} on rank 0, {', '.join(others)} on others", "one folder for all ranks"))
        if problems:
            raise SettingError(problems, where=WHERE)
        self.folder = Path(path)
        self._step, self._tokenizer, self._has_pretrained_files = step, tokenizer, False
        self._path = self.folder.absolute()  # the loop may change the working directory
        self._store = CheckpointStore(self._path)
        self._state = TrainingState(step, feed)
        attempt_dir = AttemptDir(self._path, token)
        self._manager = CheckpointManager(self._state, attempt_dir, _NoLog(), seed=step.seed, retention=Retention(keep))

    # ---- loading

    def load(self) -> LoadedCheckpoint | None:
        """Restore the newest valid checkpoint; None if the folder has none yet. Collective.

        Every file is read and compared with its checksum before anything is changed. Make schedulers before, and load
        their states from `extra` after: the optimizer gets the options back that it had, such as the learning rate.
        A damaged checkpoint is set aside with a warning, and the one before is used. The folder may also be that of a
        run of `ff.train`, where nothing is set aside.

        Raises CheckpointError, with nothing changed, if all checkpoints are damaged, or the newest valid one is of
        another model, optimizer or data; the message lists everything that does not fit. Raises
        UnreadableCheckpointError if another fourfold wrote it, or its files cannot be opened.
        """
        self.wait()
        if self._step.rank == 0 and not self._is_run:
            self._store.remove_partial()
        found = find_newest_good(self._step, self._store)
        if found.folder is None and found.damaged:
            texts = [text for problems in found.damaged.values() for text in problems]
            need = "at least one valid checkpoint"
            raise CheckpointError([Problem(text, need, "another folder, to start over") for text in texts], where=WHERE)
        if found.folder is None:
            return None
        loaded = self._restore(found.folder)
        self._set_aside(found)
        return loaded

    def _restore(self, folder: Path) -> LoadedCheckpoint:
        with CheckpointReader(folder) as reader:
            manifest = reader.manifest
            try:
                extra = {} if manifest.extra is None else decode_state(manifest.extra)
            except DecodeError as error:
                raise CheckpointError(Problem(f"{folder}: {error}", "the extra values as they were saved")) from None
            try:
                restore(self._state, reader, seed=self._step.seed, restores_options=True)
            except CheckpointError as error:
                raise CheckpointError(error.problems, where=str(self._shown(folder))) from None
        return LoadedCheckpoint(manifest.step, extra, manifest.measures, self._shown(folder))

    def _shown(self, folder: Path) -> Path:
        """A checkpoint's folder as the user named it."""
        return self.folder / folder.relative_to(self._path)

    def _set_aside(self, found: Found) -> None:
        if self._step.rank != 0:
            return
        for number, problems in found.damaged.items():
            text = f"a damaged checkpoint was {'left out' if self._is_run else 'set aside'}: {short_text(problems)}"
            warnings.warn(text, stacklevel=3)
            if not self._is_run:
                self._store.quarantine(number)

    # ---- saving

    def save(
        self,
        *,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = True,
    ) -> Path:
        """Save the state after `step.num_steps` steps; returns the checkpoint's folder. Collective.

        extra    given back by `load`: a dict of numbers, strings, None, and lists, tuples and dicts of these; the same
                 on every rank
        metrics  what was measured at this step, by name. The checkpoint with the lowest "loss" is kept
        wait     False: return as soon as the state has been copied, and write while training continues. An error is
                 then raised by the next `save` or `wait`

        The checkpoint appears under its name when it is complete, so a process that is killed leaves the one before.
        With local steps, save when `step.is_synchronized`. Raises CheckpointError, on every rank, if it could not be
        written: earlier ones are kept, and training may go on. Raises SettingError, on every rank, for values that
        cannot be saved, and for a folder of other training.
        """
        self.wait()
        extra, metrics = {} if extra is None else extra, {} if metrics is None else metrics
        problems = [*_value_problems(extra, metrics), *self._folder_problems()]
        encoded = None if problems else encode_state(dict(extra))
        measures = {} if problems else {name: float(value) for name, value in metrics.items()}
        self._raise_together(problems, [encoded, encode_state(measures)])
        self._save_pretrained_files()
        number = self._step.num_steps
        progress = TrainingProgress(number, valid=measures)
        self._manager.save(progress, OwnState(group_options(self._state), encoded or None))
        if wait:
            self.wait()
        return self._shown(self._store.step_dir(number))

    def _save_pretrained_files(self) -> None:
        """Once, on rank 0. Training need not end for what only an export will need."""
        if self._step.rank == 0 and not self._has_pretrained_files:
            if failure := save_pretrained_files(self._path, self._step.model, self._tokenizer):
                warnings.warn(failure, stacklevel=3)
            self._has_pretrained_files = True

    def wait(self) -> None:
        """Wait until the last save has been written. Collective. Raises CheckpointError if it could not be."""
        self._manager.wait_for_writer()
        failures = self._step.all_gather_json(self._manager.take_failures())[0]
        if failures:
            error = CheckpointError([Problem(*each) for each in failures], where=WHERE)
            error.exit_code = 1  # the input is as good as it was
            raise error

    def _folder_problems(self) -> list[Problem]:
        """On rank 0: why this training must not save here now."""
        number = self._step.num_steps
        if number == 0:
            return [Problem("save() before the first step", "a step that has been done")]
        if self._step.rank != 0:
            return []
        if self._is_run:
            need = "a separate folder: ff.train would not know how far this loop has come"
            return [Problem(f"{self.folder} is a run of ff.train", need, "another folder; load() reads this one")]
        newest = max(self._store.steps(), default=0)
        if newest > number:
            got = f"{self.folder} has the checkpoint of step {newest}, and this training is at step {number}"
            attempt = "load() before the first step, or another folder"
            return [Problem(got, "a training that went on from it", attempt)]
        return []

    def _raise_together(self, problems: list[Problem], values: Any) -> None:
        """Raise SettingError on every rank if any rank has a problem, or ranks were given different values."""
        views = self._step.all_gather_json([problems, digest_bytes(json.encode(values))])
        distinct = dict.fromkeys(tuple(each) for found, _ in views for each in found)
        if not distinct and (others := [rank for rank, (_, other) in enumerate(views) if other != views[0][1]]):
            got = f"another extra or metrics on rank {', '.join(map(str, others))} than on rank 0"
            distinct[got, TABLE["saved values"].need, TABLE["saved values"].attempt] = None
        if distinct:
            raise SettingError([Problem(*each) for each in distinct], where="save()")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        else:
            self._manager.abort()


class _NoLog:
    """The log of a loop that has none of ours."""

    def write_record(self, record: Mapping[str, Any]) -> None: ...
    def log_message(self, text: str) -> None: ...
    def truncate_log(self, num_bytes: int) -> None: ...
    def sync(self) -> None: ...
    def log_bytes(self) -> int:
        return 0


def _check_arguments(folder: Any, step: Any, feed: Any, keep: Any, tokenizer: Any) -> None:
    """Raise SettingError for arguments of the wrong kind."""
    problems = argument_checks.str_problems("folder", folder, path=True)
    if isinstance(step, torch.optim.Optimizer):
        need = "the step that ff.parallelize has returned"
        attempt = "on rank 0 torch.save of optimizer.state_dict() and of the model's, as with DDP; docs/checkpoints.md"
        problems.append(Problem(f"step = a {type(step).__name__}", need, attempt))
    else:
        attempt = "step = ff.parallelize(model, loss, optimizer)"
        problems += argument_checks.instance_problems("step", step, TrainStep, attempt=attempt)
    attempt = "feed=None, and what your loader needs in extra="
    problems += argument_checks.instance_problems("feed", feed, Feed, optional=True, attempt=attempt)
    problems += argument_checks.int_problems("keep", keep, minimum=1, attempt=f"keep={DEFAULT_KEPT}")
    problems += argument_checks.tokenizer_problems("tokenizer", tokenizer)
    if problems:
        raise SettingError(problems, where=WHERE)


def _path_problems(folder: str | os.PathLike[str]) -> list[Problem]:
    path = Path(folder)
    if path.is_dir() or not os.path.lexists(path):
        return []
    return [Problem(f"{path} is not a folder", "a folder, or a path where there is nothing yet", f"{path}-checkpoints")]


def _value_problems(extra: Any, metrics: Any) -> list[Problem]:
    """What cannot be saved of the values that are given to `save`."""
    problems = []
    if isinstance(extra, Mapping):
        problems += state_problems(dict(extra), "extra")
        odd = [key for key in extra if not isinstance(key, str)]
        problems += [Problem(f"the key {key!r} of extra", "names: texts") for key in odd]
    else:
        problems.append(Problem(argument_checks.format_argument("extra", extra), "a dict"))
    if not isinstance(metrics, Mapping):
        return [*problems, Problem(argument_checks.format_argument("metrics", metrics), "a dict of numbers by name")]
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            got = argument_checks.format_argument(f"metrics[{name!r}]", value)
            problems.append(Problem(got, "a number by name", "value.item()" if hasattr(value, "item") else ""))
    return problems
