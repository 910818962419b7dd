"""State: what of a run goes into a checkpoint, and back.

Law: what is put back is what was taken, bit for bit; what does not fit is refused before anything is changed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from fourfold.checkpoint.read import CheckpointReader, dtype_problems, shape_problems
from fourfold.checkpoint.write import SAFETENSORS_DTYPES, LiveTensor, make_live_tensor
from fourfold.feed.feed import Feed, Position
from fourfold.parts.data.param_access import untracked_access
from fourfold.parts.optim.option_text import IMPLEMENTATION_OPTIONS
from fourfold.plan.checkpoint_boxes import Box, GlobalTensor, StoredBox, shard_file_name
from fourfold.plan.checkpoint_manifest import DataState, FirstStepRecord, Manifest, RngState, Scalar
from fourfold.plan.rng import generator_seed, rng_state_to_restore
from fourfold.plan.sample_order import ORDER_VERSION
from fourfold.step.build import TrainStep
from fourfold.step.ema import EMA
from fourfold.step.state_validation import optimizer_problems
from fourfold.step.weights import trainable_parameters
from fourfold.words.errors import CheckpointError, Problem


class TrainingState(NamedTuple):
    """What a run changes as it goes."""

    step: TrainStep
    feed: Feed
    ema: EMA | None = None


class SavedTensors(NamedTuple):
    """The tensors of a run where they lie, the names that are another's, and the optimizer's scalars.

    `shares` has the stretches of those that lie split over the ranks: who has a share is who writes it.
    """

    live_tensors: list[LiveTensor]
    aliases: dict[str, str]
    scalars: dict[str, dict[str, Scalar]]
    stored_boxes: dict[str, tuple[StoredBox, ...]]


def collect_tensors(trained: TrainingState) -> SavedTensors:
    """Every tensor there is to save. Collective. Raises CheckpointError for what cannot be saved."""
    state = trained.step.state_refs()
    found, aliases, owners = [], {}, {}
    parameters = dict(trained.step.model.named_parameters())
    held = {id(p): name for name, p in parameters.items()}
    masters = _MasterWeights(trained.step, state["masters"])
    for name, value in state["model"].items():
        if not isinstance(value, Tensor):
            raise CheckpointError(Problem(f"{name} is a {type(value).__name__}", "tensors in the model's state_dict"))
        owner = owners.setdefault(id(value), name)
        if owner != name:
            aliases[f"model.{name}"] = f"model.{owner}"
            continue
        if held.get(id(value)) in masters.shards:
            found.append(masters.live_tensor(f"model.{name}", held[id(value)], masters.shards[held[id(value)]]))
            continue
        flat = [value.detach().reshape(-1)]
        found.append(make_live_tensor(f"model.{name}", flat, value.shape, whole=id(value) not in held))
    split = trained.step.has_sharded_state
    states = (
        _sharded_states(trained.step, state["optimizer"])
        if split
        else _replicated_states(state["optimizer"], parameters)
    )
    if trained.step.plan.sync == "local":
        states = _local_sgd_states(trained.step, states)
    found += states.live_tensors
    remembered = _codec_tensors(trained.step)
    found += remembered
    found += [make_live_tensor(f"outer.{n}", [v], parameters[n].shape) for n, v in state["outer"].items()]
    if trained.ema is not None:
        averages = trained.ema.values.items()
        found += [masters.live_tensor(f"ema.{n}", n, v) for n, v in averages if n in masters.shards]
        found += [
            make_live_tensor(f"ema.{n}", [v.reshape(-1)], v.shape) for n, v in averages if n not in masters.shards
        ]
    shares = {each.tensor.name: _rank_rows(each.tensor, trained.step) for each in remembered}
    shares |= states.stored_boxes | masters.stored_boxes
    return states._replace(live_tensors=found, aliases=aliases, stored_boxes=shares)


class _MasterWeights:
    """The update's own weights: `flats` has what this rank has of each parameter. Collective to make."""

    def __init__(self, step: TrainStep, flats: Mapping[str, Tensor]) -> None:
        self.shards, self.stored_boxes = flats, dict[str, tuple[StoredBox, ...]]()
        self._step, self._shapes = step, {name: p.shape for name, p in step.model.named_parameters()}
        self._by_rank = []
        if step.has_sharded_state and flats:
            # Of the replicas of a share one is written.
            mine = {} if step.is_secondary_replica else {name: step.shard_ranges[name] for name in flats}
            self._by_rank = step.all_gather_json(mine)

    def live_tensor(self, title: str, name: str, flat: Tensor) -> LiveTensor:
        """A tensor that lies as these weights do."""
        if not self._by_rank:
            return make_live_tensor(title, [flat], self._shapes[name])
        bounds = [(rank, *shares[name]) for rank, shares in enumerate(self._by_rank) if shares]
        self.stored_boxes[title] = tuple(
            StoredBox(shard_file_name(rank), (low,), (high - low,)) for rank, low, high in bounds if low < high
        )
        tensor = GlobalTensor(title, SAFETENSORS_DTYPES[flat.dtype], tuple(self._shapes[name]), is_flat=True)
        return LiveTensor(tensor, [flat], self._step.shard_ranges[name][0])


