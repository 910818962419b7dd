"""Restore: the state of a run, from a checkpoint.

Law: what is restored is what was collected, bit for bit. What does not fit is refused before anything is changed.

Law: a part is assembled from all files that hold some of it, so the mesh that reads need not be the one that wrote;
what lies outside of it is not read.
Law: such a file loads with any library, and one from any library loads here if its names, shapes and dtypes fit.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourfold.checkpoint.collect import TrainingState, data_state
from fourfold.checkpoint.store import read_manifest
from fourfold.checkpoint.writer import SAFETENSORS_DTYPES, TORCH_DTYPES, safetensors_header, write_file
from fourfold.comm.codec.protocol import RESIDUAL_KEY
from fourfold.feed.position import ORDER_KEYS, Position, order_problem
from fourfold.model.weights import trainable_parameters
from fourfold.plan.checkpoint_boxes import Block, Overlap, Part, Shape, flattened, overlaps, relative_slices, whole
from fourfold.plan.checkpoint_manifest import DataState, Manifest, Place, StoredPart, TensorEntry, TensorKey, TensorKind
from fourfold.plan.json_state import decode_state
from fourfold.plan.rng import generator_seed, random_place, rng_state_to_restore
from fourfold.step.persistent_state import SavedState, optimizer_problems
from fourfold.step.train_step import TrainStep
from fourfold.torch_kit.generators import generators_of
from fourfold.torch_kit.mixed_precision import accumulation_dtype
from fourfold.torch_kit.option_text import IMPLEMENTATION_OPTIONS
from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.tensor_reader import ParameterState, TensorReader, part_of
from fourfold.words.errors import CheckpointError, Problem
from fourfold.words.ranges import Box

# ---- Read: parts of a checkpoint's tensors, from the files of any mesh ----------------------------------------------


class CheckpointReader(contextlib.ExitStack):
    """A verified checkpoint, open for reading."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.manifest: Manifest = read_manifest(folder)
        self.folder = folder
        self._open_files: dict[str, Any] = {}
        self.entries = {entry.tensor: entry for entry in self.manifest.tensors}
        self.num_bytes = 0
        """How many bytes have been used; the files are mapped, so about as many are read."""

    def without(self, names: Collection[str]) -> Self:
        """The same checkpoint without the tensors of these names, such as those of other stages."""
        if not names:
            return self
        reader, manifest = copy.copy(self), self.manifest
        reader.entries = {key: entry for key, entry in self.entries.items() if key.name not in names}
        reader.manifest = msgspec.structs.replace(
            manifest,
            aliases={name: other for name, other in manifest.aliases.items() if name not in names},
            scalars={name: values for name, values in manifest.scalars.items() if name not in names},
        )
        return reader

    def tensor(self, tensor: TensorKey) -> "StoredTensor":
        """A tensor of the checkpoint; a tied weight under each of its names."""
        if tensor.kind is TensorKind.MODEL:
            tensor = tensor._replace(name=self.manifest.aliases.get(tensor.name, tensor.name))
        return StoredTensor(self, self.entries[tensor])

    def read(self, entry: TensorEntry, wanted: Part) -> Tensor:
        """A part of a tensor, flat. Raises CheckpointError if a file contradicts the manifest.

        It is a copy, or memory of the file that must not be written.
        """
        if len(entry.parts) == 1 and entry.parts[0].is_whole and wanted.num_elements == entry.num_elements:
            found = self._file_tensor(entry, entry.parts[0]).view(-1)  # most tensors, in a tenth of the time
            self.num_bytes += found.numel() * found.element_size()
            return found
        result: Tensor | None = None
        for stored in entry.parts:
            for overlap in _overlaps(stored.part_of(entry.shape), wanted):
                found = _view(self._file_tensor(entry, stored).view(-1), overlap.first, overlap.common)
                self.num_bytes += found.numel() * found.element_size()
                if overlap.common.num_elements == wanted.num_elements:
                    return found.reshape(-1)
                if result is None:
                    result = torch.empty(wanted.num_elements, dtype=found.dtype)
                _view(result, overlap.second, overlap.common).copy_(found)
        return torch.empty(0, dtype=TORCH_DTYPES[entry.dtype]) if result is None else result

    def _file_tensor(self, entry: TensorEntry, stored: StoredPart) -> Tensor:
        """What one file holds of a tensor: mapped memory, which is read from the disk as it is used."""
        path = self.folder / stored.file
        try:
            if stored.file not in self._open_files:
                self._open_files[stored.file] = self.enter_context(safe_open(path, framework="pt"))
            found = self._open_files[stored.file].get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(Problem(f"{path}: {error}", "a safetensors file")) from None
        shape, dtype = stored.shape_in_file(entry.shape), SAFETENSORS_DTYPES.get(found.dtype)
        if tuple(found.shape) != shape or dtype != entry.dtype:
            got = f"{path}: {stored.name} is {dtype} {list(found.shape)}"
            raise CheckpointError(Problem(got, f"{entry.dtype} {list(shape)}, as the manifest says"))
        return found


