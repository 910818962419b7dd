"""Weights: the weights of a step, wherever they rest, and the master weights that the update keeps.

trained   the trainable parameters; the storage decides where they rest (`axes/data/work/weight_storage.py`)
others    frozen parameters and buffers: each rank has its own copy
precise   the weights that training continues from: the master weights if there are any, else those in the storage
whole     a tensor as large as a parameter of the whole model; in `model` there is what this rank's place of the tensor
          axis holds of it
Law: a read gives the precise weights; a write replaces both.
Law: what would make a step train other tensors than the model's is reported before the step.
Law: a meta model has the same specs as the model itself.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.axes.data.work.sharded_params import NO_UNSHARD_SINK, UnshardSink
from fourfold.axes.data.work.weight_edits import TrainedEdits
from fourfold.axes.data.work.weight_storage import NO_SHARDS, WeightStorage, param_specs
from fourfold.axes.tensor.work.whole_tensors import WholeTensors
from fourfold.comm.communicator import Communicator
from fourfold.comm.rank_layout import RankLayout
from fourfold.optim.master_weights import MasterWeights
from fourfold.optim.user_optimizer import group_indices, is_layerwise, num_state_tensors
from fourfold.plan.param_spec import ParamSpec, TensorShard, UpdateSpec
from fourfold.torch_kit import mixed_precision
from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.torch_private import own_children, own_parameters
from fourfold.words.errors import Problem, TaskError

# ---- guard ---------------------------------------------------------------------------------------------------------


class ModelGuard:
    """The modules, the trainable parameters and their storage, as they are when this is made."""

    def __init__(self, model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> None:
        self._modules, self._trainable = list(model.modules()), trainable
        self._trained_ids = {id(p) for p in trainable.values()}
        self._initial_child_ids = self._child_ids()
        self._initial_data_ptrs = self._data_ptrs()

    def check(self) -> None:
        """Raise TaskError if parameters are not those that the buckets were made of."""
        if problems := self.problems():
            raise TaskError(problems, where="the model")

    @contextlib.contextmanager
    def checking_edits(self) -> Iterator[None]:
        """Inside, parameters have another storage for a while; raise TaskError if it was replaced at the end."""
        resting, self._initial_data_ptrs = self._initial_data_ptrs, self._data_ptrs()
        try:
            yield
            self.check()
        finally:
            self._initial_data_ptrs = resting

    def problems(self) -> list[Problem]:
        """Why parameters are not those that the buckets were made of."""
        with untracked_access():
            return self._problems()

    def _problems(self) -> list[Problem]:
        problems = []
        moved = [name for name, ptr in self._data_ptrs().items() if ptr != self._initial_data_ptrs[name]]
        if moved:
            got = (
                f"{moved[0]}{f' and {len(moved) - 1} more' if len(moved) > 1 else ''} with another storage than before"
            )
            need = "weights that are changed in place, and one TrainStep for each model"
            problems.append(Problem(got, need, "p.copy_(…) inside step.edit(), or a new TrainStep"))
        if not self._has_initial_trainable():
            got = (
                "other trainable parameters than when the step was built: frozen, tied, parametrized or replaced since"
            )
            problems.append(Problem(got, "the parameters that it was built with", "a new TrainStep"))
        return problems

    def _has_initial_trainable(self) -> bool:
        """Whether the model's trainable parameters are those of the build."""
        # Called in every step: over the modules of the build, since walking the model by name takes 0.5 ms.
        parameters = [p for module in self._modules for p in own_parameters(module).values() if p is not None]
        now = {id(p) for p in parameters if p.requires_grad and p.numel() > 0}
        return self._child_ids() == self._initial_child_ids and now == self._trained_ids

    def _child_ids(self) -> list[int]:
        return [id(child) for module in self._modules for child in own_children(module).values()]

    def _data_ptrs(self) -> dict[str, int]:
        with untracked_access():
            return {name: p.data_ptr() for name, p in self._trainable.items()}


# ---- weights -------------------------------------------------------------------------------------------------------


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in order of definition; without those that have no elements."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() > 0}


def _refuse_call(layer: nn.Module, args: Any) -> None:
    got = f"a call of a {type(layer).__name__} inside step.edit(), where its weights are whole"
    need, attempt = "weights of which each tensor rank has its part", "with step.unsharded() as model: …"
    raise TaskError(Problem(got, need, attempt), where="edit()")


