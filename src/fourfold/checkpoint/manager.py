"""Checkpoint manager: saves a run while it trains, and restores its newest good checkpoint.

snapshot  a copy of this rank's part of the state; training stands still only while it is taken (`pause_seconds`)
writer    a thread that writes the snapshot: see `fourfold.checkpoint.writer`
Law: a save asks no other rank for anything; a resume restores the same checkpoint on all ranks. All ranks find the
newest good one together, each file read by one rank; a search changes nothing.
"""

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fourfold.checkpoint.collect import (
    TrainingState,
    collect_state,
    data_state,
    first_step_record,
    group_options,
    rng_state,
)
from fourfold.checkpoint.restore import CheckpointReader, changed_options, restore
from fourfold.checkpoint.store import CheckpointStore, Retention, verify_checkpoint
from fourfold.checkpoint.writer import (
    CheckpointWriter,
    RankReport,
    SaveRequest,
    Snapshot,
    WrittenCheckpoint,
    estimated_bytes,
)
from fourfold.environment.known_waits import waiting_for
from fourfold.plan.checkpoint_boxes import shard_file_name
from fourfold.plan.checkpoint_manifest import MANIFEST_VERSION, Manifest, TensorKind, written_measures
from fourfold.plan.damaged_samples import DamagedRecord
from fourfold.step.train_step import TrainStep
from fourfold.words.errors import Problem, UnreadableCheckpointError

# ---- the manager -----------------------------------------------------------------------------------------------------


WEIGHTS_DIR = "weights"  # in a run's folder: a checkpoint of the weights alone, where the disk had no room for more


class CheckpointLog(Protocol):
    """The log of the run; on ranks other than 0 it does nothing."""

    def write_record(self, record: Mapping[str, Any]) -> None: ...
    def log_message(self, text: str) -> None: ...
    def log_bytes(self) -> int: ...
    def truncate_log(self, num_bytes: int) -> None: ...
    def sync(self) -> None: ...


class AttemptDir(NamedTuple):
    """The run's folder, and a random word in the names of this attempt's unfinished checkpoints.

    A killed attempt may leave some of its own there.
    """

    run_dir: Path
    token: str


class TrainingProgress(NamedTuple):
    """How far a run has come: its last step, the losses of the last steps, the validation of this step.

    best       the best value so far of the measure that the best checkpoint is chosen by
    callbacks  the states of the callbacks at this step, on rank 0
    stopped    why the run ends after this step, if a callback asked for it; the same on every rank
    damaged    the samples that the run has left out because they cannot be read; the same on every rank
    """

    step: int = 0
    losses: Sequence[float] = ()
    valid: Mapping[str, float] = {}
    best: float | None = None
    callbacks: Mapping[str, dict[str, Any]] = {}
    stopped: str | None = None
    damaged: tuple[DamagedRecord, ...] = ()


class OwnState(NamedTuple):
    """What a loop of its own saves in its own way: the optimizer's options by group, and JSON values."""

    groups: tuple[dict[str, Any], ...]
    extra: Any = None


