"""State: all that training goes on from, by parameter name, independent of the mesh.

living  as it lies: the optimizer's tensors are lists of consecutive flat stretches, this rank's only where they
        rest split
saved   copies, whole, in the shapes of the parameters; of weights the precise ones, as the update has them
Law: `load(saved())` changes nothing, and on another mesh goes on with the same training.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.comm import transports
from fourfold.parts.data.local_sgd import LocalSGD
from fourfold.parts.optim import flat_optimizer
from fourfold.plan.data import Bucket
from fourfold.step.codec_state import CodecState
from fourfold.step.weights import Weights
from fourfold.words.errors import OptimizerError, Problem


@dataclass(frozen=True)
class PersistentState:
    """What a step is made of that outlives it. `is_split`: whether optimizer states rest split over the ranks."""

    weights: Weights
    buckets: Sequence[Bucket]
    optimizer: flat_optimizer.FlatOptimizer
    transport: transports.Transport
    communicator: transports.Communicator
    codec_state: CodecState
    local_sgd: LocalSGD | None
    is_sharded: bool

    def state_refs(self) -> dict[str, Any]:
        """Model, optimizer and outer momenta, without a copy."""
        # Of the replicas of a share one is told of.
        states = {
            slot.name: {}
            if self.transport.replica_index
            else self.optimizer.state_slices(bucket.index, slot.start, slot.stop)
            for bucket in self.buckets
            for slot in bucket.slots
        }
        outer = {} if self.local_sgd is None else self.local_sgd.momenta
        masters = {name: self.weights.weight_shard(name) for name in self.weights.flat_names}
        model = self.weights.model_state_dict()
        return {"model": model, "masters": masters, "optimizer": states, "outer": outer}

    def state_dict(self) -> dict[str, Any]:
        """Copies of all of it, and of what codecs remember. Collective."""
        living = self.state_refs()
        mine = {
            name: {k: _describe_value(v) for k, v in state.items()}
            for name, state in living["optimizer"].items()
            if state
        }
        rows = self.communicator.all_gather_json(mine) if self.is_sharded else [mine]
        states: dict[str, dict[str, Any]] = {name: {} for name in living["optimizer"]}
        for name, key, told in [(n, k, v) for row in rows for n, keys in row.items() for k, v in keys.items()]:
            if key not in states[name]:
                parts = living["optimizer"][name].get(key, [])
                states[name][key] = (
                    told if not isinstance(told, dict) else self._full_tensor(name, parts, told["dtype"])
                )
        names = {id(p): name for name, p in self.weights.trainable.items()}
        weights = {name: weight.clone() for name, weight in self.weights.named_weights()}
        model = {
            name: weights[names[id(value)]] if id(value) in names else cloned(value)
            for name, value in living["model"].items()
        }
        outer = {name: value.clone() for name, value in living["outer"].items()}
        return {"model": model, "optimizer": states, "outer": outer, "codec": self.codec_state.state_dict()}

    def _full_tensor(self, name: str, parts: Sequence[Tensor], dtype: str) -> Tensor:
        """A tensor of the optimizer's state in its parameter's shape, from the shares of all ranks."""
        parameter = self.weights.trainable[name]
        if not self.is_sharded:
            whole = torch.cat([part.clone() for part in parts])
            if self.local_sgd is not None:
                self.communicator.all_reduce(whole)
                whole.div_(self.communicator.size)
            return whole.view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=getattr(torch, dtype), device=parameter.device)
        low = self.shard_ranges[name][0]
        for part in parts:
            whole[low : low + part.numel()] = part
            low += part.numel()
        self.communicator.all_reduce(whole)
        return whole.view(parameter.shape)

    @functools.cached_property
    def shard_ranges(self) -> Mapping[str, tuple[int, int]]:
        """By parameter: the elements [start, stop) of its flattened form whose optimizer state is this rank's."""
        result = {}
        for bucket in self.buckets:
            first, last = 0, bucket.size
            if self.is_sharded:
                first, last, _ = self.transport.grad_shard(bucket.index)
            for slot in bucket.slots:
                low, high = max(first, slot.start), min(last, slot.stop)
                result[slot.name] = (low - slot.start, max(low, high) - slot.start)
        return result

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `saved` gave, all but what codecs remember; nobody may be reading weights. Collective."""
        by_bucket = [
            [
                (slot.start, slot.stop, {k: _flat(v) for k, v in state["optimizer"][slot.name].items()})
                for slot in bucket.slots
            ]
            for bucket in self.buckets
        ]
        # Another rank's share of a bucket may hold other parameters: all raise, or none.
        mine = all(self.optimizer.can_load_state(index, slots) for index, slots in enumerate(by_bucket))
        if not all(self.communicator.all_gather_json(mine)):
            got = "parameters of one bucket, some with a state and some without (trained only now?)"
            attempt = 'unused = "allow", which updates each by itself'
            raise OptimizerError(Problem(got, "a state of each, or of none", attempt), where="the state")
        self.weights.load_state_dict(state["model"])
        for index, slots in enumerate(by_bucket):
            self.optimizer.load_state(index, slots)
        if self.local_sgd is not None:
            self.local_sgd.load_state(state.get("outer", {}))

    def load_codec_state(self, state: Mapping[str, Any]) -> None:
        """Have the codecs remember what `saved` gave of them. Last: a new nominal count would scale it again."""
        for name in self.codec_state.tensors:
            self.codec_state.load_parameter(name, state.get("codec", {}).get(name, {}))


def cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _describe_value(value: Any) -> Any:
    """What another rank must know of a value of the optimizer's state."""
    return {"dtype": str(value[0].dtype).removeprefix("torch.")} if isinstance(value, list) else value


def _flat(value: Any) -> Any:
    return value.reshape(-1) if isinstance(value, Tensor) else value
