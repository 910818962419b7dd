"""Manifest files: a checkpoint's manifest.json, and whether the files beside it are those it lists.

damaged     the content of a file is not what was written
unreadable  a file may be good, and cannot be read here: a newer version wrote it, or it may not be opened
Law: nothing that a manifest says is used before its checksum and its bounds have been checked. Torch is not imported.
"""

import errno
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash
from safetensors import SafetensorError, safe_open

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
    """Raises DecodeError, CheckpointError if the checksum differs, UnreadableCheckpointError for a newer version."""
    envelope = from_json(content, _Envelope)
    body = bytes(envelope.manifest)
    if xxhash.xxh3_128_hexdigest(body) != envelope.xxh3_128:
        raise CheckpointError(Problem(f"{path}: checksum mismatch", "the file as it was written"))
    version = from_json(body, _ManifestVersion).version
    if version > MANIFEST_VERSION:
        got = f"{path}: version {version}, of a newer fourfold"
        raise UnreadableCheckpointError(
            Problem(got, f"at most version {MANIFEST_VERSION}", "the version of fourfold that wrote it")
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
