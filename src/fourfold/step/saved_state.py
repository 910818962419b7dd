"""Saved state: all that training continues from, as readers of tensors that are loaded one at a time.

Law: a step loads what `state_dict` gave and what a checkpoint holds in the same way; of each tensor a rank reads what
it keeps.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fourfold.axes.tensor.work.whole_tensors import WholeTensors
from fourfold.comm.codec.residual import RESIDUAL_KEY
from fourfold.torch_kit.tensor_reader import MemoryReader, ParameterState, TensorReader

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
