"""Restore: a checkpoint's state, put back into a run."""

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
from fourfold.plan.checkpoint_boxes import Box
from fourfold.plan.checkpoint_manifest import Manifest
from fourfold.plan.rng import generator_seed, rng_state_to_restore
from fourfold.step.build import TrainStep
from fourfold.step.state_validation import optimizer_problems
from fourfold.step.weights import trainable_parameters
from fourfold.words.errors import CheckpointError, Problem


def restore(trained: TrainingState, reader: CheckpointReader, *, seed: int) -> None:
    """Everything a checkpoint holds. Collective. Raises CheckpointError, having changed nothing, where it does not fit.

    On a data axis of another size than it was saved with, random numbers start anew, from the seed, the step and the
    data index. On another number of ranks, optimizer states of local steps start from their mean.
    """
    step, manifest = trained.step, reader.manifest
    problems = list(_restore_problems(trained, manifest))
    if problems:
        raise CheckpointError(problems, where=f"the checkpoint of step {manifest.step}")
    names = [*manifest.tensors, *manifest.aliases]
    state = {
        "model": {n.removeprefix("model."): reader.read_tensor(n) for n in names if n.startswith("model.")},
        "optimizer": {name: dict(values) for name, values in manifest.scalars.items()},
        # The task's own: what it says now is what it trains with, as all other code of it.
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in step.optimizer.param_groups],
        "record": msgspec.structs.asdict(manifest.record),
    }
    state["outer"] = {n.removeprefix("outer."): reader.read_tensor(n) for n in names if n.startswith("outer.")}
    for name, key in _state_names(manifest, "optimizer."):
        state["optimizer"].setdefault(name, {})[key] = reader.read_tensor(f"optimizer.{name}.{key}")
    for name, key in _state_names(manifest, "worker."):
        state["optimizer"].setdefault(name, {})[key] = _local_sgd_state(step, reader, name, key)
    for name, parameter in step.model.named_parameters():
        if parameter.requires_grad:
            state["optimizer"].setdefault(name, {})
    step.load_state_dict(state)
    for name in step.codec_state.tensors:
        step.codec_state.load_parameter(name, _saved_codec_rows(reader, name))
    step.num_steps = manifest.step
    if trained.ema is not None:
        averages = trained.ema.values.items()
        trained.ema.load({n: _local_shard(step, n, reader.read_tensor(f"ema.{n}"), like=v) for n, v in averages})
    fed = manifest.feed
    trained.feed.load_state(Position(fed.seed, fed.epoch, fed.position, fed.num_samples))
    _restore_rng(step, manifest, seed=seed)


def _local_shard(step: TrainStep, name: str, whole: Tensor, *, like: Tensor) -> Tensor:
    """What this rank has of a parameter's average."""
    return whole if like.shape == whole.shape else whole.reshape(-1)[slice(*step.shard_ranges[name])]


def _saved_codec_rows(reader: CheckpointReader, name: str) -> dict[str, Tensor]:
    """What the codecs of all ranks remembered of a parameter: [ranks, elements] by key."""
    titles = [title for title in reader.manifest.tensors if title.rpartition(".")[0] == f"codec.{name}"]
    ranks = len(reader.manifest.random)
    return {title.rpartition(".")[2]: reader.read_tensor(title).view(ranks, -1) for title in titles}


def _local_sgd_state(step: TrainStep, reader: CheckpointReader, name: str, key: str) -> Tensor:
    """A rank's own state of a parameter; or the mean of all, where there are no such ranks."""
    title = f"worker.{name}.{key}"
    (total,) = reader.manifest.tensors[title].shape
    length = dict(step.model.named_parameters())[name].numel()
    if step.plan.sync == "local" and total == step.plan.mesh.size * length:
        return reader.read_tensor(title, Box((step.rank * length,), (length,)))
    rows = reader.read_tensor(title).view(-1, length)
    return rows.mean(0) if rows.is_floating_point() or rows.is_complex() else rows[0].clone()


