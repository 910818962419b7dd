"""Persistent state: all that training continues from, by parameter name, independent of the mesh.

references  the tensors themselves: an optimizer tensor is a list of consecutive flat slices, this rank's only if
            optimizer states rest split
state dict  copies, whole, in the shapes of the parameters; of weights the precise ones, which the update keeps
Law: `load_state_dict(state_dict())` changes nothing; on another mesh it continues the same training.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.protocol import DataTransport
from fourfold.parts.optim import flat_optimizer
from fourfold.parts.tensor_reader import TensorReader
from fourfold.plan.data.buckets import Bucket
from fourfold.step.codec_state import CodecState
from fourfold.step.grad_sync import GradSync
from fourfold.step.saved_state import CodecRows, SavedState
from fourfold.step.weights import Weights
from fourfold.words.errors import OptimizerError, Problem


@dataclass(frozen=True)
class PersistentState:
    """What outlives a step. `is_sharded`: optimizer states rest split over the ranks."""

    weights: Weights
    buckets: Sequence[Bucket]
    optimizer: flat_optimizer.FlatOptimizer
    transport: DataTransport
    communicator: Communicator
    codec_state: CodecState
    sync: GradSync
    is_sharded: bool

    def state_refs(self) -> dict[str, Any]:
        """Model, optimizer and outer momenta, without copies."""
        states = {
            slot.name: self.optimizer.state_slices(bucket.index, slot.start, slot.stop)
            for bucket in self.buckets
            for slot in bucket.slots
        }
        outer = self.sync.momenta
        masters = {name: self.weights.weight_shard(name) for name in self.weights.flat_names}
        model = self.weights.model_state_dict()
        return {"model": model, "masters": masters, "optimizer": states, "outer": outer}

    def state_dict(self) -> dict[str, Any]:
        """Copies of all of it, and of the codecs' state. Collective."""
        refs = self.state_refs()
        if self.transport.grads.replica_index:  # replica 0 adds the same shards
            refs["optimizer"] = {name: {} for name in refs["optimizer"]}
        described = {
            name: {k: _describe_value(v) for k, v in state.items()}
            for name, state in refs["optimizer"].items()
            if state
        }
        by_rank = self.communicator.all_gather_json(described) if self.is_sharded else [described]
        states: dict[str, dict[str, Any]] = {name: {} for name in refs["optimizer"]}
        for name, key, value in [(n, k, v) for row in by_rank for n, keys in row.items() for k, v in keys.items()]:
            if key not in states[name]:
                slices = refs["optimizer"][name].get(key, [])
                states[name][key] = (
                    value if not isinstance(value, dict) else self._full_tensor(name, slices, value["dtype"])
                )
        names = {id(p): name for name, p in self.weights.trainable.items()}
        weights = {name: weight.clone() for name, weight in self.weights.named_weights()}
        model = {
            name: weights[names[id(value)]] if id(value) in names else cloned(value)
            for name, value in refs["model"].items()
        }
        outer = {name: value.clone() for name, value in refs["outer"].items()}
        return {"model": model, "optimizer": states, "outer": outer, "codec": self.codec_state.state_dict()}

    def _full_tensor(self, name: str, slices: Sequence[Tensor], dtype: str) -> Tensor:
        """An optimizer tensor in its parameter's shape, from the slices of all ranks. Collective if these differ."""
        parameter = self.weights.trainable[name]
        if not self.is_sharded:
            whole = torch.cat([each.clone() for each in slices])
            self.sync.merge_state(whole, self.communicator)
            return whole.view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=getattr(torch, dtype), device=parameter.device)
        start = self.shard_ranges[name][0]
        for each in slices:
            whole[start : start + each.numel()] = each
            start += each.numel()
        self.communicator.all_reduce(whole)
        return whole.view(parameter.shape)

    @functools.cached_property
    def shard_ranges(self) -> Mapping[str, tuple[int, int]]:
        """By parameter: the elements [start, stop) of its flattened form whose optimizer state is this rank's."""
        result = {}
        for bucket in self.buckets:
            shard_start, shard_stop = 0, bucket.size
            if self.is_sharded:
                shard_start, shard_stop, _ = self.transport.grads.grad_shard(bucket.index)
            for slot in bucket.slots:
                start, stop = max(shard_start, slot.start), min(shard_stop, slot.stop)
                result[slot.name] = (start - slot.start, max(start, stop) - slot.start)
        return result

    @property
    def shard_replica(self) -> tuple[int, int]:
        """Which of how many ranks with the same shards this rank is."""
        if not self.is_sharded:
            return 0, 1
        start, stop, _ = self.transport.grads.grad_shard(0)
        return self.transport.grads.replica_index, self.communicator.size * (stop - start) // self.buckets[0].size

    def load(self, saved: SavedState) -> None:
        """Restore a saved state, except the codecs', a parameter at a time; no rank may be reading weights. Collective.

        The state has everything that the model and the optimizer need, in their shapes.
        """
        by_bucket = [
            [(slot.start, slot.stop, saved.optimizer[slot.name]) for slot in bucket.slots] for bucket in self.buckets
        ]
        # The shards of ranks hold different parameters: all ranks raise, or none.
        can_load = all(self.optimizer.can_load_state(index, slots) for index, slots in enumerate(by_bucket))
        if not all(self.communicator.all_gather_json(can_load)):
            got = "parameters of one bucket, some with optimizer state and some without (trained for the first time?)"
            attempt = 'unused = "allow", which updates each parameter separately'
            raise OptimizerError(Problem(got, "state of all of them, or of none", attempt), where="the state")
        self._load_model(saved.model)
        for index, slots in enumerate(by_bucket):
            self.optimizer.load_state(index, slots)
        self.sync.load_momenta(saved.outer)

    @torch.no_grad()
    def _load_model(self, values: Mapping[str, TensorReader]) -> None:
        tensors = self.weights.model_state_dict()
        trained = {id(p): name for name, p in self.weights.trainable.items()}
        others = {name: tensor for name, tensor in tensors.items() if id(tensor) not in trained}
        self._load_others(others, values)
        for name, tensor in tensors.items():
            if id(tensor) in trained:
                self.load_weight(trained.pop(id(tensor)), values[name])
        self.weights.load_weights({})  # all ranks have written theirs

    def _load_others(self, tensors: Mapping[str, Any], values: Mapping[str, TensorReader]) -> None:
        """Frozen parameters, one at a time; buffers, and what a hook of the model makes, as the model loads them."""
        parameters = {id(p) for p in self.weights.model.parameters()}
        rest = {}
        for name, tensor in tensors.items():
            if name not in values:
                continue
            if id(tensor) in parameters:
                tensor.copy_(_whole(values[name]))
            else:
                rest[name] = _whole(values[name])
        self.weights.model.load_state_dict(rest, strict=False)

    @torch.no_grad()
    def load_weight(self, name: str, value: TensorReader) -> None:
        """Load this rank's part of a parameter's weights, and of its master weights.

        `Weights.load_weights` must follow when all are loaded.
        """
        weights, storage, shard = self.weights, self.weights.storage, self.shard_ranges[name]
        has_master = name in weights.master_weights.param_names
        if not (has_master or storage.is_writer):
            return
        writes_whole = storage.is_writer and not storage.is_sharded
        start, stop = (0, weights.trainable[name].numel()) if writes_whole else shard
        flat = value.read(start, stop)
        if storage.is_writer:
            local = storage.local_shard(name)
            local.copy_(flat.view(local.shape))
        if has_master:
            weights.weight_shard(name).copy_(flat[shard[0] - start : shard[1] - start])

    def load_codec_state(self, saved: CodecRows) -> None:
        """Restore the codecs' state. Call it last: a new nominal count would rescale the residuals again."""
        for name in self.codec_state.tensors:
            self.codec_state.load_parameter(name, saved.get(name, {}))


def cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _describe_value(value: Any) -> Any:
    """An optimizer value as JSON: the dtype of a tensor, or the value itself."""
    return {"dtype": str(value[0].dtype).removeprefix("torch.")} if isinstance(value, list) else value


def _whole(reader: TensorReader) -> Tensor:
    """All of a tensor, in its shape."""
    return reader.read(0, math.prod(reader.shape)).view(reader.shape)
