"""Collect: the state of a run on one rank, as tensors and JSON values that a checkpoint can hold.

What this rank holds is described by what it is (`TensorKey`) and where it lies in the whole tensor; which of it the
rank writes follows from who else holds the same (`Holders`).
Law: no tensor is copied here; each describes memory that training continues to use. No rank asks another.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold.checkpoint.writer import Holders, LiveTensor, make_live_parts, make_live_tensor
from fourfold.comm.codec.protocol import RESIDUAL_KEY
from fourfold.comm.memory_order import is_in_order, shaped
from fourfold.comm.rank_layout import RankLayout
from fourfold.feed.feed import Feed
from fourfold.feed.position import describe_order
from fourfold.optim.ema import EMA
from fourfold.optim.lr_scheduler import SteppedScheduler
from fourfold.plan.checkpoint_manifest import (
    DataState,
    FirstStepRecord,
    RngState,
    Scalars,
    TensorKey,
    TensorKind,
    place_of,
)
from fourfold.plan.json_state import encode_state
from fourfold.plan.rng import random_place
from fourfold.step.train_step import TrainStep
from fourfold.torch_kit.generators import states_of
from fourfold.words.errors import CheckpointError, Problem


class TrainingState(NamedTuple):
    """What a run changes as it trains. `feed` is None in a loop of its own that reads its data in another way."""

    step: TrainStep
    feed: Feed | None
    ema: EMA | None = None
    scheduler: SteppedScheduler | None = None


class RankState(NamedTuple):
    """What one rank has to save, in the memory that training uses.

    aliases   names of tensors of the model that are another one's (tied weights)
    scalars   states of the optimizer that are not tensors, by parameter and key
    """

    live_tensors: list[LiveTensor]
    aliases: dict[str, str]
    scalars: Scalars


def collect_state(training_state: TrainingState) -> RankState:
    """Everything to save on this rank. Raises CheckpointError for state that cannot be saved.

    Collective if updates wait for the next forward: see `TrainStep.flush`.
    """
    step, ema = training_state.step, training_state.ema
    refs = step.state_refs()
    rank = _Rank(step)
    live_tensors, aliases = _model_tensors(refs["model"], rank)
    scalars: Scalars = {}
    for name, values in refs["optimizer"].items():
        for key, value in values.items():
            if isinstance(value, list):
                live_tensors += rank.optimizer_state(name, key, value)
            elif rank.reports_scalars:
                scalars.setdefault(name, {})[key] = value
    for name, state in step.codec_state.tensors.items():
        for key, value in state.items():
            tensor = TensorKey(TensorKind.CODEC, name, step.codec_state.saved_key(key), rank.place)
            if key == RESIDUAL_KEY:
                live_tensors += rank.as_parameter(tensor, name, [value], holders=rank.alone)
            else:
                live_tensors.append(make_live_tensor(tensor, [value], value.shape, holders=rank.alone))
    for name, value in refs["outer"].items():
        live_tensors += rank.as_parameter(TensorKey(TensorKind.OUTER, name), name, [value], holders=rank.replicated)
    for name, value in ema.values.items() if ema is not None else ():
        live_tensors += rank.weight(TensorKey(TensorKind.EMA, name), name, value)
    return RankState(live_tensors, aliases | step.pipeline.aliases if rank.is_first else {}, scalars)


class _Rank:
    """Which parts of its tensors a rank holds, and with whom."""

    def __init__(self, step: TrainStep) -> None:
        mesh, self.step = step.plan.mesh, step
        peers, self._num_places = mesh.peers(step.rank, "dp", "cp"), mesh.tp
        self._num_ranks = len(peers)
        self.is_first = step.rank == mesh.peers(step.rank, "dp", "cp", "tp")[0]
        self.place = place_of(mesh, step.rank, "dp", "cp")
        self.replicated = Holders(peers.index(step.rank), len(peers), self._num_places)
        self.alone = Holders(num_parts=len(peers) * self._num_places)
        self.reports_scalars = step.state_layout.replica[0] == 0
        self.trained = step.weight_shards
        """By parameter: this rank's part of the weights that the update works on."""
        self.parameters = dict(step.model.named_parameters())

    def weight(self, tensor: TensorKey, name: str, value: Tensor) -> list[LiveTensor]:
        """A trained weight, or a tensor that is split as the weight is."""
        return self._parts(tensor, name, [value.reshape(-1)], self.step.weight_layout(name))

    def optimizer_state(self, name: str, key: str, segments: list[Tensor]) -> list[LiveTensor]:
        if not is_in_order(parameter := self.parameters[name]):
            segments = [shaped(torch.cat(segments), parameter).reshape(-1)]
        if self.step.plan.sync == "local":
            tensor = TensorKey(TensorKind.OPTIMIZER, name, key, self.place)
            return self.as_parameter(tensor, name, segments, holders=self.alone)
        return self._parts(TensorKey(TensorKind.OPTIMIZER, name, key), name, segments, self.step.state_layout)

    def _parts(self, tensor: TensorKey, name: str, segments: list[Tensor], layout: RankLayout) -> list[LiveTensor]:
        index, count = layout.replica
        holders = Holders(index, count, self._num_ranks // count * self._num_places)
        return self.as_parameter(tensor, name, segments, holders=holders, start=layout.ranges[name][0])

    def as_parameter(
        self, tensor: TensorKey, name: str, segments: list[Tensor], *, holders: Holders, start: int = 0
    ) -> list[LiveTensor]:
        """A tensor as large as a parameter; `segments` begin at element `start` of what is here of it."""
        shard = self.step.whole_tensors.shard(name, self.parameters[name].shape)
        return make_live_parts(tensor, segments, shard, start, holders=holders)


def _model_tensors(state: Mapping[str, Any], rank: _Rank) -> tuple[list[LiveTensor], dict[str, str]]:
    """The model's parameters and buffers, and the names that are aliases. Precise weights replace their parameters."""
    live_tensors: list[LiveTensor] = []
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    parameter_names = {id(p): name for name, p in rank.parameters.items()}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(Problem(f"{name} is a {type(value).__name__}", "tensors in the model's state_dict"))
        first_name = first_names.setdefault(id(value), name)
        parameter_name = parameter_names.get(id(value))
        tensor = TensorKey(TensorKind.MODEL, name)
        if first_name != name:
            aliases[name] = first_name
        elif parameter_name in rank.trained:
            live_tensors += rank.weight(tensor, parameter_name, rank.trained[parameter_name])
        elif parameter_name is not None:
            flat = value.detach().reshape(-1)
            live_tensors += rank.as_parameter(tensor, parameter_name, [flat], holders=rank.replicated)
        elif rank.is_first and rank.step.pipeline.is_own(name):  # ranks' buffers may differ
            live_tensors.append(make_live_tensor(tensor, [value.detach().reshape(-1)], value.shape, holders=Holders()))
    return live_tensors, aliases


def group_options(training_state: TrainingState) -> tuple[dict[str, Any], ...]:
    """The optimizer's options by group, as the task gave them, as JSON values. Raises CheckpointError."""
    step, scheduler = training_state.step, training_state.scheduler
    groups = step.state_refs()["groups"] if scheduler is None else scheduler.base_options
    return tuple({k: _to_json_value(k, v) for k, v in group.items()} for group in groups)


def _to_json_value(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, np.generic):  # np.float64 is a float too, but JSON cannot hold it
        return _to_json_value(key, value.item())
    if isinstance(value, tuple | list):
        return [_to_json_value(key, each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return encode_state(value)
    raise CheckpointError(Problem(f"the optimizer's option {key} is a {type(value).__name__}", "numbers and texts"))


def first_step_record(step: TrainStep) -> FirstStepRecord:
    """What the first step determined: see `FirstStepRecord`."""
    record = step.state_refs()["record"]
    order, count = tuple(record["order"]), record["nominal_count"]
    return FirstStepRecord(order, count, record.get("scale"), record.get("proof"))


def data_state(feed: Feed | None) -> DataState | None:
    """Where the feed is in its data."""
    if feed is None:
        return None
    seed, epoch, position, _ = feed.state
    where = seed, epoch, position, feed.batch_size, feed.num_samples or 0
    return DataState(*where, **describe_order(feed.sample_order))


def rng_state(step: TrainStep) -> RngState | None:
    """The state of this rank's torch generators; None if another rank saves that of its place."""
    mesh, device = step.plan.mesh, step.device
    if step.rank != mesh.peers(step.rank, "cp", "tp")[0]:
        return None
    cpu, *on_device = map(_to_hex, states_of(device))
    return RngState(cpu, "".join(on_device), random_place(mesh, step.rank))


def _to_hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()