def _overlaps(stored: Part, wanted: Part) -> Iterator[Overlap]:
    """What a stored part has of a wanted one; ranges of one box overlap in one range."""
    if stored.box == wanted.box:
        return overlaps(flattened(stored), flattened(wanted))
    return overlaps(stored, wanted)


def _view(part: Tensor, block: Block, box: Box) -> Tensor:
    """The elements of a box that lies within a block of a part, which is given flat."""
    elements = part[block.start : block.start + block.box.num_elements]
    return elements.view(block.box.lengths)[relative_slices(box, block.box)]


class StoredTensor:
    """A `TensorReader` of a checkpoint's tensor."""

    def __init__(self, reader: CheckpointReader, entry: TensorEntry) -> None:
        self._reader, self._entry = reader, entry

    @property
    def shape(self) -> Shape:
        return self._entry.shape

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self._entry.dtype]

    def read(self, start: int, stop: int) -> Tensor:
        box = whole(self._entry.shape).box
        return self._reader.read(self._entry, Part(box, start, stop))

    def read_part(self, part: Part, shape: Shape) -> Tensor:
        if shape != self._entry.shape:  # saved flat
            return part_of(self._reader.read(self._entry, whole(self._entry.shape)).view(shape), part)
        return self._reader.read(self._entry, part)

    def read_all(self) -> Tensor:
        """All of it, in its shape."""
        return self._reader.read(self._entry, whole(self._entry.shape)).view(self._entry.shape)


# ---- Weights files: plain safetensors files of a model's weights, under the model's own names -----------------------


def shape_problems(
    model_shapes: Mapping[str, tuple[int, ...]], file_shapes: Mapping[str, tuple[int, ...]]
) -> list[Problem]:
    """Names and shapes in a file that are not the model's."""
    missing = [name for name in model_shapes if name not in file_shapes]
    problems = [Problem(f"no {name}", f"shape {list(model_shapes[name])}") for name in missing]
    problems += [Problem(name, "only what the model has") for name in file_shapes if name not in model_shapes]
    for name, shape in model_shapes.items():
        if file_shapes.get(name, shape) != shape:
            problems.append(Problem(f"{name} of shape {list(file_shapes[name])}", f"shape {list(shape)}"))
    return problems


def dtype_problems(model_dtypes: Mapping[str, torch.dtype], file_dtypes: Mapping[str, str]) -> list[Problem]:
    """Tensors of a file whose values the model's dtype cannot hold, such as complex numbers in real parameters."""
    problems = []
    for name, dtype in model_dtypes.items():
        file_dtype = TORCH_DTYPES.get(file_dtypes.get(name, ""), dtype)
        if not torch.can_cast(file_dtype, dtype):
            got, need = (str(each).removeprefix("torch.") for each in (file_dtype, dtype))
            problems.append(Problem(f"{name} of {got}", f"numbers that fit into {need}"))
    return problems


class ExportedTensor(NamedTuple):
    """A tensor to export, which is read when it is written; `dtype` is that of the model."""

    source: StoredTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """All of it, in its shape."""
        return self.source.read_all().to(self.dtype)


