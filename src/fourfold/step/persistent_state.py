"""Persistent state: all that training continues from, by parameter name, independent of the mesh.

references  the tensors themselves: an optimizer tensor is a list of consecutive flat slices, this rank's only if
            optimizer states rest split
state dict  copies, whole, in the shapes of the parameters; of weights the precise ones, which the update keeps
Law: `load_state_dict(state_dict())` changes nothing; on another mesh it continues the same training.
Law: a step loads what `state_dict` gave and what a checkpoint holds in the same way; of each tensor a rank reads what
it keeps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.tensor.work.whole_tensors import WholeTensors
from fourfold.comm.codec.residual import RESIDUAL_KEY
from fourfold.comm.communicator import Communicator
from fourfold.comm.memory_order import state_in_memory_order
from fourfold.comm.rank_layout import RankLayout
from fourfold.model.weights import Weights
from fourfold.optim import flat_optimizer
from fourfold.step.codec_state import CodecState
from fourfold.step.grad_strategies import LocalSteps
from fourfold.torch_kit.tensor_reader import MemoryReader, ParameterState, TensorReader
from fourfold.words.errors import OptimizerError, Problem

# ---- saved state ---------------------------------------------------------------------------------------------------

CodecRows = Mapping[str, Mapping[str, Sequence[TensorReader]]]
"""By parameter and key: what each rank's codec had saved, in rank order."""


class SavedState(NamedTuple):
    """See `TrainStep.state_dict`."""

    model: Mapping[str, TensorReader]
    optimizer: Mapping[str, ParameterState]
    record: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    outer: Mapping[str, TensorReader] = {}
    codec: Mapping[str, Mapping[str, Sequence[TensorReader]]] = {}


def readers_of(state: Mapping[str, Any]) -> SavedState:
    """What `TrainStep.state_dict` returned; its tensors are not copied."""
    return SavedState(
        {name: MemoryReader(value) for name, value in state["model"].items() if isinstance(value, Tensor)},
        {name: _parameter_state(values) for name, values in state["optimizer"].items()},
        state["record"],
        state["groups"],
        {name: MemoryReader(value) for name, value in state.get("outer", {}).items()},
        {
            name: {key: [MemoryReader(row) for row in rows] for key, rows in values.items()}
            for name, values in state.get("codec", {}).items()
        },
    )


def local_state(saved: SavedState, whole_tensors: WholeTensors) -> SavedState:
    """The same state, of which tensors as large as a parameter are read as this place of the tensor axis holds them."""
    reader = whole_tensors.reader

    def local_rows(name: str, key: str, rows: Sequence[TensorReader]) -> Sequence[TensorReader]:
        return [reader(name, row) for row in rows] if key == RESIDUAL_KEY else rows

    return saved._replace(
        model={name: reader(name, value) for name, value in saved.model.items()},
        optimizer={
            name: state._replace(tensors={key: reader(name, value) for key, value in state.tensors.items()})
            for name, state in saved.optimizer.items()
        },
        outer={name: reader(name, value) for name, value in saved.outer.items()},
        codec={
            name: {key: local_rows(name, key, rows) for key, rows in values.items()}
            for name, values in saved.codec.items()
        },
    )


def _parameter_state(values: Mapping[str, Any]) -> ParameterState:
    tensors = {key: MemoryReader(value) for key, value in values.items() if isinstance(value, Tensor)}
    return ParameterState(tensors, {key: value for key, value in values.items() if key not in tensors})


