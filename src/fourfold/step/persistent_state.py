"""Persistent state: all that training continues from, by parameter name, independent of the mesh.

references  the tensors themselves: an optimizer tensor is a list of consecutive flat slices, this rank's only if
            optimizer states rest split
state dict  copies, whole, in the shapes of the parameters; of weights the precise ones, which the update keeps
rows        of one tensor of a codec's state: one for each rank that saved it, in rank order. Residuals of tensor ranks
            are parts of whole ones; what else codecs remember is each rank's own. `Codec.reshard` decides how a saved
            tensor becomes this rank's
Law: `load_state_dict(state_dict())` changes nothing, bit for bit; on another mesh it continues the same training, and
the sum of the residuals stays the same.
Law: a step loads what `state_dict` gave and what a checkpoint holds in the same way; of each tensor a rank reads what
it keeps.
Law: a state that does not fit is refused before anything is changed. Problems are reported together, except where one
makes the other checks impossible.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.tensor.work.whole_tensors import WholeTensors
from fourfold.comm.codec.protocol import RESIDUAL_KEY, Codec, SavedRows
from fourfold.comm.codec.registry import make_codec
from fourfold.comm.communicator import Communicator
from fourfold.comm.memory_order import state_in_memory_order
from fourfold.comm.rank_layout import RankLayout
from fourfold.model.weights import Weights
from fourfold.optim import flat_optimizer
from fourfold.optim.user_optimizer import group_indices, state_keys
from fourfold.plan.codec import CodecSpec
from fourfold.step.grad_strategies import LocalSteps
from fourfold.torch_kit.tensor_reader import MemoryReader, ParameterState, TensorReader
from fourfold.words.errors import OptimizerError, Problem, closest_match

# ---- state validation -----------------------------------------------------------------------------------------------


# model: weights and buffers by name. optimizer: states by parameter name. groups: options of the optimizer's groups.
# record: what the first step has fixed (launch order, nominal count), and the optimizer's class.
STATE_KEYS = ("model", "optimizer", "groups", "record")

WholeShape = Callable[[str, Sequence[int]], tuple[int, ...]]
"""The shape of a tensor of the whole model, by its name and the shape that it has in this rank's model."""


def state_problems(
    state: Any,
    model_state: Mapping[str, Any],
    trainable: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    whole_shape: WholeShape,
) -> list[Problem]:
    """Why `state` cannot come from `TrainStep.state_dict` of such a model and optimizer.

    `model_state` is the model's state_dict, `trainable` its trainable parameters by name.
    """
    if not isinstance(state, Mapping) or any(part not in state for part in STATE_KEYS):
        got = f"a {type(state).__name__}"
        if isinstance(state, Mapping):
            got = f"a state without {', '.join(part for part in STATE_KEYS if part not in state)}"
        return [Problem(got, "what step.state_dict() returns", "init= or step.load_weights(…) for weights alone")]
    return [
        *_model_problems(state["model"], model_state, whole_shape),
        *_optimizer_problems(state, trainable, optimizer, whole_shape),
    ]


def weight_problems(values: Any, trainable: Mapping[str, Tensor], whole_shape: WholeShape) -> list[Problem]:
    """Why `values` cannot replace the weights of trainable parameters, by name."""
    if not isinstance(values, Mapping):
        return [Problem(f"a {type(values).__name__}", "a dict of tensors by name of trainable parameters")]
    problems = []
    for name, value in values.items():
        parameter = trainable.get(name)
        if parameter is None:
            problems.append(
                Problem(f"{name}", "the name of a trainable parameter", closest_match(str(name), trainable) or "")
            )
        elif not isinstance(value, Tensor):
            problems.append(Problem(f"a {type(value).__name__} for {name}", "a tensor"))
        elif value.shape != (shape := whole_shape(name, parameter.shape)):
            problems.append(Problem(f"{name} of shape {list(value.shape)}", f"shape {list(shape)}"))
        # By kind of number only: float64 may become float16, but a complex number no real one.
        elif not torch.can_cast(value.dtype, parameter.dtype):
            got, need = (str(each).removeprefix("torch.") for each in (value.dtype, parameter.dtype))
            problems.append(Problem(f"{name} of {got}", f"numbers that fit into {need}"))
    return problems


