"""Restore: the state of a run, from a checkpoint.

Law: what is restored is what was collected, bit for bit. What does not fit is refused before anything is changed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from fourfold.checkpoint.collect import TrainingState, data_state
from fourfold.checkpoint.read import CheckpointReader
from fourfold.checkpoint.weights_file import dtype_problems, shape_problems
from fourfold.feed.feed import Position
from fourfold.parts.data.param_access import untracked_access
from fourfold.parts.optim.option_text import IMPLEMENTATION_OPTIONS
from fourfold.plan.checkpoint_manifest import Manifest
from fourfold.plan.rng import generator_seed, rng_state_to_restore
from fourfold.step.state_validation import optimizer_problems
from fourfold.step.train_step import TrainStep
from fourfold.step.weights import trainable_parameters
from fourfold.words.box import Box
from fourfold.words.errors import CheckpointError, Problem

Shape = tuple[int, ...]


def restore(training_state: TrainingState, reader: CheckpointReader, *, seed: int) -> None:
    """Put a checkpoint's state into the run. Collective. Raises CheckpointError, with nothing changed, if it misfits.

    If the data axis has another size than when it was saved, random numbers start anew from the seed, the step and the
    data index. On another number of ranks, optimizer states of local steps start from their mean.
    """
    step, feed, ema = training_state
    manifest = reader.manifest
    problems = list(_restore_problems(training_state, manifest))
    if problems:
        raise CheckpointError(problems, where=f"the checkpoint of step {manifest.step}")
    step.load_state_dict(_read_state(step, reader))
    for name in step.codec_state.tensors:
        step.codec_state.load_parameter(name, _read_codec_rows(reader, name))
    step.num_steps = manifest.step
    if ema is not None:
        averages = ema.values.items()
        ema.load({n: _local_shard(step, n, reader.read_tensor(f"ema.{n}"), like=v) for n, v in averages})
    data = manifest.feed
    feed.load_state(Position(data.seed, data.epoch, data.position, data.num_samples))
    _restore_rng(step, manifest, seed=seed)


def _read_state(step: TrainStep, reader: CheckpointReader) -> dict[str, Any]:
    """The checkpoint's tensors and scalars in the form of `TrainStep.state_dict`."""
    manifest = reader.manifest
    titles = [*manifest.tensors, *manifest.aliases]
    optimizer: dict[str, dict[str, Any]] = {name: dict(values) for name, values in manifest.scalars.items()}
    for name, key in _state_names(manifest, "optimizer."):
        optimizer.setdefault(name, {})[key] = reader.read_tensor(f"optimizer.{name}.{key}")
    for name, key in _state_names(manifest, "worker."):
        optimizer.setdefault(name, {})[key] = _read_local_sgd_state(step, reader, name, key)
    for name, parameter in step.model.named_parameters():
        if parameter.requires_grad:
            optimizer.setdefault(name, {})
    return {
        "model": {t.removeprefix("model."): reader.read_tensor(t) for t in titles if t.startswith("model.")},
        "optimizer": optimizer,
        # The task's own options: training uses those it has now, as it uses all other code of the task.
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in step.optimizer.param_groups],
        "record": msgspec.structs.asdict(manifest.record),
        "outer": {t.removeprefix("outer."): reader.read_tensor(t) for t in titles if t.startswith("outer.")},
    }


def _local_shard(step: TrainStep, name: str, full: Tensor, *, like: Tensor) -> Tensor:
    """This rank's shard of a parameter's average; all of it if `like` is not sharded."""
    return full if like.shape == full.shape else full.reshape(-1)[slice(*step.shard_ranges[name])]


def _read_codec_rows(reader: CheckpointReader, name: str) -> dict[str, Tensor]:
    """The codec state of a parameter on all ranks that saved it: [ranks, elements] by key."""
    titles = [title for title in reader.manifest.tensors if title.rpartition(".")[0] == f"codec.{name}"]
    num_ranks = len(reader.manifest.random)
    return {title.rpartition(".")[2]: reader.read_tensor(title).view(num_ranks, -1) for title in titles}


def _read_local_sgd_state(step: TrainStep, reader: CheckpointReader, name: str, key: str) -> Tensor:
    """This rank's state of a parameter; on another number of ranks, the mean of all ranks' states."""
    title = f"worker.{name}.{key}"
    (total,) = reader.manifest.tensors[title].shape
    length = dict(step.model.named_parameters())[name].numel()
    if step.plan.sync == "local" and total == step.plan.mesh.size * length:
        return reader.read_tensor(title, Box((step.rank * length,), (length,)))
    rows = reader.read_tensor(title).view(-1, length)
    return rows.mean(0) if rows.is_floating_point() or rows.is_complex() else rows[0].clone()


def _restore_rng(step: TrainStep, manifest: Manifest, *, seed: int) -> None:
    """Restore the state of this rank's generators; seed those whose state was not saved."""
    saved = rng_state_to_restore(manifest, step.plan.mesh, step.rank)
    new_seed = generator_seed(seed, step.dp_index, step=manifest.step)
    if saved is None:
        torch.manual_seed(new_seed)
        return
    torch.set_rng_state(_from_hex(saved.cpu))
    if step.device.type != "cuda":
        return
    if saved.device:
        torch.cuda.set_rng_state(_from_hex(saved.device), step.device)
    else:  # saved on a CPU
        with torch.cuda.device(step.device):
            torch.cuda.manual_seed(new_seed)