# ---- parts of it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PersistentState:
    """What outlives a step. `layout`: of the optimizer states."""

    weights: Weights
    buckets: Sequence[Bucket]
    optimizer: flat_optimizer.FlatOptimizer
    layout: RankLayout
    communicator: Communicator
    codec_state: CodecState
    local: LocalSteps

    def state_refs(self) -> dict[str, Any]:
        """Model, optimizer and outer momenta, without copies."""
        states = {
            slot.name: self.optimizer.state_slices(bucket.index, slot.start, slot.stop)
            for bucket in self.buckets
            for slot in bucket.slots
        }
        return {"model": self.weights.model_state_dict(), "optimizer": states, "outer": self.local.local_sgd.momenta}

    def state_dict(self) -> dict[str, Any]:
        """Copies of all of it, and of the codecs' state. Collective."""
        refs = self.state_refs()
        described = {
            name: {k: _describe_value(v) for k, v in state.items()}
            for name, state in refs["optimizer"].items()
            if state
        }
        by_rank = self.layout.gather_json(described)
        states: dict[str, dict[str, Any]] = {}
        # By parameter: tensor ranks divide their buckets in different places, and must gather in one order.
        for name, own in refs["optimizer"].items():
            keys = {key: value for row in reversed(by_rank) for key, value in row.get(name, {}).items()}
            states[name] = {
                key: self._full_tensor(name, own.get(key, []), value["dtype"]) if isinstance(value, dict) else value
                for key, value in keys.items()
            }
        outer = {name: self._whole(name, value).reshape(-1) for name, value in refs["outer"].items()}
        return {
            "model": self._whole_model(refs["model"]),
            "optimizer": states,
            "outer": outer,
            "codec": self.codec_state.state_dict(),
        }

    def _whole_model(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of a `state_dict` of the model, whole, with the precise weights. Collective."""
        names = {id(p): name for name, p in self.weights.model.named_parameters()}
        weights = {name: weight.clone() for name, weight in self.weights.named_weights()}
        for name, parameter in self.weights.model.named_parameters():
            if name not in self.weights.trainable:
                weights[name] = self._whole(name, parameter)
        return {
            name: weights[names[id(value)]] if id(value) in names else cloned(value) for name, value in tensors.items()
        }

    def _whole(self, name: str, local: Tensor) -> Tensor:
        """A copy of a whole tensor, of which this place of the tensor axis has `local`. Collective."""
        return self.weights.whole_tensors.whole(name, local.detach()).clone()

    def _full_tensor(self, name: str, slices: Sequence[Tensor], dtype: str) -> Tensor:
        """An optimizer tensor in its parameter's shape, from the slices of all ranks. Collective if these differ."""
        part = torch.cat(list(slices)) if slices else torch.empty(0, dtype=getattr(torch, dtype))
        gathered = self.layout.gather(name, part)
        if self.local.averaged_ranks.size > 1:
            self.local.averaged_ranks.all_reduce(gathered)
            gathered.div_(self.local.averaged_ranks.size)
        return self.weights.whole_tensors.whole(name, gathered)

    def load(self, saved: SavedState) -> None:
        """Restore a saved state, except the codecs', a parameter at a time; no rank may be reading weights. Collective.

        The state has everything that the model and the optimizer need, in their shapes.
        """
        trainable = self.weights.trainable
        by_bucket = [
            [
                (slot.start, slot.stop, state_in_memory_order(saved.optimizer[slot.name], trainable[slot.name]))
                for slot in bucket.slots
            ]
            for bucket in self.buckets
        ]
        # The shards of ranks hold different parameters: all ranks raise, or none.
        can_load = all(self.optimizer.can_load_state(index, slots) for index, slots in enumerate(by_bucket))
        can_load = all(self.communicator.all_gather_json(can_load))
        if not self.weights.whole_tensors.all_true(can_load):
            got = "parameters of one bucket, some with optimizer state and some without (trained for the first time?)"
            attempt = 'unused = "allow", which updates each parameter separately'
            raise OptimizerError(Problem(got, "state of all of them, or of none", attempt), where="the state")
        self._load_model(saved.model)
        for index, slots in enumerate(by_bucket):
            self.optimizer.load_state(index, slots)
        self.local.local_sgd.load_state(saved.outer)

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
        """Load the parts of a parameter's weights, and of its master weights, that this rank writes.

        `Weights.load_weights` must follow when all are loaded.
        """
        held = [*self.weights.storage.held_parts(name), *self.weights.master_weights.held_parts(name)]
        parts = [part for part in held if part.tensor.numel()]
        if not parts:
            return
        start = min(part.start for part in parts)
        flat = value.read(start, max(part.stop for part in parts))
        for part in parts:
            part.tensor.copy_(flat[part.start - start : part.stop - start].view(part.tensor.shape))

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
