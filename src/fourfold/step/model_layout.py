"""Model layout: the trained parameters of a whole model, each with its stage and its parts on the tensor axis.

Law: a meta model has the same layout as the model itself, so that what is shown or refused before a run is what runs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.plan.update_spec import UpdateSpec
from fourfold.step.model_specs import model_specs, update_spec
from fourfold.step.pipeline.chain import StageMap, map_stages
from fourfold.step.tensor.tensor_axis import place_shards


class WholeModelSpecs(NamedTuple):
    """What lowering needs to know of the whole model and its optimizer."""

    params: Sequence[ParamSpec]
    update: UpdateSpec


def whole_specs(
    model: nn.Module, optimizer: Optimizer, rules: Mapping[str, str], plan: Plan, *, clip: float | None
) -> WholeModelSpecs:
    """The specs of a model that no rank has taken its part of yet."""
    return WholeModelSpecs(plan_specs(model, optimizer, rules, plan), update_spec(model, optimizer, clip=clip))


def plan_stages(model: nn.Module, plan: Plan) -> StageMap:
    """The stages of a model. Raises PlanError if it cannot be divided as the plan says."""
    return map_stages(model, plan.stages, plan.num_stages, plan.pp)


def plan_specs(model: nn.Module, optimizer: Optimizer, rules: Mapping[str, str], plan: Plan) -> list[ParamSpec]:
    """The trained parameters as the plan lays them out. Raises PlanError if it cannot.

    rules  of the tensor axis
    """
    specs = model_specs(model, optimizer, place_shards(model, rules, plan.tensor_spec))
    stages = plan_stages(model, plan)
    return [spec._replace(stage=stages.stage_of(spec.name)) for spec in specs] if plan.pp > 1 else specs