def exported_tensors(
    reader: CheckpointReader, *, ema: bool = False, with_aliases: bool = True
) -> dict[str, ExportedTensor]:
    """A checkpoint's weights and buffers by name; none is read here. Raises CheckpointError.

    ema           the averages, with the model's buffers
    with_aliases  a tied weight has each of its names, else the first
    """
    names = [each.name for each in reader.entries if each.kind is TensorKind.MODEL]
    averaged = {each.name for each in reader.entries if each.kind is TensorKind.EMA}
    if ema and not averaged:
        raise CheckpointError(Problem(f"{reader.folder} has no averages", "a run with ema=…", "without --ema"))
    tensors = {}
    for name in sorted([*names, *reader.manifest.aliases] if with_aliases else names):
        own_name = reader.manifest.aliases.get(name, name)
        kind = TensorKind.EMA if ema and own_name in averaged else TensorKind.MODEL
        dtype = reader.tensor(TensorKey(TensorKind.MODEL, own_name)).dtype
        tensors[name] = ExportedTensor(reader.tensor(TensorKey(kind, own_name)), dtype)
    return tensors


def write_weights(
    path: Path, tensors: Mapping[str, ExportedTensor], *, metadata: Mapping[str, str] | None = None
) -> int:
    """Write a safetensors file, one tensor in memory at a time; returns its size. Raises OSError."""
    # Wide elements first: then each tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        each = tensors[name]
        end = offset + each.num_bytes
        header[name] = {"dtype": SAFETENSORS_DTYPES[each.dtype], "shape": each.shape, "data_offsets": (offset, end)}
        offset = end
    head = safetensors_header(header)
    chunks = itertools.chain([head], (_bytes_of(tensors[name].read()) for name in order))
    return write_file(path, chunks, num_bytes=len(head) + offset).num_bytes


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def restore(
    training_state: TrainingState, reader: CheckpointReader, *, seed: int, restores_options: bool = False
) -> None:
    """Put a checkpoint's state into the run. Collective. Raises CheckpointError, with nothing changed, if it misfits.

    Tensors are read one at a time, and of each what this rank keeps. If dp or pp has another size than when it was
    saved, random numbers start again from the seed, the step and the indices on dp and pp. On another number of ranks,
    optimizer states of local steps start from their mean.

    restores_options  the optimizer's options become those that were saved, as in torch; otherwise training uses those
                      it has now, as it uses all other code of the task
    """
    step, feed, ema, scheduler = training_state
    reader = reader.without(step.pipeline.others)
    manifest = reader.manifest
    problems = list(restore_problems(training_state, reader))
    if step.plan.pp > 1:  # what does not fit may be in one stage
        found = dict.fromkeys(tuple(each) for each in itertools.chain(*step.all_gather_json(problems)))
        problems = [Problem(*each) for each in found]
    if problems:
        raise CheckpointError(problems, where=f"the checkpoint of step {manifest.step}")
    groups = _saved_groups(step, manifest) if restores_options else _own_groups(step)
    step.load_saved_state(_saved_state(step, reader)._replace(groups=groups))
    step.num_steps = manifest.step
    if scheduler is not None and manifest.scheduler is not None:
        scheduler.load(manifest.scheduler)
    if ema is not None:
        for name in ema.values:
            average = reader.tensor(TensorKey(TensorKind.EMA, name))
            local = step.whole_tensors.reader(name, average)
            ema.load_average(name, local.read(*step.weight_layout(name).ranges[name]))
    if feed is not None and (data := manifest.feed) is not None:
        feed.load_state(Position(data.seed, data.epoch, data.position, data.num_samples or None))
    _restore_rng(step, manifest, seed=seed)