def _restore_rng(step: TrainStep, manifest: Manifest, *, seed: int) -> None:
    """Restore the state of this rank's generators, or seed those of which no state was saved."""
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


def _rng_problems(manifest: Manifest, device: torch.device) -> Iterator[Problem]:
    """States that this torch's generators do not take. Every rank looks at all of them: all must raise."""
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


def _from_hex(digits: str) -> Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(digits)), dtype=torch.uint8)


def changed_options(manifest: Manifest, now: Sequence[Mapping[str, Any]]) -> list[str]:
    """In which options the optimizer is another than when the checkpoint was saved."""
    found: dict[str, None] = {}
    for saved, options in zip(manifest.groups, now, strict=True):
        for key in saved.keys() & options.keys() - set(IMPLEMENTATION_OPTIONS):
            # Older manifests hold the rate of their step, which a schedule may have changed.
            if saved[key] != options[key] and not (key == "lr" and manifest.optimizer is None):
                found[f"{key} = {options[key]} ({saved[key]} when step {manifest.step} was saved)"] = None
    return sorted(found)


def _state_names(manifest: Manifest, prefix: str) -> Iterator[tuple[str, str]]:
    """Parameters and keys of the optimizer's state."""
    for each in manifest.tensors:
        if each.startswith(prefix):
            name, _, key = each.removeprefix(prefix).rpartition(".")
            yield name, key


def _optimizer_problems(trained: TrainingState, manifest: Manifest) -> Sequence[Problem]:
    """Where the states that were saved are not those that the optimizer goes on from."""
    keys: dict[str, set[str]] = {}
    for title in ("optimizer.", "worker."):
        for parameter, key in _state_names(manifest, title):
            keys.setdefault(parameter, set()).add(key)
    for parameter, values in manifest.scalars.items():
        keys.setdefault(parameter, set()).update(values)
    step = trained.step
    return optimizer_problems(step.optimizer, trainable_parameters(step.model), keys, saved=manifest.optimizer)


def _restore_problems(trained: TrainingState, manifest: Manifest) -> Iterator[Problem]:
    step, feed = trained.step, data_state(trained.feed)
    parameters = {name: tuple(p.shape) for name, p in step.model.named_parameters() if p.requires_grad}
    with untracked_access():  # of weights that rest split there are placeholders, in their shapes
        own = {f"model.{name}": value for name, value in step.model.state_dict(keep_vars=True).items()}
    ours = {name: tuple(value.shape) for name, value in own.items()}
    shapes = {name: entry.shape for name, entry in manifest.tensors.items()}
    shapes |= {alias: shapes[name] for alias, name in manifest.aliases.items()}
    if trained.ema is not None:
        ours |= {f"ema.{name}": parameters[name] for name in trained.ema.values}
    theirs = {name: shape for name, shape in shapes.items() if name.startswith("model.") or name in ours}
    yield from shape_problems(ours, theirs)
    dtypes = {name: entry.dtype for name, entry in manifest.tensors.items()}
    yield from dtype_problems({name: value.dtype for name, value in own.items()}, dtypes)
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
    if not step.codec_state.tensors and any(name.startswith("codec.") for name in shapes):
        got = f"what a codec has not sent yet, and codec = {step.plan.codec!r}, which cannot send it"
        yield Problem(got, "a codec that remembers", "the codec it was saved with, or init= with its weights")
    if len(manifest.groups) != len(step.optimizer.param_groups):
        yield Problem(f"{len(manifest.groups)} groups of options", f"{len(step.optimizer.param_groups)}")
    else:
        yield from _optimizer_problems(trained, manifest)
    yield from _rng_problems(manifest, step.device)
    for word in ("num_samples", "batch_size", "order_version"):
        saved, now = getattr(manifest.feed, word), getattr(feed, word)
        if saved != now:
            yield Problem(f"saved with {word.replace('_', ' ')} {saved}, now {now}", "the same data and batches")
