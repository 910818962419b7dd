"""Collect: the state of a run, as tensors and JSON values that a checkpoint can hold.

title       a tensor's name in a checkpoint: model.NAME, ema.NAME, optimizer.NAME.KEY, worker.NAME.KEY (local steps),
            outer.NAME, codec.NAME.KEY
stored box  which part of a tensor a file holds; each rank writes one file
Law: no tensor is copied here; each describes memory that training goes on to use.
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
from fourfold.step.ema import EMA
from fourfold.step.train_step import TrainStep
from fourfold.words.errors import CheckpointError, Problem

StoredBoxes = dict[str, tuple[StoredBox, ...]]
Scalars = dict[str, dict[str, Scalar]]


class TrainingState(NamedTuple):
    """What a run changes as it trains."""

    step: TrainStep
    feed: Feed
    ema: EMA | None = None


class SavedTensors(NamedTuple):
    """The tensors to save, in the memory that training uses.

    aliases       titles of tensors that are another one's (tied weights)
    scalars       states of the optimizer that are not tensors, by parameter and key
    stored_boxes  by title, for tensors that are sharded: each rank writes its own shard. All ranks hold the other
                  tensors; `assign_shards` divides those.
    """

    live_tensors: list[LiveTensor]
    aliases: dict[str, str]
    scalars: Scalars
    stored_boxes: StoredBoxes


def collect_tensors(training_state: TrainingState) -> SavedTensors:
    """Every tensor to save. Collective. Raises CheckpointError for state that cannot be saved."""
    step, _, ema = training_state
    refs = step.state_refs()
    parameters = dict(step.model.named_parameters())
    masters = _MasterWeights(step, refs["masters"])
    live_tensors, aliases = _model_tensors(refs["model"], parameters, masters)
    states = (
        _sharded_states(step, refs["optimizer"])
        if step.has_sharded_state
        else _replicated_states(refs["optimizer"], parameters)
    )
    if step.plan.sync == "local":
        states = _local_sgd_states(step, states)
    codec_tensors = _codec_tensors(step)
    live_tensors += states.live_tensors + codec_tensors
    live_tensors += [make_live_tensor(f"outer.{n}", [v], parameters[n].shape) for n, v in refs["outer"].items()]
    if ema is not None:
        averages = ema.values.items()
        live_tensors += [masters.live_tensor(f"ema.{n}", n, v) for n, v in averages if n in masters.shards]
        live_tensors += [
            make_live_tensor(f"ema.{n}", [v.reshape(-1)], v.shape) for n, v in averages if n not in masters.shards
        ]
    stored_boxes = {each.tensor.name: _rank_rows(each.tensor, step) for each in codec_tensors}
    stored_boxes |= states.stored_boxes | masters.stored_boxes
    return SavedTensors(live_tensors, aliases, states.scalars, stored_boxes)


def _model_tensors(
    state: Mapping[str, Any], parameters: Mapping[str, Tensor], masters: "_MasterWeights"
) -> tuple[list[LiveTensor], dict[str, str]]:
    """The model's parameters and buffers, and the titles that are aliases. A master weight replaces its parameter."""
    live_tensors: list[LiveTensor] = []
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    parameter_names = {id(p): name for name, p in parameters.items()}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(Problem(f"{name} is a {type(value).__name__}", "tensors in the model's state_dict"))
        first_name = first_names.setdefault(id(value), name)
        parameter_name = parameter_names.get(id(value))
        if first_name != name:
            aliases[f"model.{name}"] = f"model.{first_name}"
        elif parameter_name is not None and parameter_name in masters.shards:
            shard = masters.shards[parameter_name]
            live_tensors.append(masters.live_tensor(f"model.{name}", parameter_name, shard))
        else:
            flat = [value.detach().reshape(-1)]
            is_buffer = parameter_name is None
            live_tensors.append(make_live_tensor(f"model.{name}", flat, value.shape, is_unsharded=is_buffer))
    return live_tensors, aliases


class _MasterWeights:
    """The weights that the update works on; `shards` has this rank's flat shard of each. Collective to make."""

    def __init__(self, step: TrainStep, shards: Mapping[str, Tensor]) -> None:
        self.shards, self.stored_boxes = shards, StoredBoxes()
        self._step, self._shapes = step, {name: p.shape for name, p in step.model.named_parameters()}
        self._ranges_by_rank = []
        if step.has_sharded_state and shards:
            # Only replica 0 reports a shard.
            ranges = {} if step.is_secondary_replica else {name: step.shard_ranges[name] for name in shards}
            self._ranges_by_rank = step.all_gather_json(ranges)

    def live_tensor(self, title: str, name: str, flat: Tensor) -> LiveTensor:
        """A tensor that is sharded as the master weights of parameter `name` are."""
        if not self._ranges_by_rank:
            return make_live_tensor(title, [flat], self._shapes[name])
        bounds = [(rank, *ranges[name]) for rank, ranges in enumerate(self._ranges_by_rank) if ranges]
        self.stored_boxes[title] = tuple(
            StoredBox(shard_file_name(rank), (low,), (high - low,)) for rank, low, high in bounds if low < high
        )
        tensor = GlobalTensor(title, SAFETENSORS_DTYPES[flat.dtype], tuple(self._shapes[name]), is_flat=True)
        return LiveTensor(tensor, [flat], self._step.shard_ranges[name][0])


