"""Pipeline axis: which stages of the model this rank has, and the ranks that have the others.

stage  consecutive blocks of the model; ranks that differ on this axis only pass activations and gradients on
place  a rank's index on the axis; it has one stage, or several that are interleaved: s, s + num_places, …
own    what belongs to this rank's stages
Law: a rank keeps the weights of its own stages only. Every weight is that of the pipeline's first rank at the start.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.work.chain import StageMap
from fourfold.axes.pipeline.work.knowledge import Knowledge
from fourfold.axes.pipeline.work.stand_in import StandIn
from fourfold.axes.pipeline.work.tied import CopiedWeights, OwnedWeights, TiedWeights, aliases_of, replace_by_copy
from fourfold.axes.pipeline.work.values import OBJECT, TENSOR, describe, take_apart, tensors_among, without_caches
from fourfold.comm.broadcast_tree import broadcast_tree
from fourfold.comm.communicator import Communicator
from fourfold.comm.edges import StageEdges, connect_pair, make_edges
from fourfold.comm.meter import CommMeter
from fourfold.plan.param_spec import TensorShard
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.proof.attachment import Rank
from fourfold.proof.digests.batches import batch_digest
from fourfold.proof.random_weights import window_weight
from fourfold.torch_kit import mixed_precision
from fourfold.torch_kit.deferred_init import InitialModel, InitialWeights
from fourfold.torch_kit.model_copy import deep_copy
from fourfold.torch_kit.torch_private import own_buffers, own_parameters
from fourfold.words.errors import PlanError, Problem, TaskError


class PipelineAxis(NamedTuple):
    """The pipeline axis of this rank.

    ranks     that differ from this one on this axis only, by place
    skeleton  the whole model with random weights, for dry runs; the model itself if it has one stage
    tied      what the first place and the last one use together
    known     what the first batch has shown
    others    the names in the model's `state_dict` that other stages have, and this one does not
    """

    stages: StageMap
    ranks: Communicator
    edges: StageEdges
    skeleton: nn.Module
    known: Knowledge
    others: frozenset[str] = frozenset()
    tied: TiedWeights = TiedWeights()

    @property
    def place(self) -> int:
        """This rank's index on the axis."""
        return self.ranks.rank

    @property
    def num_places(self) -> int:
        return self.ranks.size

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have other stages."""
        return self.num_places > 1

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.place == self.num_places - 1

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The modules that other places have."""
        return self.stages.modules_elsewhere(self.place)

    def is_own(self, name: str) -> bool:
        """Whether a parameter or buffer is of this rank's stage.

        A buffer of no block is of the last stage, if that writes it, else of the first one.
        """
        if name in self.known.late_buffers:
            return self.is_last
        return not self.is_cut or self.stages.place_of(name) == self.place

    @property
    def aliases(self) -> dict[str, str]:
        """By name of a copy of a tied weight: the weight's own name, which this rank has."""
        own = {alias: name for alias, name in aliases_of(self.stages.ties).items() if self.is_own(name)}
        return own if self.is_cut else {}

    def follow_modes(self, model: nn.Module) -> None:
        """Give the skeleton's modules the modes that those of the model have now: it stands for them in dry runs."""
        for module, like in zip(self.skeleton.modules(), model.modules(), strict=True):
            module.training = like.training

    def check_whole_model(self, call: str, attempt: str) -> None:
        """Raise PlanError unless this rank has the whole model."""
        if self.is_cut:
            need = "pp = 1: here each rank has one stage of the model"
            raise PlanError(Problem(f"{call} with pp = {self.num_places}", need, attempt), where="the plan")

    def restricted(self, state: Any) -> Any:
        """What this rank's stage has of values by name; names that no stage has stay, to be refused."""
        return {name: each for name, each in state.items() if name not in self.others} if self.is_cut else state

    def check_same_inputs(self, inputs: Any) -> None:
        """Raise TaskError, on the ranks of all stages, unless they have the same inputs. Collective."""
        if not self.is_cut:
            return
        if len(set(self.ranks.all_gather_json(batch_digest(inputs)))) > 1:
            got = f"other inputs of the model on some of ranks {', '.join(map(str, self.ranks.ranks))}"
            need = "the same on each of these ranks, which compute one forward together"
            raise TaskError(Problem(got, need, "torch.manual_seed(0) on all of them before they draw tokens"))

    # ---- what other stages have -----------------------------------------------------------------------

    def last_outputs(self, outputs: Any, learn: Callable[[], None]) -> Any:
        """The last stage's outputs, on the ranks of all stages. Collective.

        `learn` finds on each rank in which form they are, where no batch before had this form.
        """
        if not self.is_cut:
            return outputs
        last = self.num_places - 1
        text, described, leaves = "", [], []
        if self.is_last:
            form, leaves = take_apart(without_caches(outputs))
            text, described = form.text, list(map(describe, leaves))
        text, described = self.ranks.all_gather_json([text, described])[last]
        if text not in self.known.outputs:
            learn()
        if text not in self.known.outputs:
            got = f"a call of the model that returns {text}, and another form with other weights"
            need = "dicts, lists and tuples that follow from the inputs: ranks of other stages do not see what they are"
            raise TaskError(Problem(got, need, "pp = 1"), where="the pipeline")
        if objects := [name for kind, name, *_ in described if kind == OBJECT]:
            need = "tensors, numbers and texts, which can be sent to the ranks of other stages"
            raise TaskError(Problem(f"a call of the model that returns a {objects[0]}", need), where="the pipeline")
        tensors = iter(broadcast_tree(self.ranks, tensors_among(leaves), src=last))
        filled = (self._own_copy(next(tensors)) if kind == TENSOR else value[0] for kind, *value in described)
        return self.known.outputs[text].build(filled)

    def _own_copy(self, tensor: Tensor) -> Tensor:
        """A tensor that one place has sent, on this rank's device."""
        return tensor.detach().to(self.ranks.device)

    def all_named(self, own: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of all stages, by name, one at a time. Collective: all ranks iterate to the end."""
        if not self.is_cut:
            yield from own
            return
        for place in range(self.num_places):

            def next_of_place(place: int = place) -> Any:
                return broadcast_tree(self.ranks, next(own, None) if place == self.place else None, src=place)

            for name, tensor in iter(next_of_place, None):
                yield name, self._own_copy(tensor)

    def all_state(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Nested dicts of all stages as one: of tensors and JSON values, by name. Collective."""
        if not self.is_cut:
            return dict(own)
        late = () if self.is_last else self.known.late_buffers
        own = {  # a buffer that is a stand-in was written on an earlier stage, which has it
            kind: {n: v for n, v in state.items() if n not in late and not isinstance(v, StandIn)}
            if kind == "model"
            else state
            for kind, state in own.items()
        }
        merged: dict[str, Any] = {}
        for place in range(self.num_places):
            _merge(merged, broadcast_tree(self.ranks, own, src=place))
        for alias, name in aliases_of(self.stages.ties).items():
            merged["model"][alias] = merged["model"][name]
        return merged


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        else:
            into.setdefault(name, value)


# ---- making it ------------------------------------------------------------------------------------------


class FirstRanksWeights(InitialWeights):
    """Initial weights that are the first pipeline rank's on all of them. Each read is collective among these."""

    def __init__(self, weights: InitialWeights, ranks: Communicator) -> None:
        super().__init__()
        self._weights, self._ranks = weights, ranks

    @property
    def are_deferred(self) -> bool:
        return self._weights.are_deferred

    def whole(self, parameter: nn.Parameter) -> Tensor:
        value = self._weights.whole(parameter)
        self._ranks.broadcast(value)
        return value

    def part(self, parameter: nn.Parameter, shard: TensorShard) -> Tensor | None:
        return self._weights.part(parameter, shard)


@torch.no_grad()
def take_first_ranks_weights(initial: InitialModel, ranks: Communicator) -> InitialModel:
    """The same model with the first pipeline rank's weights, when they are read, and its buffers. Collective."""
    if ranks.size == 1:
        return initial
    for buffer in initial.model.buffers():
        ranks.broadcast(buffer)
    return InitialModel(initial.model, FirstRanksWeights(initial.weights, ranks))


@torch.no_grad()
def _load_own_weights(initial: InitialModel, stages: StageMap, ranks: Communicator) -> None:
    """Give the parameters of this rank's stage their values, one at a time. Collective."""
    for name, parameter in initial.model.named_parameters():
        value = initial.weights.whole(parameter)
        if stages.place_of(name) == ranks.rank:
            parameter.data = value


def cut(rank: Rank) -> PipelineAxis:
    """Leave this rank's stage in its model and optimizer, in place; connect it with its neighbours. Collective."""
    model, stages, ranks = rank.model, rank.stages, rank.world.along("pp")
    if ranks.size == 1:
        return PipelineAxis(stages, ranks, StageEdges(), model, Knowledge(stages))
    if rank.world.along("tp").size == 1:
        _load_own_weights(rank.initial, stages, ranks)
    skeleton = make_skeleton(model, rank.plan.precision, [rank.split_tokens.region])
    names = set(model.state_dict(keep_vars=True))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    copies = []
    if ranks.rank == ranks.size - 1:
        copies = [replace_by_copy(model, aliases, parameters[name]) for name, aliases in stages.ties.items()]
    _drop_other_stages(model, stages, ranks.rank)
    others = frozenset(names - set(model.state_dict(keep_vars=True)))
    kept = {id(p) for p in model.parameters()}
    for group in rank.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]
    edges = make_edges(ranks, rank.meter, choice=rank.transport, is_ring=stages.num_stages > ranks.size)
    tied = _connect_tied(parameters, copies, stages, ranks, rank.meter, rank.transport)
    return PipelineAxis(stages, ranks, edges, skeleton, Knowledge(stages), others, tied)