def tied_problems(model_state: Mapping[str, Any], values: Mapping[str, Any]) -> list[Problem]:
    """Tied names of a model's `state_dict` with different values: the last one would win."""
    problems, first = [], {}
    for name, tensor in model_state.items():
        other = first.setdefault(id(tensor), name)
        if other != name and not torch.equal(values[name], values[other]):
            problems.append(
                Problem(f"{other} and {name} with different values", "the same values: the model ties them")
            )
    return problems


def _model_problems(
    values: Mapping[str, Any], model_state: Mapping[str, Any], whole_shape: WholeShape
) -> Iterator[Problem]:
    wrong = [
        *(name for name in model_state if name not in values),
        *(name for name in values if name not in model_state),
    ]
    both = [(name, values[name], tensor) for name, tensor in model_state.items() if name in values]
    tensors = [(name, new, old) for name, new, old in both if isinstance(old, Tensor)]
    shapes = {name: whole_shape(name, old.shape) for name, _, old in tensors}
    wrong += [name for name, new, _ in tensors if not isinstance(new, Tensor) or new.shape != shapes[name]]
    if wrong:
        yield Problem(f"{', '.join(wrong)}", "the model's own names and shapes", "the state of this model")
    else:
        yield from tied_problems({name: old for name, _, old in tensors}, values)
    for name, new, old in tensors:
        if isinstance(new, Tensor) and not torch.can_cast(new.dtype, old.dtype):
            got, need = (str(each).removeprefix("torch.") for each in (new.dtype, old.dtype))
            yield Problem(f"{name} of {got}", f"numbers that fit into {need}")


def _optimizer_problems(
    state: Mapping[str, Any],
    trainable: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    whole_shape: WholeShape,
) -> Iterator[Problem]:
    num_groups = len(optimizer.param_groups)
    if len(state["groups"]) != num_groups:
        yield Problem(f"{len(state['groups'])} groups of options", f"{num_groups}", "the optimizer it was saved with")
        return
    states, saved = state["optimizer"], state["record"].get("optimizer")
    yield from optimizer_problems(optimizer, trainable, {name: set(keys) for name, keys in states.items()}, saved=saved)
    missing = [name for name in trainable if name not in states]
    if missing:
        yield Problem(f"no optimizer state of {', '.join(missing)}", "one for every trainable parameter, even if empty")
    for name, parameter in trainable.items():
        shape = whole_shape(name, parameter.shape)
        for key, value in states.get(name, {}).items():
            if isinstance(value, Tensor) and value.numel() != math.prod(shape):
                yield Problem(f"{key} of {name}, shape {list(value.shape)}", f"shape {list(shape)}")


def optimizer_problems(
    optimizer: torch.optim.Optimizer,
    trainable: Mapping[str, Tensor],
    keys: Mapping[str, set[str]],
    *,
    saved: str | None,
) -> Sequence[Problem]:
    """Why the optimizer cannot continue from states with these keys, by parameter.

    `saved`: the class name of the optimizer that saved them, if known.
    """
    name = type(optimizer).__name__
    attempt = "the optimizer it was saved with, or init= with its weights"
    if saved not in (None, name):
        return [Problem(f"{name}, and states of {saved}", f"{saved}", attempt)]
    group_of = group_indices(optimizer, trainable)  # type: ignore[arg-type]
    needed = {group: state_keys(optimizer, group) for group in set(group_of.values())}
    for parameter, group in group_of.items():
        missing = needed[group] - keys[parameter] if keys.get(parameter) else None
        if missing:  # A parameter without any state has not been updated yet.
            got = f"states of {parameter} without {', '.join(sorted(missing))}"
            return [Problem(got, f"what {name} with its options keeps", attempt)]
    return []


# ---- codec state ----------------------------------------------------------------------------------------------------


CodecRows = Mapping[str, Mapping[str, Sequence[TensorReader]]]
"""By parameter and key: what each rank's codec had saved, in rank order."""


