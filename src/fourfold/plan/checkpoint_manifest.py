"""Checkpoint manifest: a checkpoint's table of contents, and everything in it that is not a tensor.

entry     a tensor or a file, as the manifest lists it
place     the indices of ranks on some axes of the mesh: what belongs to these ranks alone is named by it
problems  reasons not to trust a manifest
Law: no name, size or offset of a manifest is used before it is checked against bounds.
"""

import enum
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fourfold.plan.checkpoint_boxes import ELEMENT_BYTES, FILE_NAME_PATTERN, Part, Shape, is_inside, is_tiling, whole
from fourfold.plan.damaged_samples import DamagedRecord
from fourfold.plan.decode import is_too_deep
from fourfold.plan.lr_schedule import SchedulerState
from fourfold.words.measures import MODES
from fourfold.words.mesh import AXES, Axis, Mesh
from fourfold.words.ranges import Box

MANIFEST_VERSION = 3
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 2**28
MAX_TENSOR_BYTES = 2**46
MAX_DIMS = 16
SCALER_KEYS = frozenset(("value", "good"))  # of the saved state of an fp16 loss scale
_BYTES_IN_HEX = re.compile(r"(?:[0-9a-f]{2})*")


class TensorKind(enum.StrEnum):
    """What a tensor of a checkpoint is."""

    MODEL = "model"
    """A weight, as the update keeps it, or a buffer."""
    OPTIMIZER = "optimizer"
    """A state of the optimizer. With local steps each place has states of its own."""
    EMA = "ema"
    """An average of a weight."""
    OUTER = "outer"
    """The outer momentum of local steps."""
    CODEC = "codec"
    """What a codec remembers at one place."""


