"""Keeper: saves a run beside its training, and finds where it goes on.

pause   the time training stands still for a save: waiting for the one before, and the copy into the snapshot
mark    rank-000.json in the folder being written: this rank's piece is on the disk; rank-000.failed: it is not.
        A rank writes it last.
Law: rank 0 gives a checkpoint its name when every rank's mark is there; until then there is the one before.
"""

import contextlib
import functools
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from fourfold.checkpoint.collect import (
    SavedTensors,
    TrainingState,
    collect_tensors,
    data_state,
    first_step_record,
    group_options,
    rng_state,
)
from fourfold.checkpoint.manifest_file import encode_manifest, verify_checkpoint
from fourfold.checkpoint.markers import DoneMarker, error_text, read_marker, wait_for_marker, write_marker
from fourfold.checkpoint.read import CheckpointReader
from fourfold.checkpoint.restore import changed_options, restore
from fourfold.checkpoint.store import CheckpointStore
from fourfold.checkpoint.write import Snapshot, write_file, write_snapshot
from fourfold.plan.checkpoint_boxes import GlobalTensor, assign_shards, shard_file_name
from fourfold.plan.checkpoint_manifest import MANIFEST_FILE as MANIFEST_NAME
from fourfold.plan.checkpoint_manifest import MANIFEST_VERSION, Manifest, RngState, TensorEntry
from fourfold.words.errors import CheckpointError, Problem, UnreadableCheckpointError
from fourfold.words.units import format_bytes

NUM_KEPT = 2
SPARE_BYTES = 2**20
MARKER_TIMEOUT_SECONDS = 60.0  # for the other ranks' pieces, and besides that the time of a very slow disk:
SLOWEST_BYTES_PER_SECOND = 10e6
POLL_SECONDS = 0.01
ABORT_SECONDS = 5.0


class CheckpointLog(Protocol):
    """Where the keeper writes and speaks; on other ranks than 0 it does nothing."""

    def write_record(self, record: Mapping[str, Any]) -> None: ...
    def log_message(self, text: str) -> None: ...
    def log_bytes(self) -> int: ...
    def truncate_log(self, num_bytes: int) -> None: ...
    def sync(self) -> None: ...


class AttemptDir(NamedTuple):
    """The run's folder, and a word that tells this attempt's files from those of an attempt that was killed."""

    run_dir: Path
    token: str


class TrainingProgress(NamedTuple):
    """How far a run has come."""

    step: int = 0
    losses: Sequence[float] = ()
    valid: Mapping[str, float] = {}
    best: float | None = None


