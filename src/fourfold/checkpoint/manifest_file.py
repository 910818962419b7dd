"""Manifest files: manifest.json, and what it says of the files beside it."""

import errno
import re
from collections.abc import Mapping
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
