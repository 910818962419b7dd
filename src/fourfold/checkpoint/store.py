"""Shelf: the checkpoints of one run, as folders.

step-00000100           a checkpoint: complete, since it has got this name by a rename
.part-…                 one being written, or left by a process that was killed
damaged-step-00000100   one that failed its verification, set aside
Law: a checkpoint is taken away only when a newer one is on the disk; the last K and the best stay.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash
from safetensors import SafetensorError, safe_open

from fourfold.plan import checkpoint_manifest
from fourfold.plan.checkpoint_manifest import (
    MANIFEST_FILE,
    MANIFEST_VERSION,
    MAX_MANIFEST_BYTES,
    Manifest,
    StoredTensor,
)
from fourfold.plan.decode import DecodeError, from_json, read_bounded
from fourfold.words.errors import CheckpointError, Problem, UnreadableCheckpointError, os_error_text

CHECKPOINTS_DIR = "checkpoints"
STEP_DIR_NAME = re.compile(r"step-([0-9]{8,})")
CHUNK_BYTES = 4 * 2**20


# What says nothing of a file's content: rights, a limit of the process, a network file system.
ENVIRONMENT_ERRNOS = frozenset((errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE))


class _ManifestVersion(msgspec.Struct, frozen=True):
    """What manifests of all versions have."""

    version: int


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What manifest.json holds: the manifest, and the checksum of its bytes as they stand there."""

    xxh3_128: str
    manifest: msgspec.Raw


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
        fsync_dir(staging_dir)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.step_dir(step), self.path / f".part-replaced-{staging_dir.name.removeprefix('.part-')}")
        os.rename(staging_dir, self.step_dir(step))
        fsync_dir(self.path)

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


def encode_manifest(manifest: Manifest) -> bytes:
    """The text of manifest.json."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body))) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest, bounded and whole. Raises CheckpointError naming the file.

    An UnreadableError where it may be good, and cannot be read here.
    """
    path = folder / MANIFEST_FILE
    try:
        envelope = from_json(read_bounded(path, max_bytes=MAX_MANIFEST_BYTES), _Envelope)
        if xxhash.xxh3_128_hexdigest(bytes(envelope.manifest)) != envelope.xxh3_128:
            raise CheckpointError(Problem(f"{path}: another checksum than its own", "the file as it was written"))
        version = from_json(bytes(envelope.manifest), _ManifestVersion).version
        if version > MANIFEST_VERSION:
            got = f"{path}: version {version}, of a newer fourfold"
            raise UnreadableCheckpointError(
                Problem(got, f"at most version {MANIFEST_VERSION}", "the fourfold that has written it")
            )
        manifest = from_json(bytes(envelope.manifest), Manifest)
    except OSError as error:
        _raise_unreadable(path, error)
        raise CheckpointError(Problem(f"{path}: {(error.strerror or 'unreadable').lower()}", "a manifest")) from None
    except DecodeError as error:
        raise CheckpointError(Problem(f"{path}: {error}", "a manifest")) from None
    found = [Problem(f"{path}: {text}") for text in checkpoint_manifest.manifest_problems(manifest)]
    named = STEP_DIR_NAME.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        found.append(Problem(f"{path}: step {manifest.step}, in the folder of step {int(named[1])}"))
    if found:
        raise CheckpointError(found[:10])
    return manifest


def verify_checkpoint(folder: Path, *, index: int = 0, size: int = 1) -> list[str]:
    """What is wrong with a checkpoint: every `size`-th file from `index` on, by size, checksum and tensors.

    Raises UnreadableError where nobody can tell.
    """
    try:
        manifest = read_manifest(folder)
    except UnreadableCheckpointError:
        raise
    except CheckpointError as error:
        return [problem.got for problem in error.problems]
    files = sorted(manifest.files)[index::size]
    return [text for name in files for text in _file_problems(folder / name, manifest)]


def _file_problems(path: Path, manifest: Manifest) -> list[str]:
    said = manifest.files[path.name]
    try:
        found = path.stat().st_size
        if found != said.num_bytes:
            return [f"{path}: {found} bytes, {said.num_bytes} were written"]
        if file_checksum(path) != said.checksum:
            return [f"{path}: another checksum than when it was written"]
        return [
            f"{path}: {text}"
            for text in _tensor_problems(path, checkpoint_manifest.tensors_in_file(manifest, path.name))
        ]
    except OSError as error:
        _raise_unreadable(path, error)
        return [f"{path}: {(error.strerror or 'unreadable').lower()}"]


def _raise_unreadable(path: Path, error: OSError) -> None:
    """Raise UnreadableError for an error that is not the file's: nothing says that it is damaged."""
    if error.errno in ENVIRONMENT_ERRNOS:
        raise UnreadableCheckpointError(Problem(f"{path}: {os_error_text(error)}", "a file that can be read")) from None


def _tensor_problems(path: Path, expected: Mapping[str, StoredTensor]) -> list[str]:
    """Where the tensors of a safetensors file are not those of the manifest, by its header. Raises OSError."""
    try:
        # "np" imports nothing until a tensor is read: the launcher, which has no torch, comes here too.
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            found = {name: StoredTensor(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        return [str(error)]
    problems = [f"no {name}" for name in expected if name not in found]
    problems += [f"{name}, which the manifest does not have there" for name in found if name not in expected]
    for name, held in expected.items():
        if found.get(name, held) != held:
            problems.append(f"{name} is {_format_tensor(found[name])}, {_format_tensor(held)} in the manifest")
    return problems


def _format_tensor(held: StoredTensor) -> str:
    return f"{held.dtype} {list(held.shape)}"


def file_checksum(path: Path) -> str:
    """The xxh3_128 of a file."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def fsync_dir(path: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
