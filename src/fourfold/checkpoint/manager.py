"""Checkpoint manager: saves a run while it trains, and restores its newest good checkpoint.

snapshot  a copy of this rank's part of the state; training stands still only while it is taken (`pause_seconds`)
writer    a thread that writes the snapshot into this rank's file, and then the rank's marker
Law: rank 0 gives a checkpoint its name when every rank's done marker is there; until then the one before is the newest.
"""

import contextlib
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
from fourfold.checkpoint.markers import (
    DONE_SUFFIX,
    FAILED_SUFFIX,
    POLL_SECONDS,
    DoneMarker,
    error_text,
    has_marker,
    marker_path,
    read_marker,
    wait_for_marker,
    write_marker,
)
from fourfold.checkpoint.read import CheckpointReader
from fourfold.checkpoint.restore import changed_options, restore
from fourfold.checkpoint.store import CheckpointStore
from fourfold.checkpoint.write import Snapshot, write_file, write_snapshot
from fourfold.plan.checkpoint_boxes import GlobalTensor, assign_shards, shard_file_name
from fourfold.plan.checkpoint_manifest import MANIFEST_FILE, MANIFEST_VERSION, Manifest, RngState, TensorEntry
from fourfold.words.errors import CheckpointError, Problem, UnreadableCheckpointError
from fourfold.words.units import format_bytes