def _connect_tied(
    parameters: Mapping[str, nn.Parameter],
    copies: Sequence[Tensor],
    stages: StageMap,
    ranks: Communicator,
    meter: CommMeter,
    transport: str,
) -> TiedWeights:
    """The tied weights of this rank. Collective."""
    if not stages.ties:
        return TiedWeights()
    ends = connect_pair(ranks, 0, ranks.size - 1, meter, choice=transport)
    if ends is None:
        return TiedWeights()
    if ranks.rank == 0:
        return OwnedWeights([parameters[name] for name in stages.ties], *ends)
    return CopiedWeights(copies, *ends)


def _drop_other_stages(model: nn.Module, stages: StageMap, place: int) -> None:
    """Remove the parameters of other stages, and the buffers of modules that this stage does not run."""
    chain = stages.chain
    for name, p in list(model.named_parameters(remove_duplicate=False)):
        if stages.place_of(name) != place:
            module, key = _place(model, name)
            own_parameters(module)[key] = None
            if name in chain.own:  # the forward of the module around the chain reads it
                del own_parameters(module)[key]
                vars(module)[key] = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
    outside = [*chain.before, *chain.blocks, *chain.behind]
    kept: dict[bool, set[tuple[nn.Module, str]]] = {True: set(), False: set()}
    for name, _ in model.named_buffers(remove_duplicate=False):
        is_own = stages.place_of(name) == place or not any(name.startswith(f"{each}.") for each in outside)
        kept[is_own].add(_place(model, name))
    for module, key in kept[False] - kept[True]:  # what blocks of several stages share, such as rotary angles, stays
        own_buffers(module)[key] = None


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter or buffer, and its key there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


# ---- skeleton --------------------------------------------------------------------------------------------------------


def make_skeleton(model: nn.Module, precision: str, shared: Iterable[object] = ()) -> nn.Module:
    """A model with all of its modules and weights of nearly no memory, for dry runs on a rank that has one stage.

    precision  the plan's: the skeleton computes as it says
    shared     objects that are not copied; modules and buffers are, and all ranks make the same skeleton
    Raises TaskError if the model cannot be copied.
    """
    full_precision = mixed_precision.full_precision_params(model)
    memo: dict[int, object] = {id(each): each for each in shared}
    for name, p in model.named_parameters():
        dtype = p.dtype
        if precision != "keep" and name not in full_precision:
            dtype = getattr(torch, COMPUTE_FORMATS[precision].dtype)
        memo[id(p)] = nn.Parameter(window_weight(name, p.shape, dtype, p.device), requires_grad=p.requires_grad)
    skeleton = deep_copy(model, model, "with pp > 1, a dry run of all stages is made with the copy", memo)
    if precision != "keep":
        mixed_precision.cast_model(skeleton, precision)
    return skeleton