def _from_hex(digits: str) -> Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(digits)), dtype=torch.uint8)


def changed_options(manifest: Manifest, options: Sequence[Mapping[str, Any]]) -> list[str]:
    """The optimizer's options, by group, that have changed since the checkpoint was saved, as texts."""
    texts: dict[str, None] = {}
    for saved, now in zip(manifest.groups, options, strict=True):
        for key in saved.keys() & now.keys() - set(IMPLEMENTATION_OPTIONS):
            # Older manifests hold the rate of their step, which a schedule may have changed.
            if saved[key] != now[key] and not (key == "lr" and manifest.optimizer is None):
                texts[f"{key} = {now[key]} ({saved[key]} when step {manifest.step} was saved)"] = None
    return sorted(texts)


def _state_names(manifest: Manifest, prefix: str) -> Iterator[tuple[str, str]]:
    """(parameter, key) of the tensors whose titles begin with `prefix`."""
    for title in manifest.tensors:
        if title.startswith(prefix):
            name, _, key = title.removeprefix(prefix).rpartition(".")
            yield name, key


def _restore_problems(training_state: TrainingState, manifest: Manifest) -> Iterator[Problem]:
    """Everything in which the checkpoint does not fit the run."""
    step, feed, _ = training_state
    shapes = {title: entry.shape for title, entry in manifest.tensors.items()}
    shapes |= {alias: shapes[title] for alias, title in manifest.aliases.items()}
    yield from _model_problems(training_state, manifest, shapes)
    yield from _state_shape_problems(step, manifest, shapes)
    if not step.codec_state.tensors and any(title.startswith("codec.") for title in shapes):
        got = f"what a codec has not sent yet, and codec = {step.plan.codec!r}, which cannot send it"
        yield Problem(got, "a codec with error feedback", "the codec it was saved with, or init= with its weights")
    if len(manifest.groups) != len(step.optimizer.param_groups):
        yield Problem(f"{len(manifest.groups)} groups of options", f"{len(step.optimizer.param_groups)}")
    else:
        yield from _optimizer_problems(step, manifest)
    yield from _rng_problems(manifest, step.device)
    data = data_state(feed)
    for field in ("num_samples", "batch_size", "order_version"):
        saved, now = getattr(manifest.feed, field), getattr(data, field)
        if saved != now:
            yield Problem(f"saved with {field.replace('_', ' ')} {saved}, now {now}", "the same data and batches")


def _model_problems(
    training_state: TrainingState, manifest: Manifest, shapes: Mapping[str, Shape]
) -> Iterator[Problem]:
    """Shapes and dtypes of the model, and of the average if there is one, that are not those saved."""
    step, _, ema = training_state
    with untracked_access():  # sharded weights have placeholders here, in their shapes
        own = {f"model.{name}": value for name, value in step.model.state_dict(keep_vars=True).items()}
    own_shapes = {title: tuple(value.shape) for title, value in own.items()}
    if ema is not None:
        parameter_shapes = _parameter_shapes(step)
        own_shapes |= {f"ema.{name}": parameter_shapes[name] for name in ema.values}
    saved_shapes = {t: shape for t, shape in shapes.items() if t.startswith("model.") or t in own_shapes}
    yield from shape_problems(own_shapes, saved_shapes)
    saved_dtypes = {title: entry.dtype for title, entry in manifest.tensors.items()}
    yield from dtype_problems({title: value.dtype for title, value in own.items()}, saved_dtypes)


def _parameter_shapes(step: TrainStep) -> dict[str, Shape]:
    return {name: tuple(p.shape) for name, p in step.model.named_parameters() if p.requires_grad}


def _state_shape_problems(step: TrainStep, manifest: Manifest, shapes: Mapping[str, Shape]) -> Iterator[Problem]:
    """States of the optimizer whose shapes fit no parameter."""
    parameters = _parameter_shapes(step)
    for title, shape in shapes.items():
        name = title.removeprefix("outer.")
        if name != title and parameters.get(name) != shape:
            yield Problem(f"an outer momentum of {name}, shape {list(shape)}", "that of a parameter")
    for name, key in _state_names(manifest, "worker."):
        shape = shapes[f"worker.{name}.{key}"]
        if name not in parameters or len(shape) != 1 or shape[0] % math.prod(parameters[name]):
            yield Problem(f"{key} of {name} on all ranks, shape {list(shape)}", "the states of a parameter")
    for name, key in _state_names(manifest, "optimizer."):
        shape = shapes[f"optimizer.{name}.{key}"]
        if name not in parameters or shape not in (parameters[name], (math.prod(parameters[name]),)):
            yield Problem(f"{key} of {name}, shape {list(shape)}", "the state of a parameter")


def _optimizer_problems(step: TrainStep, manifest: Manifest) -> Sequence[Problem]:
    """States that were saved and that the optimizer does not continue from, or the reverse."""
    keys: dict[str, set[str]] = {}
    for prefix in ("optimizer.", "worker."):
        for name, key in _state_names(manifest, prefix):
            keys.setdefault(name, set()).add(key)
    for name, values in manifest.scalars.items():
        keys.setdefault(name, set()).update(values)
    return optimizer_problems(step.optimizer, trainable_parameters(step.model), keys, saved=manifest.optimizer)


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