def _saved_state(step: TrainStep, reader: CheckpointReader) -> SavedState:
    """The checkpoint's tensors and scalars in the form of `TrainStep.state_dict`; no tensor is read here."""
    manifest = reader.manifest
    names = [*(key.name for key in reader.entries if key.kind is TensorKind.MODEL), *manifest.aliases]
    trainable = trainable_parameters(step.model)
    states: dict[str, dict[str, TensorReader]] = {name: {} for name in trainable}
    for (name, key), tensors in _state_tensors(reader, TensorKind.OPTIMIZER).items():
        states.setdefault(name, {})[key] = _optimizer_state(step, tensors)
    codec: dict[str, dict[str, Sequence[TensorReader]]] = {}
    for (name, key), tensors in _state_tensors(reader, TensorKind.CODEC).items():
        codec.setdefault(name, {})[key] = tensors
    return SavedState(
        model={name: reader.tensor(TensorKey(TensorKind.MODEL, name)) for name in names},
        optimizer={name: ParameterState(own, manifest.scalars.get(name, {})) for name, own in states.items()},
        record=msgspec.to_builtins(manifest.record),
        groups=(),
        outer={key.name: reader.tensor(key) for key in reader.entries if key.kind is TensorKind.OUTER},
        codec=codec,
    )


def _own_groups(step: TrainStep) -> list[dict[str, Any]]:
    """The options that the optimizer has now, by group."""
    return [{k: v for k, v in group.items() if k != "params"} for group in step.optimizer.param_groups]


def _saved_groups(step: TrainStep, manifest: Manifest) -> list[dict[str, Any]]:
    """The options that were saved, by group, in the types that the optimizer has now."""
    groups = []
    for now, saved in zip(_own_groups(step), manifest.groups, strict=True):
        values = {key: decode_state(value) for key, value in saved.items()}
        groups.append({**now, **{key: _in_type_of(now.get(key), value) for key, value in values.items()}})
    return groups


def _in_type_of(now: Any, saved: Any) -> Any:
    if isinstance(now, Tensor):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(now, tuple) else saved


def _state_tensors(reader: CheckpointReader, kind: TensorKind) -> dict[tuple[str, str], list[TensorReader]]:
    """By parameter and key: the states of all places, in the order of ranks; one state if it belongs to no place."""
    found: dict[tuple[str, str], list[TensorKey]] = {}
    for tensor in reader.entries:
        if tensor.kind is kind:
            found.setdefault((tensor.name, tensor.key), []).append(tensor)
    return {
        which: [reader.tensor(tensor) for tensor in sorted(tensors, key=lambda each: each.place or Place())]
        for which, tensors in found.items()
    }


def _optimizer_state(step: TrainStep, tensors: Sequence[TensorReader]) -> TensorReader:
    """This rank's state of a parameter; where other ranks saved states of their own, the mean of these."""
    if len(tensors) == 1:
        return tensors[0]
    peers = step.plan.mesh.peers(step.rank, "dp", "cp")
    if step.plan.sync == "local" and len(tensors) == len(peers):
        return tensors[peers.index(step.rank)]
    return _MeanReader(tensors)


class _MeanReader:
    """The mean of tensors, read one after the other; of integers the first."""

    def __init__(self, tensors: Sequence[TensorReader]) -> None:
        self._tensors = tensors
        self.shape, self.dtype = tensors[0].shape, tensors[0].dtype

    def read(self, start: int, stop: int) -> Tensor:
        return self._mean(each.read(start, stop) for each in self._tensors)

    def read_part(self, part: Part, shape: Shape) -> Tensor:
        return self._mean(each.read_part(part, shape) for each in self._tensors)

    def _mean(self, tensors: Iterator[Tensor]) -> Tensor:
        first = next(tensors)
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return first
        total = first.to(accumulation_dtype(self.dtype), copy=True)
        for each in tensors:
            total += each
        return total.to(self.dtype) / len(self._tensors)


def _restore_rng(step: TrainStep, manifest: Manifest, *, seed: int) -> None:
    """Restore the state of this rank's generators; seed those whose state was not saved."""
    saved = rng_state_to_restore(manifest, step.plan.mesh, step.rank)
    place = random_place(step.plan.mesh, step.rank)
    new_seed = generator_seed(seed, place.dp, stage=place.pp, step=manifest.step)
    if saved is None:
        torch.manual_seed(new_seed)
        return
    for generator, state in zip(generators_of(step.device), (saved.cpu, saved.device), strict=False):
        if state:
            generator.set_state(_from_hex(state))
        else:  # saved on a CPU
            generator.manual_seed(new_seed)


