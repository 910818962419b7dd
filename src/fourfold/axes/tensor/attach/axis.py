"""Tensor axis: which part of every parameter this rank holds, and the ranks that hold the others.

whole   a model that is not cut: tp = 1
shards  by parameter: those of all places of the tensor axis, or of this rank's place
Law: the axis is decided here, once. Where it has one place, nothing differs from a plan without it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import nn

from fourfold.axes.tensor.attach.module_specs import module_specs, tied_names
from fourfold.axes.tensor.attach.transformers_rules import rules_of_transformers
from fourfold.axes.tensor.rules.dims import TensorSpec, dims_on_axis
from fourfold.axes.tensor.rules.layout import TensorLayout, tensor_layout
from fourfold.axes.tensor.rules.sequence_parallel import SequenceParallelLayout, sequence_parallel_layout
from fourfold.axes.tensor.work.layers import cut_model
from fourfold.axes.tensor.work.sequence_parallel import split_tokens
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.axes.tensor.work.whole_tensors import WholeTensors
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import MessageTensorGroup, TensorGroup, make_tensor_group
from fourfold.plan.param_spec import TensorShard
from fourfold.proof.attachment import Rank
from fourfold.torch_kit.model_copy import deep_copy


class TensorAxis(NamedTuple):
    """The tensor axis of this rank.

    all_shards  empty for a model that is not cut
    region      through which the layers reach the other ranks
    structure   the modules of the whole model; without weights where it has been cut
    sequence_parallel  where hidden tensors are split over tokens; empty: nowhere
    """

    all_shards: Mapping[str, Sequence[TensorShard]]
    group: TensorGroup
    ranks: Communicator
    region: SplitRegion
    structure: nn.Module
    sequence_parallel: SequenceParallelLayout = SequenceParallelLayout()

    @classmethod
    def whole(cls, model: nn.Module, ranks: Communicator, meter: CommMeter) -> Self:
        """One place, which holds all of the model."""
        group = MessageTensorGroup(meter, ranks.device)
        return cls({}, group, ranks, SplitRegion(group), model)

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold parts of the model."""
        return self.group.size > 1

    @property
    def splits_tokens(self) -> bool:
        """Whether hidden tensors are split over tokens somewhere."""
        return bool(self.sequence_parallel.blocks)

    @property
    def split_params(self) -> frozenset[str]:
        """The parameters of which ranks hold parts."""
        return frozenset(name for name, shard in self.shards.items() if not shard.is_whole)

    def shard_number(self, name: str) -> int:
        """Equal for two ranks that hold the same of a parameter: 0 of one that all ranks hold."""
        shard = self.shards.get(name)
        return 0 if shard is None or shard.local_shape == shard.shape else 1 + self.group.index

    @property
    def whole_tensors(self) -> WholeTensors:
        """Makes tensors as large as the parameters whole, and cuts them."""
        return WholeTensors(self.all_shards, self.ranks)

    @property
    def shards(self) -> Mapping[str, TensorShard]:
        """By parameter: what this rank's place holds."""
        return {name: shards[self.group.index] for name, shards in self.all_shards.items()}


def model_layout(model: nn.Module, rules: Mapping[str, str], spec: TensorSpec) -> TensorLayout:
    """What each place of the tensor axis holds of a model that is not cut. Raises PlanError if it cannot be split.

    Without rules, models of transformers are split by their own.
    """
    rules = rules or rules_of_transformers(model)
    return tensor_layout(module_specs(model), tied_names(model), rules, spec.size, spec.dims, spec.ulysses)


def place_shards(model: nn.Module, rules: Mapping[str, str], spec: TensorSpec) -> Mapping[str, Sequence[TensorShard]]:
    """By parameter of a model that is not cut: the shards of all places; empty if tp = 1. Raises PlanError.

    At tp = 1 too: the dims that the plan puts on the axis must be those of the rules.
    """
    shards = model_layout(model, rules, spec).shards if spec.size > 1 or dims_on_axis(spec.dims) else {}
    return shards if spec.size > 1 else {}


def model_sequence_parallel(model: nn.Module, layout: TensorLayout, splits_tokens: bool) -> SequenceParallelLayout:
    """Where hidden tensors are split over tokens, in a model that is not cut. Raises PlanError if they cannot be.

    splits_tokens  the plan's `sequence_parallel`
    """
    return sequence_parallel_layout(module_specs(model), layout.styles) if splits_tokens else SequenceParallelLayout()


def check_rules(model: nn.Module, rules: Mapping[str, str], spec: TensorSpec) -> None:
    """Raise PlanError if a model cannot be split as the plan says."""
    if place_shards(model, rules, spec):
        model_sequence_parallel(model, model_layout(model, rules, spec), spec.sequence_parallel)


def copy_structure(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have no memory. It shares the buffers. Raises TaskError if it has no copy."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return deep_copy(model, model, "with tp > 1, a dry run compares it with the model that is cut", memo)


def cut(rank: Rank) -> TensorAxis:
    """Cut a rank's model into as many parts as the mesh has tensor ranks, in place. Collective.

    Whole parameters and buffers are then the first tensor rank's, on all. Raises PlanError if it cannot be split,
    TaskError if it cannot be copied: its structure is kept for the dry run.
    """
    model, ranks, spec, stages = rank.model, rank.world.along("tp"), rank.plan.tensor_spec, rank.stages
    if ranks.size == 1:
        place_shards(model, rank.rules, spec)
        return TensorAxis.whole(model, ranks, rank.meter)
    layout = model_layout(model, rank.rules, spec)
    split = model_sequence_parallel(model, layout, spec.sequence_parallel)
    structure = copy_structure(model)
    group = make_tensor_group(ranks, "tensor", rank.meter, choice=rank.transport)
    region = SplitRegion(group)
    pp_index = rank.world.along("pp").rank
    cut_model(rank.initial, layout, region, ranks, lambda name: stages.place_of(name) == pp_index)
    split_tokens(model, split, region)
    return TensorAxis(layout.shards, group, ranks, region, structure, split)
