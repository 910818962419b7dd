"""Checkpoint store: the checkpoints of one run, as folders.

step-00000100           a checkpoint: complete, because it gets this name by a rename
.part-…                 an unfinished one: being written, or left by a killed process
damaged-step-00000100   one that failed its verification, set aside
retention               how many of the newest good ones are kept, and how many of the best
Law: the newest good checkpoint is never removed, and neither is one that may be good and cannot be read here.

damaged     the content of a file is not what was written
unreadable  a file may be good, and cannot be read here: another version wrote it, or it may not be opened
Law: nothing that a manifest says is used before its checksum and its bounds have been checked. Torch is not imported.
"""

import contextlib
import errno
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash
from safetensors import SafetensorError, safe_open

from fourfold.environment.atomic_file import fsync_path
from fourfold.plan.checkpoint_manifest import (
    MANIFEST_FILE,
    MANIFEST_VERSION,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    StoredTensor,
    manifest_problems,
    tensors_by_file,
)
from fourfold.plan.decode import DecodeError, from_json, read_bounded
from fourfold.words.errors import CheckpointError, Problem, UnreadableCheckpointError, os_error_text

# ---- Manifest files: a checkpoint's manifest.json, and whether the files beside it are those it lists ---------------

STEP_DIR_NAME = re.compile(r"step-([0-9]{8,})")
CHUNK_BYTES = 4 * 2**20
MAX_PROBLEMS = 10
# Errors that say nothing about a file's content: permissions, limits of the process, a network file system.
ENVIRONMENT_ERRNOS = frozenset((errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE))


class _ManifestVersion(msgspec.Struct, frozen=True):
    """The field that manifests of all versions have."""

    version: int


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of manifest.json: the manifest, and the checksum of its bytes as they stand there."""

    xxh3_128: str
    manifest: msgspec.Raw


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of manifest.json."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body))) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest, checked. Raises CheckpointError, which names the file, if it is damaged.

    Raises UnreadableCheckpointError if it may be good and cannot be read here.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = _decode_manifest(path, read_bounded(path, max_bytes=MAX_MANIFEST_BYTES))
    except OSError as error:
        _check_readable(path, error)
        raise CheckpointError(Problem(f"{path}: {os_error_text(error)}", "a manifest")) from None
    except DecodeError as error:
        raise CheckpointError(Problem(f"{path}: {error}", "a manifest")) from None
    problems = [Problem(f"{path}: {text}") for text in manifest_problems(manifest)]
    named = STEP_DIR_NAME.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        problems.append(Problem(f"{path}: step {manifest.step}, in the folder of step {int(named[1])}"))
    if problems:
        raise CheckpointError(problems[:MAX_PROBLEMS])
    return manifest


def _decode_manifest(path: Path, content: bytes) -> Manifest:
    """Raises DecodeError, CheckpointError if the checksum differs, UnreadableCheckpointError for another version."""
    envelope = from_json(content, _Envelope)
    body = bytes(envelope.manifest)
    if xxhash.xxh3_128_hexdigest(body) != envelope.xxh3_128:
        raise CheckpointError(Problem(f"{path}: checksum mismatch", "the file as it was written"))
    version = from_json(body, _ManifestVersion).version
    if version != MANIFEST_VERSION:
        got = f"{path}: version {version}, of another fourfold"
        raise UnreadableCheckpointError(
            Problem(got, f"version {MANIFEST_VERSION}", "the version of fourfold that wrote it")
        )
    return from_json(body, Manifest)


def verify_checkpoint(folder: Path, *, index: int = 0, size: int = 1) -> list[str]:
    """What is damaged in a checkpoint: its manifest, and the size, checksum and tensors of its files.

    Checks every `size`-th file from `index` on, so that ranks share the work. Raises UnreadableCheckpointError.
    """
    try:
        manifest = read_manifest(folder)
    except UnreadableCheckpointError:
        raise
    except CheckpointError as error:
        return [problem.got for problem in error.problems]
    tensors = tensors_by_file(manifest)
    files = sorted(manifest.files)[index::size]
    return [text for name in files for text in _file_problems(folder / name, manifest.files[name], tensors[name])]


def _file_problems(path: Path, entry: FileEntry, tensors: Mapping[str, StoredTensor]) -> list[str]:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            return [f"{path}: {num_bytes} bytes, {entry.num_bytes} were written"]
        if file_checksum(path) != entry.checksum:
            return [f"{path}: checksum mismatch"]
        return [f"{path}: {text}" for text in _tensor_problems(path, tensors)]
    except OSError as error:
        _check_readable(path, error)
        return [f"{path}: {os_error_text(error)}"]


def _check_readable(path: Path, error: OSError) -> None:
    """Raise UnreadableCheckpointError if the error does not mean that the file is damaged."""
    if error.errno in ENVIRONMENT_ERRNOS:
        raise UnreadableCheckpointError(Problem(f"{path}: {os_error_text(error)}", "a file that can be read")) from None


def _tensor_problems(path: Path, expected: Mapping[str, StoredTensor]) -> list[str]:
    """Where the header of a safetensors file differs from the manifest. Raises OSError."""
    try:
        # "np" imports nothing until a tensor is read: the launcher, which has no torch, calls this too.
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            stored = {name: StoredTensor(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        return [str(error)]
    problems = [f"no {name}" for name in expected if name not in stored]
    problems += [f"{name}, which the manifest does not have there" for name in stored if name not in expected]
    for name, tensor in expected.items():
        if stored.get(name, tensor) != tensor:
            problems.append(f"{name} is {_format_tensor(stored[name])}, {_format_tensor(tensor)} in the manifest")
    return problems


def _format_tensor(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def file_checksum(path: Path) -> str:
    """The xxh3_128 of a file."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


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