def _codec_tensors(step: TrainStep) -> list[LiveTensor]:
    """What the codecs remember: a row for each rank, end to end, and each rank's row is its own."""
    found = []
    for name, state in step.codec_state.tensors.items():
        for key, value in state.items():
            total = GlobalTensor(
                f"codec.{name}.{key}", SAFETENSORS_DTYPES[value.dtype], (value.numel() * step.plan.mesh.size,)
            )
            found.append(LiveTensor(total, [value], value.numel() * step.rank))
    return found


def _rank_rows(tensor: GlobalTensor, step: TrainStep) -> tuple[StoredBox, ...]:
    size = step.plan.mesh.size
    (length,) = tensor.shape
    return tuple(StoredBox(shard_file_name(rank), (length // size * rank,), (length // size,)) for rank in range(size))


def _replicated_states(states: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> SavedTensors:
    """The optimizer's state where every rank has all of it."""
    found: list[LiveTensor] = []
    scalars: dict[str, dict[str, Scalar]] = {}
    for name, values in states.items():
        for key, value in values.items():
            if isinstance(value, list):
                found.append(make_live_tensor(f"optimizer.{name}.{key}", value, parameters[name].shape))
            else:
                scalars.setdefault(name, {})[key] = value
    return SavedTensors(found, {}, scalars, {})


def _local_sgd_states(step: TrainStep, own: SavedTensors) -> SavedTensors:
    """The optimizer's states where every rank has all of its own: those of all ranks end to end."""
    found: list[LiveTensor] = []
    shares: dict[str, tuple[StoredBox, ...]] = {}
    size = step.plan.mesh.size
    for tensor, parts, _ in own.live_tensors:
        title, length = f"worker.{tensor.name.removeprefix('optimizer.')}", math.prod(tensor.shape)
        found.append(LiveTensor(GlobalTensor(title, tensor.dtype, (size * length,)), parts, step.rank * length))
        shares[title] = tuple(StoredBox(shard_file_name(rank), (rank * length,), (length,)) for rank in range(size))
    return SavedTensors(found, {}, own.scalars, shares)


class _StateShard(NamedTuple):
    """A rank's share of a parameter's state, and what it tells of it by key."""

    rank: int
    start: int
    stop: int
    values: Mapping[str, Any]


def _sharded_states(step: TrainStep, states: Mapping[str, Any]) -> SavedTensors:
    """The optimizer's state where every rank has a share: tensors of one dim, since a share may end within a row."""
    mine = {
        name: {
            key: {"dtype": SAFETENSORS_DTYPES.get(v[0].dtype)} if isinstance(v, list) else v
            for key, v in values.items()
        }
        for name, values in states.items()
        if values
    }
    rows: list[dict[str, Any]] = step.all_gather_json(
        {name: [*step.shard_ranges[name], told] for name, told in mine.items()}
    )
    found: list[LiveTensor] = []
    shares: dict[str, tuple[StoredBox, ...]] = {}
    scalars: dict[str, dict[str, Scalar]] = {}
    for name, key in dict.fromkeys((name, key) for row in rows for name, (_, _, told) in row.items() for key in told):
        holders = [_StateShard(rank, *row[name]) for rank, row in enumerate(rows) if name in row]
        told = holders[0].values[key]
        if not isinstance(told, dict):
            scalars.setdefault(name, {})[key] = told
            continue
        title = f"optimizer.{name}.{key}"
        num_elements = max(holder.stop for holder in holders)
        parts = states[name].get(key, [])
        held = LiveTensor(GlobalTensor(title, told["dtype"], (num_elements,)), parts, step.shard_ranges[name][0])
        found.append(held)
        shares[title] = tuple(StoredBox(shard_file_name(h.rank), (h.start,), (h.stop - h.start,)) for h in holders)
    return SavedTensors(found, {}, scalars, shares)


def group_options(step: TrainStep) -> tuple[dict[str, Any], ...]:
    """The optimizer's options as JSON has them."""
    return tuple({k: _to_json_value(k, v) for k, v in group.items()} for group in step.state_refs()["groups"])


def _to_json_value(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, np.generic):  # a float64 is a float, too, and no JSON
        return _to_json_value(key, value.item())
    if isinstance(value, tuple | list):
        return [_to_json_value(key, each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(Problem(f"the optimizer's option {key} is a {type(value).__name__}", "numbers and texts"))


def first_step_record(step: TrainStep) -> FirstStepRecord:
    found = step.state_refs()["record"]
    return FirstStepRecord(tuple(found["order"]), found["nominal_count"], found.get("scale"))


def data_state(feed: Feed) -> DataState:
    seed, epoch, position, _ = feed.state
    return DataState(seed, epoch, position, feed.batch_size, feed.num_samples, ORDER_VERSION)


def rng_state(device: torch.device) -> RngState:
    """The state of this rank's generators."""
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RngState(_to_hex(torch.get_rng_state()), "" if there is None else _to_hex(there))


def _to_hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


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