class CheckpointManager:
    """One rank's part in the checkpoints of a run. `save` and `resume` are collective."""

    def __init__(
        self,
        training_state: TrainingState,
        attempt_dir: AttemptDir,
        log: CheckpointLog,
        *,
        seed: int,
        num_kept: int = NUM_KEPT,
    ) -> None:
        self._group_options = group_options(
            training_state.step
        )  # What cannot be saved is told now, not in a hundred steps.
        collect_tensors(training_state)
        self._training_state, self._attempt_dir, self._log, self._seed, self._num_kept = (
            training_state,
            attempt_dir,
            log,
            seed,
            num_kept,
        )
        self._rank, self._size = training_state.step.rank, training_state.step.plan.mesh.size
        self._store = CheckpointStore(attempt_dir.run_dir)
        self._global_tensors: list[GlobalTensor] = []
        self._writer_thread: threading.Thread | None = None
        self._aborted = threading.Event()
        self._failures: list[str] = []
        self.saved_step: int | None = None
        self._start_time = time.perf_counter()

    # ---- going on

    def resume(self) -> TrainingProgress | None:
        """Put the run where its newest good checkpoint is; None where there is none. Collective."""
        exchange = self._training_state.step.all_gather_json
        progress, damaged = None, []
        if self._rank == 0:
            self._store.remove_partial()
        for number in reversed(exchange(self._store.steps() if self._rank == 0 else [])[0]):
            judged = exchange(self._verify_files(_relative_to_cwd(self._store.step_dir(number))))
            if unreadable := list(dict.fromkeys(tuple(each) for texts, _ in judged for each in texts)):
                # An older one would do, but what has been trained since would be lost without need.
                raise UnreadableCheckpointError([Problem(*each) for each in unreadable], where="the newest checkpoint")
            problems = list(dict.fromkeys(text for _, texts in judged for text in texts))
            if not problems:
                progress = self._restore(self._store.step_dir(number))
                break
            damaged.append((number, problems))
            if self._rank == 0:
                self._store.quarantine(number)
        if progress is None:
            self._log.truncate_log(0)
        for number, problems in damaged:
            self._log.log_message(f"warning: a damaged checkpoint was set aside: {'; '.join(problems[:3])}")
            self._log.write_record({"checkpoint": self._store.step_dir(number).name, "damaged": problems})
        self._start_time = time.perf_counter()
        return progress

    def _verify_files(self, folder: Path) -> tuple[list[Problem], list[str]]:
        """Why this rank's share of a checkpoint cannot be read here; and what is damaged of it."""
        try:
            return [], verify_checkpoint(folder, index=self._rank, size=self._size)
        except UnreadableCheckpointError as error:
            return list(error.problems), []

    def _restore(self, folder: Path) -> TrainingProgress:
        with CheckpointReader(folder) as reader:
            restore(self._training_state, reader, seed=self._seed)
            manifest = reader.manifest
        if changed := changed_options(manifest, self._group_options):
            self._log.log_message(f"the task's optimizer has {', '.join(changed)}: the run goes on with it")
            self._log.write_record({"step": manifest.step, "options": changed})
        self._log.truncate_log(manifest.metrics_bytes)
        self.saved_step = manifest.step
        losses = [float("nan") if loss is None else loss for loss in manifest.losses]
        valid = {name: float("nan") if value is None else value for name, value in manifest.valid.items()}
        return TrainingProgress(manifest.step, losses, valid, manifest.best)

    # ---- saving

    def save(self, progress: TrainingProgress) -> None:
        """Take a snapshot and have it written. Returns when training may go on. Collective."""
        begin = time.perf_counter()
        self.wait()
        found = collect_tensors(self._training_state)
        tensors = [each.tensor for each in found.live_tensors]
        if tensors != self._global_tensors:  # the first save, or a state that grew (a parameter's first use)
            whole = [tensor for tensor in tensors if tensor.name not in found.stored_boxes]
            self._global_tensors, self._stored_boxes = tensors, assign_shards(whole, self._size) | found.stored_boxes
            self._snapshot = Snapshot(tensors, self._stored_boxes, shard_file_name(self._rank))
        self._snapshot.capture(found.live_tensors)
        random = rng_state(self._training_state.step.device)
        pause = time.perf_counter() - begin
        name = self._store.step_dir(progress.step).name
        elapsed = time.perf_counter() - self._start_time
        self._log.write_record(
            {"step": progress.step, "checkpoint": name, "pause_seconds": pause, "elapsed_seconds": elapsed}
        )
        manifest = self._manifest(progress, found) if self._rank == 0 else None
        self.saved_step = progress.step
        self._writer_thread = threading.Thread(
            target=self._write_checkpoint,
            args=(progress.step, random, manifest),
            name="fourfold checkpoint",
            daemon=True,
        )
        self._writer_thread.start()

    def _manifest(self, progress: TrainingProgress, found: SavedTensors) -> Manifest:
        step = self._training_state.step
        return Manifest(
            version=MANIFEST_VERSION,
            step=progress.step,
            tensors={
                t.name: TensorEntry(t.dtype, t.shape, self._stored_boxes[t.name], t.is_flat)
                for t in self._global_tensors
            },
            aliases=found.aliases,
            scalars=found.scalars,
            groups=self._group_options,
            optimizer=type(step.optimizer).__name__,
            record=first_step_record(step),
            feed=data_state(self._training_state.feed),
            random=(),
            metrics_bytes=self._log.log_bytes(),
            losses=tuple(progress.losses),
            valid=dict(progress.valid),
            best=progress.best,
            files={},
            mesh=step.plan.mesh,
        )

    def report_failures(self) -> None:
        """Say what went wrong in writing, since this was last asked. Not collective."""
        while self._failures:
            text = self._failures.pop(0)
            self._log.log_message(f"warning: {text}; training goes on, the checkpoints before are kept")
            self._log.write_record({"warning": text})

    def wait(self) -> None:
        """Until nothing is being written any more."""
        if self._writer_thread is not None:
            self._writer_thread.join()
            self._writer_thread = None
        self.report_failures()

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint that has its name."""
        return max(self._store.steps(), default=None)

    def abort(self) -> None:
        """After an error: finish what can be finished at once, without waiting for ranks that may be dead."""
        self._aborted.set()
        if self._writer_thread is not None:
            self._writer_thread.join(ABORT_SECONDS)

    # ---- in the writer's thread

    def _missing_reason(self, part: Path, rank: int) -> str:
        """Why a rank's piece will not come, "" where it may."""
        mine = part / f"rank-{self._rank:03d}"
        if not any(mine.with_suffix(suffix).exists() for suffix in (".json", ".failed")):
            return "its folder was removed while it was written"  # and with it the marks of others
        if self._training_state.step.peer_is_dead(rank):
            return f"rank {rank} died before it had written its piece"
        if self._aborted.wait(POLL_SECONDS):
            return f"the run ended before rank {rank} had written its piece"
        return ""

    def _write_checkpoint(self, step: int, random: RngState, manifest: Manifest | None) -> None:
        part = self._store.staging_dir(step, self._attempt_dir.token)
        unmarked = self._write_rank_file(part, random, manifest)
        if manifest is None:
            return
        try:
            if unmarked:
                raise CheckpointError(Problem(f"rank {self._rank}: {unmarked}"))
            self._commit(part, manifest)
        except (OSError, CheckpointError) as error:
            self._failures.append(f"the checkpoint of step {step} could not be written: {error_text(error)}")
            shutil.rmtree(part, ignore_errors=True)

    def _write_rank_file(self, part: Path, random: RngState, manifest: Manifest | None) -> str:
        """This rank's piece and, last of all, its mark: a rank that has marked writes nothing there any more.

        Returns why there is no piece, where not even a mark could say so: a folder that nothing can be written to.
        """
        piece, mark = part / shard_file_name(self._rank), part / f"rank-{self._rank:03d}"
        try:
            if manifest is not None:
                self._log.sync()  # so that a run's folder that was removed is one again, before anything lies in it
            part.mkdir(parents=True, exist_ok=True)
            self._check_disk_space(manifest)
            file = write_snapshot(piece, self._snapshot)
            write_marker(mark, ".json", msgspec.json.encode(DoneMarker(file, random)))
        except OSError as error:
            with contextlib.suppress(OSError):
                piece.unlink(missing_ok=True)
            try:
                write_marker(mark, ".failed", error_text(error).encode())
            except OSError:  # a disk without room even for the reason
                try:
                    mark.with_suffix(".failed").touch()
                except OSError:
                    return error_text(error)
        return ""

    def _check_disk_space(self, manifest: Manifest | None) -> None:
        total = sum(tensor.num_bytes for tensor in self._global_tensors)
        need = (total if manifest is not None else self._snapshot.num_bytes) + SPARE_BYTES
        free = shutil.disk_usage(self._store.path).free
        if free < need:
            raise OSError(f"{format_bytes(free)} free on the disk, {format_bytes(need)} needed")

    def _commit(self, part: Path, manifest: Manifest) -> None:
        """Rank 0: wait for all pieces, write the table of contents, give the folder its name."""
        total = sum(tensor.num_bytes for tensor in self._global_tensors)
        deadline = time.monotonic() + MARKER_TIMEOUT_SECONDS + total / SLOWEST_BYTES_PER_SECOND
        paths = [part / f"rank-{rank:03d}" for rank in range(self._size)]
        # All are waited for before one that failed is told: who may still write must not be swept away under.
        lost = functools.partial(self._missing_reason, part)
        problems = [wait_for_marker(path, rank, lost, deadline) for rank, path in enumerate(paths)]
        if any(problems):
            raise CheckpointError([Problem(text) for text in problems if text])
        marks = [read_marker(path.with_suffix(".json")) for path in paths]
        files = {shard_file_name(rank): mark.file for rank, mark in enumerate(marks)}
        whole = msgspec.structs.replace(manifest, files=files, random=tuple(mark.random for mark in marks))
        for path in paths:
            path.with_suffix(".json").unlink()
        write_file(part / MANIFEST_NAME, [encode_manifest(whole)])
        self._log.sync()
        self._store.commit(part, manifest.step)
        with contextlib.suppress(OSError):  # what cannot be taken away now is there to be taken away at the next save
            self._store.prune(num_kept=self._num_kept)


def _relative_to_cwd(path: Path) -> Path:
    """The path relative to the working directory, where it lies below it: messages name it so."""
    try:
        here = Path.cwd()
    except OSError:  # the working directory has been removed
        return path
    return path.relative_to(here) if path.is_relative_to(here) else path
