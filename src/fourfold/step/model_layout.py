"""Model layout: the trained parameters of a whole model, each with its stage and its parts on the tensor axis.

Law: a meta model has the same layout as the model itself, so that what is shown or refused before a run is what runs.
"""

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from fourfold.axes.pipeline.rules.division import StageSpec
from fourfold.axes.pipeline.work.chain import map_stages
from fourfold.axes.tensor.attach.axis import place_shards
from fourfold.axes.tensor.rules.dims import TensorSpec
from fourfold.model.weights import model_specs
from fourfold.plan.param_spec import ParamSpec


def laid_out_specs(
    model: nn.Module, optimizer: Optimizer, rules: Mapping[str, str], tensor: TensorSpec, stages: StageSpec
) -> list[ParamSpec]:
    """The trained parameters as a plan lays them out. Raises PlanError if it cannot.

    rules           of the tensor axis
    tensor, stages  the plan's
    """
    return on_stages(model, tensor_specs(model, optimizer, rules, tensor), stages)


def tensor_specs(
    model: nn.Module, optimizer: Optimizer, rules: Mapping[str, str], tensor: TensorSpec
) -> list[ParamSpec]:
    """The trained parameters without stages. Raises PlanError if the model cannot be split."""
    return model_specs(model, optimizer, place_shards(model, rules, tensor))


def on_stages(model: nn.Module, specs: list[ParamSpec], stages: StageSpec) -> list[ParamSpec]:
    """The trained parameters of a model on the stages of a plan. `specs`: as they are without stages."""
    if stages.num_stages == 1:
        return specs
    found = map_stages(model, stages)
    return [spec._replace(stage=found.stage_of(spec.name), is_tied=spec.name in found.ties) for spec in specs]