class Place(msgspec.Struct, frozen=True, order=True, omit_defaults=True, forbid_unknown_fields=True):
    """The indices of ranks on the axes that matter; 0 on those that do not."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0


def place_of(mesh: Mesh, rank: int, *axes: Axis) -> Place:
    """Where a rank is on some axes."""
    here = mesh.coordinates(rank)
    return Place(**{axis: here[axis] for axis in axes})


class TensorKey(NamedTuple):
    """What identifies a tensor of a checkpoint, whatever the mesh.

    name   of the parameter or buffer
    key    which of the states that the optimizer or a codec has of it
    place  None: it is the same on the whole mesh
    """

    kind: TensorKind
    name: str
    key: str = ""
    place: Place | None = None

    @property
    def label(self) -> str:
        """For messages and for the names in files; it is never parsed."""
        return ".".join((self.kind, self.name, self.key) if self.key else (self.kind, self.name))


class StoredPart(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The file that holds a part of a tensor, and the name it has there.

    box    [offsets, lengths] by dim; None: the whole tensor
    range  [start, stop) of the box's elements, a tensor of one dim in the file; None: all of it, in the box's shape
    """

    file: str
    name: str
    box: Box | None = None
    range: tuple[int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor, in its shape."""
        return self.box is None and self.range is None

    def part_of(self, shape: Shape) -> Part:
        """The part of a tensor of this shape."""
        box = self.box or whole(shape).box
        return Part(box, *(self.range or (0, box.num_elements)))

    def shape_in_file(self, shape: Shape) -> Shape:
        if self.range is None:
            return shape if self.box is None else self.box.lengths
        start, stop = self.range
        return (stop - start,)


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tensor as the whole run sees it, and the parts that are stored of it. See `TensorKey`."""

    kind: TensorKind
    name: str
    dtype: str
    shape: Shape
    parts: tuple[StoredPart, ...]
    key: str = ""
    place: Place | None = None

    @property
    def tensor(self) -> TensorKey:
        return TensorKey(self.kind, self.name, self.key, self.place)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size of a file, and its xxh3_128 checksum in hexadecimal digits."""

    num_bytes: int
    checksum: str


class FirstStepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the first step decided: the launch order, the nominal count, the loss scale, what its checks have shown."""

    order: tuple[int, ...]
    nominal_count: float | None
    """None until a step has had a loss element."""
    scale: dict[str, float] | None = None
    proof: dict[str, Any] | None = None


class DataState(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How far the data had been read, and in which order.

    num_samples    of an epoch; 0 for a stream that does not say
    order          what the order is; `order_version` of what the ids follow from, `order_digest` of what it depends on
    """

    seed: int
    epoch: int
    position: int
    batch_size: int
    num_samples: int
    order: str
    order_version: int
    order_digest: str


class RngState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of torch's generators at a place, in hexadecimal digits; `device` is empty on a CPU."""

    cpu: str
    device: str = ""
    place: Place = Place()


Scalar = float | int | bool | str | None
Scalars = dict[str, dict[str, Scalar]]


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A checkpoint's table of contents, and everything in it that is not a tensor.

    aliases        name of a tied weight -> name of the weight that holds its values
    scalars        of the optimizer's state, by parameter and key
    groups         the optimizer's options by group: as the task gave them, or in a loop of its own as they were then
    optimizer      the name of the optimizer's class
    scheduler      the state of the task's scheduler, if it has one
    feed           None in a loop of its own that reads its data without a feed
    random         states of torch's generators, one for each place that has its own
    metrics_bytes  the length of the log at this step
    losses         of the last steps
    valid          results of an evaluation at this step, if there was one
    best           the best value so far of the measure `best_metric`; `best_mode` says whether that is the least
    mesh           the sizes of the mesh's axes
    extra          what a loop of its own has added, as `json_state` writes it
    callbacks      the states of the run's callbacks, by their names
    damaged        the samples that the run has left out because they cannot be read
    """

    version: int
    step: int
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    scalars: Scalars
    groups: tuple[dict[str, Any], ...]
    record: FirstStepRecord
    feed: DataState | None
    random: tuple[RngState, ...]
    metrics_bytes: int
    losses: tuple[float | None, ...]
    valid: dict[str, float | str]
    best: float | None
    files: dict[str, FileEntry]
    mesh: Mesh
    optimizer: str
    scheduler: SchedulerState | None = None
    extra: Any = None
    best_metric: str = "loss"
    best_mode: str = "min"
    callbacks: dict[str, dict[str, Any]] = {}
    damaged: tuple[DamagedRecord, ...] = ()

    @property
    def measures(self) -> dict[str, float]:
        """The results in `valid` as numbers."""
        return {name: float(value) for name, value in self.valid.items()}


class StoredTensor(NamedTuple):
    """The dtype and shape of a tensor in a file."""

    dtype: str
    shape: Shape


def tensors_by_file(manifest: Manifest) -> dict[str, dict[str, StoredTensor]]:
    """The tensors that each file must hold according to the manifest, by name."""
    result: dict[str, dict[str, StoredTensor]] = {file: {} for file in manifest.files}
    for entry in manifest.tensors:
        for part in entry.parts:
            result[part.file][part.name] = StoredTensor(entry.dtype, part.shape_in_file(entry.shape))
    return result


def manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Every reason not to trust a manifest. All names, sizes and offsets are checked here."""
    if manifest.step < 0 or manifest.metrics_bytes < 0:
        yield f"step {manifest.step}, log position {manifest.metrics_bytes}"
    yield from (f"a file called {name!r}" for name in manifest.files if not FILE_NAME_PATTERN.fullmatch(name))
    yield from (f"{name}: {f.num_bytes} bytes" for name, f in manifest.files.items() if f.num_bytes < 8)
    in_model = {entry.name for entry in manifest.tensors if entry.kind is TensorKind.MODEL}
    yield from (f"{a} is an alias of {b}, which is not there" for a, b in manifest.aliases.items() if b not in in_model)
    data = manifest.feed
    if data is not None and (not 0 <= data.position <= (data.num_samples or data.position) or data.epoch < 0):
        yield f"epoch {data.epoch}, position {data.position} of {data.num_samples} samples"
    yield from _rng_problems(manifest.random, manifest.mesh)
    yield from _value_problems(manifest)
    is_scheduler_too_deep = manifest.scheduler is not None and manifest.scheduler.is_too_deep
    if is_scheduler_too_deep or is_too_deep([*manifest.groups, *manifest.callbacks.values()]):
        yield "options of the optimizer or its scheduler, or states of callbacks, nested too deeply"
    yield from (f"best_mode {mode!r}" for mode in {manifest.best_mode}.difference(MODES))
    yield from _tensor_problems(manifest)


def written_measures(values: Mapping[str, float]) -> dict[str, float | str]:
    """Measures as a manifest has them: those that JSON has no number for, infinities and NaN, as texts."""
    return {name: value if math.isfinite(value) else str(float(value)) for name, value in values.items()}


def _value_problems(manifest: Manifest) -> Iterator[str]:
    """Numbers that a step divides by or counts with, if no step of a training can have produced them."""
    count, scale = manifest.record.nominal_count, manifest.record.scale
    if count is not None and not 0 < count < math.inf:
        yield f"a nominal count of {count}"
    if scale is not None and not (scale.keys() >= SCALER_KEYS and 0 < scale["value"] < math.inf):
        yield f"a scale of the loss of {scale}"
    yield from (
        f"{name} of an evaluation is {value!r}"
        for name, value in manifest.valid.items()
        if isinstance(value, str) and value not in ("inf", "-inf", "nan")
    )
    for name, values in manifest.scalars.items():
        for key, value in values.items():
            if isinstance(value, bool | str) or (value is not None and value < 0):
                yield f"{key} of {name} is {value!r}"


def _rng_problems(states: Sequence[RngState], mesh: Mesh) -> Iterator[str]:
    if not all(state.cpu and _BYTES_IN_HEX.fullmatch(state.cpu + state.device) for state in states):
        yield "a random state that is not written in hexadecimal digits"
    places = {state.place for state in states}
    if len(places) < len(states):
        yield "two random states of one place"
    sizes = " × ".join(f"{axis} {mesh.axis_size(axis)}" for axis in AXES)
    if any(mesh.axis_size(axis) < 1 for axis in AXES):
        yield f"a mesh of {sizes}: every size must be at least 1"
    elif len(states) != mesh.pp * mesh.dp or not all(_is_on(mesh, place) for place in places):
        yield f"{len(states)} random states on a mesh of {sizes}, which has {mesh.pp * mesh.dp} places of their own"


def _is_on(mesh: Mesh, place: Place) -> bool:
    return all(0 <= getattr(place, axis) < mesh.axis_size(axis) for axis in AXES)


def _tensor_problems(manifest: Manifest) -> Iterator[str]:
    num_bytes, names = dict.fromkeys(manifest.files, 0), {file: set[str]() for file in manifest.files}
    tensors: set[TensorKey] = set()
    for entry in manifest.tensors:
        if entry.tensor in tensors:
            yield f"two tensors {entry.tensor.label}"
        tensors.add(entry.tensor)
        problems = [*_key_problems(entry, manifest.mesh), *_entry_problems(entry, manifest.files)]
        yield from (f"{entry.tensor.label}: {text}" for text in problems)
        for part in entry.parts if not problems else ():
            num_bytes[part.file] += math.prod(part.shape_in_file(entry.shape)) * ELEMENT_BYTES[entry.dtype]
            if part.name in names[part.file]:
                yield f"two tensors called {part.name} in {part.file}"
            names[part.file].add(part.name)
    for name, file in manifest.files.items():
        if num_bytes[name] > file.num_bytes:
            yield f"{name}: {num_bytes[name]} bytes of tensors in a file of {file.num_bytes}"


def _key_problems(entry: TensorEntry, mesh: Mesh) -> Iterator[str]:
    has_states = entry.kind in (TensorKind.OPTIMIZER, TensorKind.CODEC)
    if bool(entry.key) != has_states:
        yield f"the key {entry.key!r}"
    if (entry.place is not None and not has_states) or (entry.place is None and entry.kind is TensorKind.CODEC):
        yield f"the place {entry.place}"
    if entry.place is not None and not _is_on(mesh, entry.place):
        yield f"{entry.place}, which the mesh does not have"


def _entry_problems(entry: TensorEntry, files: Mapping[str, FileEntry]) -> Iterator[str]:
    if entry.dtype not in ELEMENT_BYTES:
        yield f"dtype {entry.dtype!r}"
        return
    # Numbers of any length are multiplied only if there are few of them.
    if (
        len(entry.shape) > MAX_DIMS
        or any(n < 0 for n in entry.shape)
        or entry.num_elements * ELEMENT_BYTES[entry.dtype] > MAX_TENSOR_BYTES
    ):
        yield f"shape {entry.shape}"
        return
    for stored in entry.parts:
        if stored.file not in files:
            yield f"in {stored.file!r}, which is not among the files"
            return
        if stored.box is not None and any(len(each) != len(entry.shape) for each in stored.box):
            yield f"a box of other dims than its shape {entry.shape}"
            return
        if stored.is_whole:
            continue
        (offsets, lengths), start, stop = part = stored.part_of(entry.shape)
        if not is_inside(part, entry.shape):
            yield f"offsets {offsets}, lengths {lengths}, elements {start} to {stop} of shape {entry.shape}"
            return
    if len(entry.parts) == 1 and entry.parts[0].is_whole:
        return
    if not is_tiling([stored.part_of(entry.shape) for stored in entry.parts], entry.shape):
        yield "its parts leave a gap, or overlap"