def _from_hex(digits: str) -> Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(digits)), dtype=torch.uint8)


def changed_options(manifest: Manifest, options: Sequence[Mapping[str, Any]]) -> list[str]:
    """The optimizer's options, by group, that have changed since the checkpoint was saved, as texts."""
    texts: dict[str, None] = {}
    scheduled = manifest.scheduler.options if manifest.scheduler is not None else [{}] * len(options)
    for saved, now, of_scheduler in zip(manifest.groups, options, scheduled, strict=True):
        for key in saved.keys() & now.keys() - set(IMPLEMENTATION_OPTIONS) - of_scheduler.keys():
            if saved[key] != now[key]:
                here, there = decode_state(now[key]), decode_state(saved[key])
                texts[f"{key} = {here} ({there} when step {manifest.step} was saved)"] = None
    return sorted(texts)


def restore_problems(training_state: TrainingState, reader: CheckpointReader) -> Iterator[Problem]:
    """Everything in which the checkpoint does not fit the run."""
    step, feed = training_state.step, training_state.feed
    manifest = reader.manifest
    with untracked_access():  # sharded weights have placeholders here, in their shapes
        model_state = step.model.state_dict(keep_vars=True)
    misfits = [*_model_problems(training_state, model_state, reader), *_state_shape_problems(step, reader)]
    yield from misfits
    if not misfits:
        yield from _tied_problems(model_state, reader)
    if not step.codec_state.tensors and any(key.kind is TensorKind.CODEC for key in reader.entries):
        got = f"what a codec has not sent yet, and codec = {step.plan.codec!r}, which cannot send it"
        yield Problem(got, "a codec with error feedback", "the codec it was saved with, or init= with its weights")
    if len(manifest.groups) != len(step.optimizer.param_groups):
        yield Problem(f"{len(manifest.groups)} groups of options", f"{len(step.optimizer.param_groups)}")
    else:
        yield from _optimizer_problems(step, reader)
    yield from _scheduler_problems(training_state, manifest)
    yield from _rng_problems(manifest, step.device)
    yield from _data_problems(manifest.feed, data_state(feed))


def _data_problems(saved_data: DataState | None, data: DataState | None) -> Iterator[Problem]:
    """Why the feed cannot go on where the data had been read to."""
    if data is None:
        return
    if saved_data is None:
        yield Problem("a checkpoint without a place in the data, and a feed", "one saved with a feed", "feed=None")
        return
    for field in ("num_samples", "batch_size"):
        saved, now = getattr(saved_data, field), getattr(data, field)
        if saved != now:
            yield Problem(f"saved with {field.replace('_', ' ')} {saved}, now {now}", "the same data and batches")
    saved_order, order = ({key: getattr(each, key) for key in ORDER_KEYS} for each in (saved_data, data))
    if saved_order != order and saved_data.num_samples == data.num_samples:  # else the order differs for that
        yield order_problem(saved_order, order)


def _scheduler_problems(training_state: TrainingState, manifest: Manifest) -> Iterator[Problem]:
    saved, scheduler = manifest.scheduler, training_state.scheduler
    if scheduler is not None and saved is None:
        yield Problem(f"no state of a scheduler, now a {scheduler.name}", "the scheduler that it was saved with: none")
    elif saved is not None and scheduler is None:
        yield Problem(f"the state of a {saved.name}, now no scheduler", "the scheduler that it was saved with")
    elif saved is not None and scheduler is not None:
        yield from scheduler.problems(saved)