class Weights:
    """The weights of a step. Making it broadcasts the first rank's. Collective."""

    def __init__(
        self,
        model: nn.Module,
        storage: WeightStorage,
        master_weights: MasterWeights,
        edits: TrainedEdits,
        data_ranks: Communicator,
        whole_tensors: WholeTensors,
    ) -> None:
        self.model, self.trainable = model, trainable_parameters(model)
        self.storage, self.master_weights, self.edits, self._data_ranks = storage, master_weights, edits, data_ranks
        self.whole_tensors = whole_tensors
        self._precise: dict[str, WeightStorage | MasterWeights] = dict.fromkeys(self.trainable, storage)
        self._precise |= dict.fromkeys(master_weights.param_names, master_weights)
        self._trained_ids = {id(p) for p in self.trainable.values()}
        storage.broadcast()
        self._broadcast_others()
        self.guard = ModelGuard(model, self.trainable)
        edits.accept_edits()

    @property
    def flats(self) -> Sequence[Tensor]:
        """By bucket: the weights that this rank holds, flat."""
        return [shard.flat for shard in self.storage.shards]

    def _broadcast_others(self) -> None:
        """Broadcast the first rank's frozen parameters and buffers, and wait until weights can be read."""
        others = [p.data for p in self.model.parameters() if id(p) not in self._trained_ids]
        for tensor in (*others, *self.model.buffers()):
            self._data_ranks.broadcast(tensor)
        self.storage.wait_written()

    @contextlib.contextmanager
    def edit(self) -> Iterator[None]:
        """Inside, parameters are whole, and any rank may write them; then all have the first one's. Collective."""
        with (
            torch.no_grad(),
            self.storage.private_copies(),
            self._whole_shown(),
            self._calls_refused(),
            self.guard.checking_edits(),
            self._masters_shown() as edited,
        ):
            yield
        self._broadcast_others()
        for name, value in edited.items():
            self.whole_tensors.ranks.broadcast(value)
            edited[name] = self.whole_tensors.local(name, value)
            self._data_ranks.broadcast(edited[name])
        self.load_weights(edited)

    @contextlib.contextmanager
    def _whole_shown(self) -> Iterator[None]:
        """Inside, parameters without master weights are whole; then tensor ranks have the first one's. Collective."""
        ranks = self.whole_tensors.ranks
        shown = {n: p for n, p in self.model.named_parameters() if n not in self.master_weights.param_names}
        resting = {name: p.data for name, p in shown.items() if self.whole_tensors.is_split(name)}
        edited: dict[str, Tensor] = {}
        try:
            for name, value in resting.items():
                shown[name].data = self.whole_tensors.whole(name, value).to(value.device)
            yield
        finally:
            for name, value in resting.items():
                edited[name], shown[name].data = shown[name].data, value
        for tensor in (*(p.data for name, p in shown.items() if name not in resting), *self.model.buffers()):
            ranks.broadcast(tensor)
        for name, value in edited.items():
            ranks.broadcast(value)
            resting[name].copy_(self.whole_tensors.local(name, value))

    @contextlib.contextmanager
    def _calls_refused(self) -> Iterator[None]:
        """Inside, a layer that computes with a part of a weight refuses to be called: the weight is whole."""
        split = {id(p) for name, p in self.model.named_parameters() if self.whole_tensors.is_split(name)}
        layers = [m for m in self.model.modules() if any(id(p) in split for p in m.parameters(recurse=False))]
        hooks = [layer.register_forward_pre_hook(_refuse_call, prepend=True) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def _masters_shown(self) -> Iterator[dict[str, Tensor]]:
        """Inside, parameters are replaced by their whole master weights; afterwards these are in the dict, edited."""
        views = {name: self.trainable[name].data for name in self.master_weights.param_names}
        edited: dict[str, Tensor] = {}
        for name in views:
            self.trainable[name].data = self.full_weight(name, self.weight_shard(name))
        try:
            yield edited
        finally:
            for name, view in views.items():
                edited[name] = self.trainable[name].data
                self.trainable[name].data = view

    def full_weight(self, name: str, shard: Tensor) -> Tensor:
        """A copy of the whole tensor of which `shard` is this rank's part, split as `weight_shard` is. Collective."""
        return self.whole_tensors.whole(name, self._gathered(name, shard)).to(self.trainable[name].device)

    def _gathered(self, name: str, shard: Tensor) -> Tensor:
        """The same of this place's part of the whole tensor: as large as the parameter in `model`. Collective."""
        return self.weight_layout(name).gather(name, shard).to(self.trainable[name].device)

    @contextlib.contextmanager
    def swapped_weights(self, shards: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the trainable weights are others, given in the form of `weight_shard`. Collective."""
        before = {name: self._gathered(name, self.weight_shard(name)) for name in shards}
        self.load_weights({name: self._gathered(name, value) for name, value in shards.items()})
        try:
            yield
        finally:
            self.load_weights(before)

    def weight_shard(self, name: str) -> Tensor:
        """This rank's shard of a parameter's precise weights: flat; or the parameter itself, if it rests whole."""
        return self._precise[name].local_shard(name)

    def weight_layout(self, name: str) -> RankLayout:
        """The layout of a parameter's precise weights."""
        return self._precise[name].layout

    @torch.no_grad()
    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Replace trainable weights, by name, given as large as in `model`; no rank may be reading them. Collective."""
        self.storage.load(values)
        self.master_weights.load(values)
        self.storage.wait_written()
        torch.autograd.graph.increment_version(list(self.trainable.values()))
        self.edits.accept_edits()

    def model_state_dict(self) -> dict[str, Any]:
        """The model's `state_dict`, without copies. Raises TaskError if it lacks a trained weight."""
        with untracked_access():  # state_dict() hooks may read placeholders; a copy is refused below
            tensors = self.model.state_dict(keep_vars=True)
        missing = [name for name in self.trainable if name not in tensors]
        # Precise weights that rest elsewhere replace the model's own by identity, so a copy would not be found.
        in_model = self.storage.whole_params.keys() - self.master_weights.param_names
        missing += [n for n, p in self.trainable.items() if n not in in_model and tensors.get(n, p) is not p]
        if missing:
            got = f"a state_dict() without {missing[0]} itself{f' and {len(missing) - 1} more' if missing[1:] else ''}"
            need = "every trainable parameter itself under its own name, not a copy"
            raise TaskError(Problem(got, need, "the state_dict() of torch.nn.Module"), where="the model")
        return tensors

    def unsharded(
        self, kind: str, stage: int = 0, sink: UnshardSink = NO_UNSHARD_SINK
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, a stage of the model may run. Collective if weights rest split.

        `sink` is called before shards are read.
        """
        return self.storage.phase(kind, stage, sink)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable weight by name, whole, one at a time; read only. Collective: all ranks iterate to the end."""
        for name, weight in self.master_weights.replace_in(self.storage.named_weights()):
            yield name, self.whole_tensors.whole(name, weight).to(weight.device)


# ---- model specs ----------------------------------------------------------------------------------------------------


def model_specs(
    model: nn.Module, optimizer: Optimizer, shards: Mapping[str, Sequence[TensorShard]] = NO_SHARDS
) -> list[ParamSpec]:
    """The trained parameters, in order of definition. `shards`: of the places of the tensor axis; empty: tp = 1."""
    trainable = trainable_parameters(model)
    return param_specs(trainable, group_indices(optimizer, trainable), shards)


def num_parameters(model: nn.Module, shards: Mapping[str, TensorShard]) -> int:
    """The elements of all parameters of the whole model. `shards`: what this rank holds of those that are cut."""
    shapes = (shards[name].shape if name in shards else p.shape for name, p in model.named_parameters())
    return sum(map(math.prod, shapes))


def update_spec(
    model: nn.Module, optimizer: Optimizer, *, clip: float | None = None, counts_states: bool = False
) -> UpdateSpec:
    """How the step updates. `counts_states`: find out how many states there are, by a trial step for each group."""
    groups = range(len(optimizer.param_groups)) if counts_states else ()
    return UpdateSpec(
        clip,
        type(optimizer).__name__,
        is_layerwise=is_layerwise(optimizer),
        num_states=tuple(num_state_tensors(optimizer, group) for group in groups),
        full_precision_params=frozenset(mixed_precision.full_precision_params(model)),
    )