def _codec_tensors(step: TrainStep) -> list[LiveTensor]:
    """The state of the codecs: one row per rank, end to end. Each rank has its own row."""
    size, rank = step.plan.mesh.size, step.rank
    live_tensors = []
    for name, state in step.codec_state.tensors.items():
        for key, value in state.items():
            count = value.numel()
            tensor = GlobalTensor(f"codec.{name}.{key}", SAFETENSORS_DTYPES[value.dtype], (count * size,))
            live_tensors.append(LiveTensor(tensor, [value], count * rank))
    return live_tensors


def _rank_rows(tensor: GlobalTensor, step: TrainStep) -> tuple[StoredBox, ...]:
    """The stored boxes of a tensor that has one row per rank, end to end."""
    size = step.plan.mesh.size
    (length,) = tensor.shape
    return tuple(StoredBox(shard_file_name(rank), (length // size * rank,), (length // size,)) for rank in range(size))


def _replicated_states(states: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> SavedTensors:
    """The optimizer's state if every rank has all of it."""
    live_tensors: list[LiveTensor] = []
    scalars: Scalars = {}
    for name, values in states.items():
        for key, value in values.items():
            if isinstance(value, list):
                live_tensors.append(make_live_tensor(f"optimizer.{name}.{key}", value, parameters[name].shape))
            else:
                scalars.setdefault(name, {})[key] = value
    return SavedTensors(live_tensors, {}, scalars, {})


def _local_sgd_states(step: TrainStep, states: SavedTensors) -> SavedTensors:
    """The optimizer's state with local steps, where it differs by rank: one row per rank, end to end."""
    live_tensors: list[LiveTensor] = []
    stored_boxes: StoredBoxes = {}
    size = step.plan.mesh.size
    for tensor, segments, _ in states.live_tensors:
        title, length = f"worker.{tensor.name.removeprefix('optimizer.')}", math.prod(tensor.shape)
        all_ranks = GlobalTensor(title, tensor.dtype, (size * length,))
        live_tensors.append(LiveTensor(all_ranks, segments, step.rank * length))
        stored_boxes[title] = _rank_rows(all_ranks, step)
    return SavedTensors(live_tensors, {}, states.scalars, stored_boxes)


class _StateShard(NamedTuple):
    """A rank's shard of a parameter's state: elements [start, stop), and by key {"dtype": …} or a scalar."""

    rank: int
    start: int
    stop: int
    values: Mapping[str, Any]


def _sharded_states(step: TrainStep, states: Mapping[str, Any]) -> SavedTensors:
    """The optimizer's state if every rank has a shard: tensors of one dim, since a shard may end within a row."""
    local_report = {name: [*step.shard_ranges[name], _describe(values)] for name, values in states.items() if values}
    reports: list[dict[str, Any]] = step.all_gather_json(local_report)
    live_tensors: list[LiveTensor] = []
    stored_boxes: StoredBoxes = {}
    scalars: Scalars = {}
    keys = dict.fromkeys((name, key) for report in reports for name, (*_, values) in report.items() for key in values)
    for name, key in keys:
        shards = [_StateShard(rank, *report[name]) for rank, report in enumerate(reports) if name in report]
        value = shards[0].values[key]
        if not isinstance(value, dict):
            scalars.setdefault(name, {})[key] = value
            continue
        title = f"optimizer.{name}.{key}"
        tensor = GlobalTensor(title, value["dtype"], (max(shard.stop for shard in shards),))
        live_tensors.append(LiveTensor(tensor, states[name].get(key, []), step.shard_ranges[name][0]))
        stored_boxes[title] = tuple(
            StoredBox(shard_file_name(shard.rank), (shard.start,), (shard.stop - shard.start,)) for shard in shards
        )
    return SavedTensors(live_tensors, {}, scalars, stored_boxes)


def _describe(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state as JSON: the dtype of tensors, and scalars as they are."""
    return {
        key: {"dtype": SAFETENSORS_DTYPES.get(value[0].dtype)} if isinstance(value, list) else value
        for key, value in values.items()
    }


def group_options(step: TrainStep) -> tuple[dict[str, Any], ...]:
    """The optimizer's options by group, as JSON values. Raises CheckpointError."""
    return tuple({k: _to_json_value(k, v) for k, v in group.items()} for group in step.state_refs()["groups"])


def _to_json_value(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, np.generic):  # np.float64 is a float too, but JSON cannot hold it
        return _to_json_value(key, value.item())
    if isinstance(value, tuple | list):
        return [_to_json_value(key, each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(Problem(f"the optimizer's option {key} is a {type(value).__name__}", "numbers and texts"))


def first_step_record(step: TrainStep) -> FirstStepRecord:
    """What the first step determined: see `FirstStepRecord`."""
    record = step.state_refs()["record"]
    return FirstStepRecord(tuple(record["order"]), record["nominal_count"], record.get("scale"))


def data_state(feed: Feed) -> DataState:
    """Where the feed is in its data."""
    seed, epoch, position, _ = feed.state
    return DataState(seed, epoch, position, feed.batch_size, feed.num_samples, ORDER_VERSION)


def rng_state(device: torch.device) -> RngState:
    """The state of this rank's torch generators."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RngState(_to_hex(torch.get_rng_state()), "" if on_device is None else _to_hex(on_device))


def _to_hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()