class CodecState:
    """What this rank's codecs remember, and the other ranks' rows of it when it is saved."""

    def __init__(self, codecs: Sequence[Codec], communicator: Communicator, whole_tensors: WholeTensors) -> None:
        self._codecs, self._communicator, self._whole_tensors = codecs, communicator, whole_tensors
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """By parameter and key, flat: this rank's tensors themselves, no copies."""
        self._codec_of: dict[str, Codec] = {}
        for codec in codecs:
            state = codec.state_tensors()
            self.tensors |= state
            self._codec_of |= dict.fromkeys(state, codec)

    def scale_residuals(self, factor: float) -> None:
        """Gradients are from now on divided by another count."""
        for codec in self._codecs:
            codec.scale_residual(factor)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """By parameter and key: the rows of all ranks. Collective."""
        return {
            name: self._whole_rows(name, {key: self._gather_rows(value) for key, value in state.items()})
            for name, state in self.tensors.items()
        }

    def _whole_rows(self, name: str, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of whole residuals, and those of all places under keys of their own. Collective."""
        result = {}
        if RESIDUAL_KEY in rows:
            whole = [self._whole_tensors.whole(name, row).reshape(-1) for row in rows[RESIDUAL_KEY]]
            result[RESIDUAL_KEY] = torch.stack(whole)
        own = {self.saved_key(key): value for key, value in rows.items() if key != RESIDUAL_KEY}
        ranks = self._whole_tensors.ranks
        sizes = {key: [list(value.shape), str(value.dtype).removeprefix("torch.")] for key, value in own.items()}
        for place, found in enumerate(ranks.all_gather_json(sizes)):
            for key, (shape, dtype) in found.items():
                empty = torch.empty(shape, dtype=getattr(torch, dtype), device=ranks.device)
                result[key] = own.get(key, empty)
                ranks.broadcast(result[key], place)
        return result

    def saved_key(self, key: str) -> str:
        """Under which key a tensor of this rank is saved: with its place, unless it is a part of a whole one."""
        ranks = self._whole_tensors.ranks
        return key if key == RESIDUAL_KEY or ranks.size == 1 else f"{key}@{ranks.rank}/{ranks.size}"

    def _gather_rows(self, row: Tensor) -> Tensor:
        rows = torch.zeros(self._communicator.size, row.numel(), dtype=row.dtype, device=self._communicator.device)
        rows[self._communicator.rank] = row
        self._communicator.all_reduce(rows)
        return rows

    @torch.no_grad()
    def load(self, saved: CodecRows) -> None:
        """Continue from the rows that were saved; some or all may be missing.

        Call it last: a new nominal count would rescale the residuals again.
        """
        for name, state in self.tensors.items():
            for key, tensor in state.items():
                found = saved.get(name, {}).get(self.saved_key(key), ())
                rows = SavedRows(found, self._communicator.rank, self._communicator.size)
                self._codec_of[name].reshard(key, rows, tensor)


def make_codecs(
    spec: CodecSpec | None, buckets: Sequence[Bucket], parameters: Sequence[Sequence[nn.Parameter]]
) -> list[Codec]:
    """One codec for each bucket of gradients; none without a codec in the plan. `parameters`: by bucket and slot."""
    if spec is None:
        return []
    return [
        make_codec(spec, bucket, [tuple(p.shape) for p in params], device=params[0].device)
        for bucket, params in zip(buckets, parameters, strict=True)
    ]


# ---- saved state ---------------------------------------------------------------------------------------------------


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
        return {"model": self.weights.model_state_dict(), "optimizer": states, "outer": self.local.sgd.momenta}

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
        self.local.sgd.load_state(saved.outer)

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


def cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _describe_value(value: Any) -> Any:
    """An optimizer value as JSON: the dtype of a tensor, or the value itself."""
    return {"dtype": str(value[0].dtype).removeprefix("torch.")} if isinstance(value, list) else value


def _whole(reader: TensorReader) -> Tensor:
    """All of a tensor, in its shape."""
    return reader.read(0, math.prod(reader.shape)).view(reader.shape)
