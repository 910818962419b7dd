"""State: what of a run goes into a checkpoint, and back.

Law: what is put back is what was taken, bit for bit; what does not fit is refused before anything is changed.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold.checkpoint.write import SAFETENSORS_DTYPES, LiveTensor, make_live_tensor
from fourfold.feed.feed import Feed
from fourfold.plan.checkpoint_boxes import GlobalTensor, StoredBox, shard_file_name
from fourfold.plan.checkpoint_manifest import DataState, FirstStepRecord, RngState, Scalar
from fourfold.plan.sample_order import ORDER_VERSION
from fourfold.step.build import TrainStep
from fourfold.step.ema import EMA
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