def _model_problems(
    training_state: TrainingState, model_state: Mapping[str, Tensor], reader: CheckpointReader
) -> Iterator[Problem]:
    """Shapes and dtypes of the model, and of the average if there is one, that are not those saved."""
    step, ema = training_state.step, training_state.ema
    own = {TensorKey(TensorKind.MODEL, name): value for name, value in model_state.items()}
    own_shapes = {tensor: step.whole_tensors.shape(tensor.name, value.shape) for tensor, value in own.items()}
    if ema is not None:
        parameter_shapes = _parameter_shapes(step)
        own_shapes |= {TensorKey(TensorKind.EMA, name): parameter_shapes[name] for name in ema.values}
    saved = {tensor: entry for tensor, entry in reader.entries.items() if tensor.kind is TensorKind.MODEL}
    saved |= {tensor: reader.entries[tensor] for tensor in own_shapes if tensor in reader.entries}
    for alias, name in reader.manifest.aliases.items():
        model = TensorKind.MODEL
        saved[TensorKey(model, alias)] = reader.entries[TensorKey(model, name)]
    labelled = {tensor.label: shape for tensor, shape in own_shapes.items()}
    yield from shape_problems(labelled, {tensor.label: entry.shape for tensor, entry in saved.items()})
    own_dtypes = {tensor.label: value.dtype for tensor, value in own.items()}
    yield from dtype_problems(own_dtypes, {tensor.label: entry.dtype for tensor, entry in saved.items()})


def _parameter_shapes(step: TrainStep) -> dict[str, Shape]:
    """Of the trained parameters of the whole model."""
    parameters = step.model.named_parameters()
    return {name: step.whole_tensors.shape(name, p.shape) for name, p in parameters if p.requires_grad}


def _tied_problems(model_state: Mapping[str, Tensor], reader: CheckpointReader) -> Iterator[Problem]:
    """Weights that the model ties, and that were saved with different values."""
    first_names: dict[int, str] = {}
    aliases = reader.manifest.aliases
    for name, value in model_state.items():
        other = first_names.setdefault(id(value), name)
        if aliases.get(name, name) != aliases.get(other, other):
            a, b = (reader.tensor(TensorKey(TensorKind.MODEL, each)).read_all() for each in (name, other))
            if not torch.equal(a, b):
                got = f"{other} and {name} with different values"
                yield Problem(got, "the same values: the model ties them")


def _state_shape_problems(step: TrainStep, reader: CheckpointReader) -> Iterator[Problem]:
    """States whose shapes fit no parameter."""
    parameters = _parameter_shapes(step)
    for tensor, entry in reader.entries.items():
        kind, name, key, _ = tensor
        shape, own = entry.shape, parameters.get(name)
        fits = own is not None and shape in (own, (math.prod(own),))
        if kind is TensorKind.OUTER and shape != own:
            yield Problem(f"an outer momentum of {name}, shape {list(shape)}", "that of a parameter")
        elif kind is TensorKind.OPTIMIZER and not fits:
            yield Problem(f"{key} of {name}, shape {list(shape)}", "the state of a parameter")
        elif kind is TensorKind.CODEC and key == RESIDUAL_KEY and not fits:
            yield Problem(f"a residual of {name}, shape {list(shape)}", "that of a parameter")


def _optimizer_problems(step: TrainStep, reader: CheckpointReader) -> Sequence[Problem]:
    """States that were saved and that the optimizer does not continue from, or the reverse."""
    keys: dict[str, set[str]] = {name: set(values) for name, values in reader.manifest.scalars.items()}
    for tensor in reader.entries:
        if tensor.kind is TensorKind.OPTIMIZER:
            keys.setdefault(tensor.name, set()).add(tensor.key)
    saved = reader.manifest.optimizer
    return optimizer_problems(step.optimizer, trainable_parameters(step.model), keys, saved=saved)


def _rng_problems(manifest: Manifest, device: torch.device) -> Iterator[Problem]:
    """Generator states that this torch does not take. Every rank tries all of them, so that all ranks raise."""
    generators = {"cpu": torch.Generator()}
    if device.type == "cuda":
        generators["device"] = torch.Generator(device)
    for kind, generator in generators.items():
        for digits in {getattr(state, kind) for state in manifest.random} - {""}:
            try:
                generator.set_state(_from_hex(digits))
            except (RuntimeError, TypeError) as error:
                got = f"a random state of {len(digits) // 2} bytes: {str(error).splitlines()[0]}"
                yield Problem(got, "one of this torch's generators", "the version of torch it was saved with")
                break
