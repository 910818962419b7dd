"""A model on the meta device as one rank of a plan has it, with a batch for it.

cut     by the first tensor rank's shards, with fake peers (`fake_ranks.py`)
tokens  the first sequence rank's: so many as each has
Law: shapes and dtypes are those of a run; nothing has values.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.analysis.task_facts.fake_ranks import META, FakeTensorGroup, FakeTensorRanks
from fourfold.parts import mixed_precision
from fourfold.parts.deferred_init import InitialModel
from fourfold.parts.tensor.cut import cut_model
from fourfold.parts.tensor.residual import split_residual
from fourfold.parts.tensor.split_region import SplitRegion
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.plan.tensor_residual import ResidualLayout
from fourfold.step.batch import POSITION_KEYS, has_token_dim
from fourfold.step.meta_model import try_meta_model
from fourfold.step.tensor.tensor_axis import model_layout, model_residual
from fourfold.step.tensor_tree import tree_map
from fourfold.words.errors import PlanError, Problem, TaskError
from fourfold.words.task import Task


class LaidOutModel(NamedTuple):
    """`region`: of the tensor axis; None: the model is whole. `residual`: where its hidden tensors are split."""

    model: nn.Module
    group: FakeTensorGroup
    region: SplitRegion | None
    residual: ResidualLayout = ResidualLayout()


def lay_out(task: Task, plan: Plan) -> LaidOutModel:
    """The model for a plan's tp, residual and precision. Raises PlanError or TaskError."""
    model = try_meta_model(task)
    if model is None or not all(p.is_meta for p in model.parameters()):
        got = "a model that cannot be made on the meta device"
        need = "a model whose constructor needs no values: what it costs is found without memory"
        raise TaskError(Problem(got, need, "shapes in the constructor, values in the initialization"))
    group = FakeTensorGroup(plan.tp)
    found = LaidOutModel(model, group, None)
    if plan.tp > 1:
        found = _cut(model, task.tensor, plan, group)
    if plan.precision != "keep":
        _cast(model, plan.precision)
    return found


def _cut(model: nn.Module, rules: Mapping[str, str], plan: Plan, group: FakeTensorGroup) -> LaidOutModel:
    layout = model_layout(model, rules, plan.tensor_spec)
    residual = model_residual(model, layout, plan.residual)
    region = SplitRegion(group)
    cut_model(InitialModel(model), layout, region, FakeTensorRanks(), lambda name: True)
    split_residual(model, residual, region)
    return LaidOutModel(model, group, region, residual)


def _cast(model: nn.Module, precision: str) -> None:
    dtype, excluded = getattr(torch, COMPUTE_FORMATS[precision].dtype), mixed_precision.full_precision_params(model)
    mixed_precision.cast_model(model, precision)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in excluded and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


class FakeBatch(NamedTuple):
    """Of one sample, with a batch dim. `num_tokens`: of the whole sample, if its inputs have positions."""

    inputs: Any
    targets: Any
    num_tokens: int | None

    def of(self, num_samples: int, plan: Plan) -> tuple[Any, Any]:
        """Inputs and targets of so many samples, on the meta device, with the tokens of one sequence rank."""
        tokens = self.tokens_of_rank(plan)
        lengths = () if tokens is None or self.num_tokens is None else (self.num_tokens, tokens)
        expand = functools.partial(_on_meta, num_samples=num_samples, lengths=lengths)
        return tree_map(self.inputs, expand), tree_map(self.targets, expand)

    def tokens_of_rank(self, plan: Plan) -> int | None:
        """Of a sample; None: samples are not split over sequence ranks. Raises PlanError."""
        if plan.sp == 1:
            return None
        if self.num_tokens is None:
            need = f"inputs that are a dict with {' or '.join(POSITION_KEYS)}"
            raise PlanError(Problem(f"sp = {plan.sp} and inputs without positions", need, "sp = 1"), where="the plan")
        return plan.sequence_spec.padded_length(self.num_tokens) // plan.sp


def _on_meta(tensor: Tensor, *, num_samples: int, lengths: Sequence[int]) -> Tensor:
    shape = [num_samples, *tensor.shape[1:]]
    if lengths and has_token_dim(tensor, lengths[0]):
        shape[1] = lengths[1]
    return torch.empty(shape, dtype=tensor.dtype, device=META)
