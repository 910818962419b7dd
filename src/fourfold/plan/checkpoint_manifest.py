"""Checkpoint manifest: a checkpoint's table of contents, and everything in it that is not a tensor.

entry     a tensor or a file, as the manifest lists it
problems  reasons not to trust a manifest
Law: no name, size or offset of a manifest is used before it is checked against bounds.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fourfold.plan.checkpoint_boxes import ELEMENT_BYTES, FILE_NAME_PATTERN, StoredBox, is_inside, is_tiling
from fourfold.plan.decode import is_too_deep
from fourfold.words.mesh import AXES, Mesh

MANIFEST_VERSION = 1
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 2**28
MAX_TENSOR_BYTES = 2**46
MAX_DIMS = 16
SCALER_KEYS = frozenset(("value", "good"))  # of the saved state of an fp16 loss scale
_BYTES_IN_HEX = re.compile(r"(?:[0-9a-f]{2})*")


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A global tensor, and the boxes (`stretches` in JSON) that are stored of it.

    `flat`: the boxes are of the tensor viewed in one dim; `shape` is still its own shape.
    """

    dtype: str
    shape: tuple[int, ...]
    stretches: tuple[StoredBox, ...]
    flat: bool = False

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape that the stored boxes refer to."""
        return (math.prod(self.shape),) if self.flat else self.shape


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size of a file, and its xxh3_128 checksum in hexadecimal digits."""

    num_bytes: int
    checksum: str


class FirstStepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the first step decided: the launch order of reductions and the nominal count of the loss; and the state of
    the loss scale, if there is one.
    """

    order: tuple[int, ...]
    nominal_count: float
    scale: dict[str, float] | None = None


class DataState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far the data had been read, and in which order."""

    seed: int
    epoch: int
    position: int
    batch_size: int
    num_samples: int
    order_version: int


class RngState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of one rank's torch generators, in hexadecimal digits; `device` is empty on a CPU."""

    cpu: str
    device: str = ""


Scalar = float | int | bool | str | None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint's table of contents, and everything in it that is not a tensor.

    tensors        by name: model.NAME, optimizer.NAME.KEY, ema.NAME; for local SGD also worker.NAME.KEY, the optimizer
                   states of all ranks end to end, and outer.NAME, the outer momentum
    aliases        name of a tied weight -> name of the tensor that holds its values
    scalars        of the optimizer's state, by parameter and key
    groups         the optimizer's options by group, as the task gave them
    optimizer      the name of the optimizer's class; older manifests have none
    random         states of torch's generators, by rank
    metrics_bytes  the length of the log at this step
    losses         of the last steps
    valid          results of an evaluation at this step, if there was one; `best` is the least validation loss so far
    mesh           the sizes of the mesh's axes; older manifests have none
    """

    version: int
    step: int
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]
    scalars: dict[str, dict[str, Scalar]]
    groups: tuple[dict[str, Any], ...]
    record: FirstStepRecord
    feed: DataState
    random: tuple[RngState, ...]
    metrics_bytes: int
    losses: tuple[float | None, ...]
    valid: dict[str, float | None]
    best: float | None
    files: dict[str, FileEntry]
    mesh: Mesh | None = None
    optimizer: str | None = None


class StoredTensor(NamedTuple):
    """The dtype and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


def tensors_in_file(manifest: Manifest, file: str) -> dict[str, StoredTensor]:
    """The tensors that a file must hold according to the manifest, by name."""
    return {
        name: StoredTensor(entry.dtype, stored.lengths)
        for name, entry in manifest.tensors.items()
        for stored in entry.stretches
        if stored.file == file
    }


def manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Every reason not to trust a manifest. All names, sizes and offsets are checked here."""
    if manifest.version != MANIFEST_VERSION:
        yield f"version {manifest.version}, this fourfold reads version {MANIFEST_VERSION}"
    if manifest.step < 0 or manifest.metrics_bytes < 0:
        yield f"step {manifest.step}, log position {manifest.metrics_bytes}"
    yield from (f"a file called {name!r}" for name in manifest.files if not FILE_NAME_PATTERN.fullmatch(name))
    yield from (f"{name}: {f.num_bytes} bytes" for name, f in manifest.files.items() if f.num_bytes < 8)
    yield from (f"{a} is an alias of {b}, which is not there" for a, b in manifest.aliases.items()
                if b not in manifest.tensors)  # fmt: skip
    data = manifest.feed
    if not 0 <= data.position <= data.num_samples or data.epoch < 0:
        yield f"epoch {data.epoch}, position {data.position} of {data.num_samples} samples"
    yield from _rng_problems(manifest.random, manifest.mesh)
    yield from _value_problems(manifest)
    if is_too_deep([*manifest.groups]):
        yield "options of the optimizer nested too deeply"
    tensor_bytes: dict[str, int] = dict.fromkeys(manifest.files, 0)
    for name, entry in manifest.tensors.items():
        yield from (f"{name}: {text}" for text in _entry_problems(entry, manifest.files))
        if entry.dtype in ELEMENT_BYTES:
            for stored in entry.stretches:
                num_bytes = math.prod(stored.lengths) * ELEMENT_BYTES[entry.dtype]
                tensor_bytes[stored.file] = tensor_bytes.get(stored.file, 0) + num_bytes
    for name, file in manifest.files.items():
        if tensor_bytes[name] > file.num_bytes:
            yield f"{name}: {tensor_bytes[name]} bytes of tensors in a file of {file.num_bytes}"


def _value_problems(manifest: Manifest) -> Iterator[str]:
    """Numbers that a step divides by or counts with, if no step of a training can have produced them."""
    count, scale = manifest.record.nominal_count, manifest.record.scale
    if not 0 < count < math.inf:
        yield f"a nominal count of {count}"
    if scale is not None and not (scale.keys() >= SCALER_KEYS and 0 < scale["value"] < math.inf):
        yield f"a scale of the loss of {scale}"
    for name, values in manifest.scalars.items():
        for key, value in values.items():
            if isinstance(value, bool | str) or (value is not None and value < 0):
                yield f"{key} of {name} is {value!r}"


def _rng_problems(states: Sequence[RngState], mesh: Mesh | None) -> Iterator[str]:
    if not all(state.cpu and _BYTES_IN_HEX.fullmatch(state.cpu + state.device) for state in states):
        yield "a random state that is not written in hexadecimal digits"
    if mesh is None:
        return
    sizes = " × ".join(f"{axis} {mesh.axis_size(axis)}" for axis in AXES)
    if any(mesh.axis_size(axis) < 1 for axis in AXES):
        yield f"a mesh of {sizes}: every size must be at least 1"
    elif mesh.size != len(states):
        yield f"a mesh of {sizes} is {mesh.size} ranks, and there are random states of {len(states)}"


def _entry_problems(entry: TensorEntry, files: Mapping[str, FileEntry]) -> Iterator[str]:
    if entry.dtype not in ELEMENT_BYTES:
        yield f"dtype {entry.dtype!r}"
        return
    num_bytes = math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype]
    if len(entry.shape) > MAX_DIMS or any(n < 0 for n in entry.shape) or num_bytes > MAX_TENSOR_BYTES:
        yield f"shape {entry.shape}"
        return
    for stored in entry.stretches:
        if stored.file not in files:
            yield f"in {stored.file!r}, which is not among the files"
        if not is_inside(stored.box, entry.dims):
            yield f"offsets {stored.offsets}, lengths {stored.lengths} of shape {entry.shape}"
            return
    if not is_tiling([stored.box for stored in entry.stretches], entry.dims):
        yield "its boxes leave a gap, or overlap"
    if len({stored.file for stored in entry.stretches}) < len(entry.stretches):
        yield "two boxes in one file"