class CheckpointManager:
    """One rank's part in the checkpoints of a run. `save` and `resume` are collective."""

    def __init__(
        self,
        training_state: TrainingState,
        attempt_dir: AttemptDir,
        log: CheckpointLog,
        *,
        seed: int,
        retention: Retention = Retention(),  # noqa: B008 (a constant)
    ) -> None:
        """Raises CheckpointError for state that cannot be saved: now, not at the first save."""
        self._group_options = group_options(training_state)
        collect_state(training_state)
        self._training_state, self._attempt_dir, self._log = training_state, attempt_dir, log
        self._seed, self._retention = seed, retention
        self._rank, self._size = training_state.step.rank, training_state.step.plan.mesh.size
        self._store = CheckpointStore(attempt_dir.run_dir)
        self._snapshot: Snapshot | None = None
        self._request: SaveRequest | None = None
        """The last save."""
        self._num_attempts = 0
        self._writer = CheckpointWriter(training_state.step, self._store, log, retention)
        self.saved_step: int | None = None

    # ---- resuming

    def resume(self) -> TrainingProgress | None:
        """Restore the newest good checkpoint; None if there is none. Collective.

        Sets damaged checkpoints aside. Raises UnreadableCheckpointError if the newest may be good and cannot be read.
        """
        if self._rank == 0:
            self._store.remove_partial()
        with waiting_for("the newest checkpoint to be checked"):
            found = find_newest_good(self._training_state.step, self._store)
        if self._rank == 0:
            for step in found.damaged:
                self._store.quarantine(step)
        progress = None if found.folder is None else self._restore(found.folder)
        if progress is None:
            self._log.truncate_log(0)
        for step, problems in found.damaged.items():
            self._log.log_message(f"warning: a damaged checkpoint was set aside: {short_text(problems)}")
            self._log.write_record({"checkpoint": self._store.step_dir(step).name, "damaged": problems})
        return progress

    def _restore(self, folder: Path) -> TrainingProgress:
        with waiting_for(f"{folder} to be read"), CheckpointReader(folder) as reader:
            restore(self._training_state, reader, seed=self._seed)
            manifest = reader.manifest
        self._log.truncate_log(manifest.metrics_bytes)
        if changed := changed_options(manifest, self._group_options):
            self._log.log_message(f"the task's optimizer has {', '.join(changed)}: the run continues with it")
            self._log.write_record({"step": manifest.step, "options": changed})
        self._log_ignored_arguments(manifest)
        self.saved_step = manifest.step
        losses = [float("nan") if loss is None else loss for loss in manifest.losses]
        valid = manifest.measures
        best, damaged = self._best(manifest), manifest.damaged
        return TrainingProgress(manifest.step, losses, valid, best, manifest.callbacks, damaged=damaged)

    def _best(self, manifest: Manifest) -> float | None:
        """The best value so far. Collective if the run now chooses by another measure than before."""
        _, _, metric, mode = self._retention
        if (manifest.best_metric, manifest.best_mode) == (metric, mode):
            return manifest.best
        best = self._store.best_value(self._retention) if self._rank == 0 else None
        return self._training_state.step.all_gather_json(best)[0]

    def _log_ignored_arguments(self, manifest: Manifest) -> None:
        """Log what has changed in the arguments of the task's scheduler: they are part of its saved state."""
        scheduler, saved = self._training_state.scheduler, manifest.scheduler
        if scheduler is None or saved is None:
            return
        changed = scheduler.changed_arguments(saved)
        if changed:
            text = f"the task's {scheduler.name} has {', '.join(changed)}: the run continues with the saved scheduler"
            self._log.log_message(f"warning: {text}")
            self._log.write_record({"step": manifest.step, "warning": text})

    # ---- saving

    def save(self, progress: TrainingProgress, own: OwnState | None = None) -> None:
        """Take a snapshot and start writing it. Returns when training may go on. Collective."""
        begin = time.perf_counter()
        self.wait()
        state = collect_state(self._training_state)
        held = [each.held for each in state.live_tensors]
        if self._snapshot is None or held != self._snapshot.held:  # the first save, or a parameter's first use
            self._snapshot = None  # frees its memory first
            self._snapshot = Snapshot(held, shard_file_name(self._rank))
        self._snapshot.capture(state.live_tensors)
        random = rng_state(self._training_state.step)
        pause = time.perf_counter() - begin
        name = self._store.step_dir(progress.step).name
        self._log.write_record({"step": progress.step, "checkpoint": name, "pause_seconds": pause})
        self.saved_step = progress.step
        self._request = SaveRequest(
            self._new_staging_dir(self._store, progress.step),
            self._snapshot,
            RankReport(self._snapshot.entries, state.aliases, state.scalars, random),
            self._manifest(progress, own or OwnState(self._group_options)) if self._rank == 0 else None,
        )
        self._writer.start(self._request)

    @property
    def last_reason(self) -> str:
        """Why the last write failed; on rank 0."""
        return self._writer.last_reason

    @property
    def num_bytes(self) -> int:
        """Of the last save: what all ranks hold."""
        return 0 if self._request is None else estimated_bytes(self._request.snapshot.held)

    def is_saved(self, step: int) -> bool:
        """Whether the checkpoint of the last save, of this step, is on the disk; or there was nothing to save."""
        return self._request is None or self.newest_step() == step

    def save_again(self) -> None:
        """Write the last save again. Collective; it has failed, and no rank writes any more."""
        assert self._request is not None
        assert self.saved_step is not None
        self._remove_failed()
        self._request = self._request._replace(staging_dir=self._new_staging_dir(self._store, self.saved_step))
        self._writer.start(self._request)

    def _remove_failed(self) -> None:
        """Remove what other ranks have written of the last save after rank 0 had removed it."""
        assert self._request is not None
        shutil.rmtree(self._request.staging_dir, ignore_errors=True)

    def _new_staging_dir(self, store: CheckpointStore, step: int) -> Path:
        """A folder for one attempt. In that of another, a rank's marker may be there before its file."""
        self._num_attempts += 1
        return store.staging_dir(step, f"{self._attempt_dir.token}.{self._num_attempts}")

    def save_weights(self, progress: TrainingProgress) -> tuple[Path, str]:
        """Write the weights and their averages into a folder of their own, in place of the last save. Collective.

        Returns the folder, which `fourfold checkpoint export` reads; and on rank 0 why it could not be written, or "".
        """
        self._remove_failed()
        self._snapshot = self._request = None  # frees its memory first
        state = collect_state(self._training_state)
        live = [each for each in state.live_tensors if each.held.tensor.kind in (TensorKind.MODEL, TensorKind.EMA)]
        snapshot = Snapshot([each.held for each in live], shard_file_name(self._rank))
        snapshot.capture(live)
        folder = self._attempt_dir.run_dir / WEIGHTS_DIR
        store = CheckpointStore(folder)
        writer = CheckpointWriter(self._training_state.step, store, self._log, self._retention)
        report = RankReport(snapshot.entries, state.aliases, {}, rng_state(self._training_state.step))
        manifest = self._manifest(progress, OwnState(self._group_options)) if self._rank == 0 else None
        writer.start(SaveRequest(self._new_staging_dir(store, progress.step), snapshot, report, manifest))
        writer.wait()
        return folder, writer.last_reason

    def remove_weights(self, *, keep_whole: bool = False) -> None:
        """Remove what `save_weights` has written; with `keep_whole`, only what is unfinished."""
        store = CheckpointStore(self._attempt_dir.run_dir / WEIGHTS_DIR)
        if keep_whole:
            store.remove_partial()
        else:
            shutil.rmtree(store.path, ignore_errors=True)
        for folder in (store.path, store.path.parent):
            with contextlib.suppress(OSError):  # not there, or not empty
                folder.rmdir()

    def _manifest(self, progress: TrainingProgress, own: OwnState) -> Manifest:
        """The manifest, without what the ranks' markers will report."""
        step, scheduler = self._training_state.step, self._training_state.scheduler
        return Manifest(
            version=MANIFEST_VERSION,
            step=progress.step,
            tensors=(),
            aliases={},
            scalars={},
            groups=own.groups,
            optimizer=type(step.optimizer).__name__,
            record=first_step_record(step),
            feed=data_state(self._training_state.feed),
            random=(),
            metrics_bytes=self._log.log_bytes(),
            losses=tuple(progress.losses),
            valid=written_measures(progress.valid),
            best=progress.best,
            files={},
            mesh=step.plan.mesh,
            scheduler=None if scheduler is None else scheduler.state(),
            extra=own.extra,
            best_metric=self._retention.metric,
            best_mode=self._retention.mode,
            callbacks=dict(progress.callbacks),
            damaged=progress.damaged,
        )

    def take_failures(self) -> list[Problem]:
        """Why checkpoints could not be written, since the last call; on rank 0. Not collective."""
        failures = list(self._writer.failures)
        del self._writer.failures[: len(failures)]
        return failures

    def report_failures(self) -> None:
        """Log the writes that have failed since the last call. Not collective."""
        for problem in self.take_failures():
            self._log.log_message(f"warning: {problem.got}; training continues, and earlier checkpoints are kept")
            self._log.write_record({"warning": problem.got})

    def take_written(self) -> list[WrittenCheckpoint]:
        """The checkpoints that have been written since the last call, on rank 0. Not collective."""
        return [self._writer.written.pop(0) for _ in range(len(self._writer.written))]

    def wait_for_writer(self) -> None:
        """Wait until the writer has finished."""
        self._writer.wait()

    def wait(self) -> None:
        """Wait until the writer has finished, and log what has failed."""
        self.wait_for_writer()
        self.report_failures()

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint."""
        return max(self._store.steps(), default=None)

    def abort(self) -> None:
        """After an error: let the writer finish what it can at once, without waiting for ranks that may be dead."""
        self._writer.abort()


# ---- the newest good checkpoint --------------------------------------------------------------------------------------


MAX_SHOWN_PROBLEMS = 3


class Found(NamedTuple):
    """The newest good checkpoint, if there is one, and what is damaged in newer ones, by step."""

    folder: Path | None
    damaged: dict[int, list[str]]


def find_newest_good(step: TrainStep, store: CheckpointStore) -> Found:
    """Find the newest good checkpoint. Collective.

    Raises UnreadableCheckpointError if the newest may be good and cannot be read.
    """
    damaged: dict[int, list[str]] = {}
    for number in reversed(step.all_gather_json(store.steps() if step.rank == 0 else [])[0]):
        folder = store.step_dir(number)
        results = step.all_gather_json(_verify_files(step, _relative_to_cwd(folder)))
        if unreadable := list(dict.fromkeys(tuple(each) for problems, _ in results for each in problems)):
            # An older checkpoint could be read, but the training since then would be lost without need.
            raise UnreadableCheckpointError([Problem(*each) for each in unreadable], where="the newest checkpoint")
        problems = list(dict.fromkeys(text for _, texts in results for text in texts))
        if not problems:
            return Found(folder, damaged)
        damaged[number] = problems
    return Found(None, damaged)


def short_text(problems: Sequence[str]) -> str:
    """The first of the problems, for a message."""
    return "; ".join(problems[:MAX_SHOWN_PROBLEMS])


def _verify_files(step: TrainStep, folder: Path) -> tuple[list[Problem], list[str]]:
    """Check this rank's part of the files: why some cannot be read here, and what is damaged."""
    try:
        return [], verify_checkpoint(folder, index=step.rank, size=step.plan.mesh.size)
    except UnreadableCheckpointError as error:
        return list(error.problems), []


def _relative_to_cwd(path: Path) -> Path:
    """The path relative to the working directory if it lies below it: messages name it so."""
    try:
        here = Path.cwd()
    except OSError:  # the working directory has been removed
        return path
    return path.relative_to(here) if path.is_relative_to(here) else path