NUM_KEPT = 2
SPARE_BYTES = 2**20
# How long rank 0 waits for the other ranks' markers: this, and the time that a very slow disk takes for all bytes.
MARKER_TIMEOUT_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 10e6
ABORT_SECONDS = 5.0
MAX_SHOWN_PROBLEMS = 3


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
    """How far a run has come: its last step, the losses of the last steps, the validation of this step."""

    step: int = 0
    losses: Sequence[float] = ()
    valid: Mapping[str, float] = {}
    best: float | None = None
    """The least validation loss so far."""


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
        """Raises CheckpointError for state that cannot be saved: now, not at the first save."""
        self._group_options = group_options(training_state.step)
        collect_tensors(training_state)
        self._training_state, self._attempt_dir, self._log = training_state, attempt_dir, log
        self._seed, self._num_kept = seed, num_kept
        self._rank, self._size = training_state.step.rank, training_state.step.plan.mesh.size
        self._store = CheckpointStore(attempt_dir.run_dir)
        self._global_tensors: list[GlobalTensor] = []
        self._writer_thread: threading.Thread | None = None
        self._aborted = threading.Event()
        self._failures: list[str] = []
        self.saved_step: int | None = None
        self._start_time = time.perf_counter()

    # ---- resuming

    def resume(self) -> TrainingProgress | None:
        """Restore the newest good checkpoint; None if there is none. Collective.

        Sets damaged checkpoints aside. Raises UnreadableCheckpointError if the newest may be good and cannot be read.
        """
        all_gather = self._training_state.step.all_gather_json
        progress, damaged = None, []
        if self._rank == 0:
            self._store.remove_partial()
        for step in reversed(all_gather(self._store.steps() if self._rank == 0 else [])[0]):
            folder = self._store.step_dir(step)
            results = all_gather(self._verify_files(_relative_to_cwd(folder)))
            if unreadable := list(dict.fromkeys(tuple(each) for problems, _ in results for each in problems)):
                # An older checkpoint could be read, but the training since then would be lost without need.
                raise UnreadableCheckpointError([Problem(*each) for each in unreadable], where="the newest checkpoint")
            problems = list(dict.fromkeys(text for _, texts in results for text in texts))
            if not problems:
                progress = self._restore(folder)
                break
            damaged.append((folder.name, problems))
            if self._rank == 0:
                self._store.quarantine(step)
        if progress is None:
            self._log.truncate_log(0)
        for name, problems in damaged:
            shown = "; ".join(problems[:MAX_SHOWN_PROBLEMS])
            self._log.log_message(f"warning: a damaged checkpoint was set aside: {shown}")
            self._log.write_record({"checkpoint": name, "damaged": problems})
        self._start_time = time.perf_counter()
        return progress

    def _verify_files(self, folder: Path) -> tuple[list[Problem], list[str]]:
        """Check this rank's part of the files: why some cannot be read here, and what is damaged."""
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
        """Take a snapshot and start writing it. Returns when training may go on. Collective."""
        begin = time.perf_counter()
        self.wait()
        saved = collect_tensors(self._training_state)
        tensors = [each.tensor for each in saved.live_tensors]
        if tensors != self._global_tensors:  # the first save, or a state that grew (a parameter's first use)
            replicated = [tensor for tensor in tensors if tensor.name not in saved.stored_boxes]
            self._global_tensors = tensors
            self._stored_boxes = assign_shards(replicated, self._size) | saved.stored_boxes
            self._snapshot = Snapshot(tensors, self._stored_boxes, shard_file_name(self._rank))
        self._snapshot.capture(saved.live_tensors)
        random = rng_state(self._training_state.step.device)
        pause = time.perf_counter() - begin
        name = self._store.step_dir(progress.step).name
        elapsed = time.perf_counter() - self._start_time
        self._log.write_record(
            {"step": progress.step, "checkpoint": name, "pause_seconds": pause, "elapsed_seconds": elapsed}
        )
        manifest = self._manifest(progress, saved) if self._rank == 0 else None
        self.saved_step = progress.step
        self._writer_thread = threading.Thread(
            target=self._write_checkpoint,
            args=(progress.step, random, manifest),
            name="fourfold checkpoint",
            daemon=True,
        )
        self._writer_thread.start()

    def _manifest(self, progress: TrainingProgress, saved: SavedTensors) -> Manifest:
        """The manifest, without what the markers will report: files and generator states."""
        step = self._training_state.step
        return Manifest(
            version=MANIFEST_VERSION,
            step=progress.step,
            tensors={
                t.name: TensorEntry(t.dtype, t.shape, self._stored_boxes[t.name], t.is_flat)
                for t in self._global_tensors
            },
            aliases=saved.aliases,
            scalars=saved.scalars,
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
        """Log the writes that have failed since the last call. Not collective."""
        while self._failures:
            text = self._failures.pop(0)
            self._log.log_message(f"warning: {text}; training goes on, the checkpoints before are kept")
            self._log.write_record({"warning": text})

    def wait(self) -> None:
        """Wait until the writer has finished."""
        if self._writer_thread is not None:
            self._writer_thread.join()
            self._writer_thread = None
        self.report_failures()

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint."""
        return max(self._store.steps(), default=None)

    def abort(self) -> None:
        """After an error: let the writer finish what it can at once, without waiting for ranks that may be dead."""
        self._aborted.set()
        if self._writer_thread is not None:
            self._writer_thread.join(ABORT_SECONDS)

    # ---- in the writer's thread

    def _write_checkpoint(self, step: int, random: RngState, manifest: Manifest | None) -> None:
        staging_dir = self._store.staging_dir(step, self._attempt_dir.token)
        failure = self._write_rank_file(staging_dir, random, manifest)
        if manifest is None:
            return
        try:
            if failure:
                raise CheckpointError(Problem(f"rank {self._rank}: {failure}"))
            self._commit(staging_dir, manifest)
        except (OSError, CheckpointError) as error:
            self._failures.append(f"the checkpoint of step {step} could not be written: {error_text(error)}")
            shutil.rmtree(staging_dir, ignore_errors=True)

    def _write_rank_file(self, staging_dir: Path, random: RngState, manifest: Manifest | None) -> str:
        """Write this rank's file, then its marker. Returns why there is no file, if not even a marker can say so."""
        path, marker = staging_dir / shard_file_name(self._rank), marker_path(staging_dir, self._rank)
        try:
            if manifest is not None:
                self._log.sync()  # makes a run's folder again that was removed, before anything is written there
            staging_dir.mkdir(parents=True, exist_ok=True)
            self._check_disk_space(manifest)
            file = write_snapshot(path, self._snapshot)
            write_marker(marker, DONE_SUFFIX, msgspec.json.encode(DoneMarker(file, random)))
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            try:
                write_marker(marker, FAILED_SUFFIX, error_text(error).encode())
            except OSError:  # a disk without room even for the reason
                try:
                    marker.with_suffix(FAILED_SUFFIX).touch()
                except OSError:
                    return error_text(error)
        return ""

    def _check_disk_space(self, manifest: Manifest | None) -> None:
        """Raise OSError if the disk has no room for this rank's file; rank 0 checks for all files."""
        total = sum(tensor.num_bytes for tensor in self._global_tensors)
        need = (total if manifest is not None else self._snapshot.num_bytes) + SPARE_BYTES
        free = shutil.disk_usage(self._store.path).free
        if free < need:
            raise OSError(f"{format_bytes(free)} free on the disk, {format_bytes(need)} needed")

    def _commit(self, staging_dir: Path, manifest: Manifest) -> None:
        """Rank 0: wait for all markers, write the manifest, give the folder its name."""
        markers = [marker_path(staging_dir, rank) for rank in range(self._size)]
        self._wait_for_markers(staging_dir, markers)
        reports = [read_marker(marker) for marker in markers]
        files = {shard_file_name(rank): report.file for rank, report in enumerate(reports)}
        complete = msgspec.structs.replace(manifest, files=files, random=tuple(report.random for report in reports))
        for marker in markers:
            marker.with_suffix(DONE_SUFFIX).unlink()
        write_file(staging_dir / MANIFEST_FILE, [encode_manifest(complete)])
        self._log.sync()
        self._store.commit(staging_dir, manifest.step)
        with contextlib.suppress(OSError):  # the next save prunes again
            self._store.prune(num_kept=self._num_kept)

    def _wait_for_markers(self, staging_dir: Path, markers: Sequence[Path]) -> None:
        """Raises CheckpointError if a rank's file is missing."""
        total = sum(tensor.num_bytes for tensor in self._global_tensors)
        deadline = time.monotonic() + MARKER_TIMEOUT_SECONDS + total / SLOWEST_BYTES_PER_SECOND

        def missing_reason(rank: int) -> str:
            return self._missing_reason(staging_dir, rank)

        # Wait for every rank before reporting a failure: the folder must not be deleted while a rank writes to it.
        problems = [wait_for_marker(marker, rank, missing_reason, deadline) for rank, marker in enumerate(markers)]
        if any(problems):
            raise CheckpointError([Problem(text) for text in problems if text])

    def _missing_reason(self, staging_dir: Path, rank: int) -> str:
        """Why a rank's marker will never come; "" while it may. Waits POLL_SECONDS."""
        if not has_marker(marker_path(staging_dir, self._rank)):
            return "its folder was removed while it was written"  # this rank's own marker has gone with it
        if self._training_state.step.peer_is_dead(rank):
            return f"rank {rank} died before it had written its file"
        if self._aborted.wait(POLL_SECONDS):
            return f"the run ended before rank {rank} had written its file"
        return ""


def _relative_to_cwd(path: Path) -> Path:
    """The path relative to the working directory if it lies below it: messages name it so."""
    try:
        here = Path.cwd()
    except OSError:  # the working directory has been removed
        return path
    return path.relative_to(here) if path.is_relative_to(here) else path
