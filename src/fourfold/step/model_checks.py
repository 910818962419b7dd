"""Model checks: whether a plan can be carried out with a model, a loss and an optimizer on these ranks.

Whether the fields of the plan go together is decided without torch, in `plan/check.py`.

Law: no silent fallback. What a plan asks for happens, or is refused: before anything is built, all problems at once.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fourfold.parts import mixed_precision
from fourfold.parts.comm import transports
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.data.flat_params import param_specs
from fourfold.parts.optim.user_optimizer import is_layerwise
from fourfold.parts.torch_private import BatchNormBase, is_compiled
from fourfold.plan.batch_norm import SYNC
from fourfold.plan.check import (
    combination_problems,
    layerwise_problems,
    model_loss_problems,
    param_problems,
    size_problems,
)
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.step.batch_norm import (
    FREEZE_HINT,
    FrozenBatchNorms,
    NormWatch,
    SyncBatchNorms,
    frozen_norms,
    uses_batch_stats,
)
from fourfold.words.errors import PlanError, Problem, TaskError


def check_plan_on_ranks(model: nn.Module, plan: Plan, communicator: Communicator, *, clip: float | None = None) -> None:
    """Raise PlanError with every reason why the plan cannot be carried out with this model on these ranks."""
    problems = size_problems(plan, communicator.size) + model_plan_problems(model, plan, clip=clip)
    if problems:
        raise PlanError(problems, where="the plan")
    transports.check_transport_device(plan.transport, communicator.device.type)


def check_plan_for_model(model: nn.Module, plan: Plan, *, clip: float | None) -> None:
    """Raise PlanError with every reason why the plan cannot be carried out with this model, on any ranks."""
    problems = model_plan_problems(model, plan, clip=clip)
    if problems:
        raise PlanError(problems, where="the plan")


def check_model_loss(loss: Callable[[Any, Any], Any] | None, plan: Plan) -> None:
    """Raise TaskError for a model's own loss if ranks have only some tokens of a sample."""
    if loss is None and (problems := model_loss_problems(plan)):
        raise TaskError(problems, where="the loss")


def model_plan_problems(model: nn.Module, plan: Plan, *, clip: float | None) -> list[Problem]:
    """Every problem of the plan by itself, and of the plan with this model."""
    return model_problems(model, plan) + combination_problems(plan, clip=clip)


def check_update_timing(optimizer: Optimizer, plan: Plan, *, skip_nan: int = 0) -> None:
    """Raise PlanError if the plan updates buckets before all is known that their updates need."""
    problems = layerwise_problems(plan, type(optimizer).__name__) if is_layerwise(optimizer) else []
    if plan.is_asynchronous and skip_nan:
        got = f"schedule = {plan.schedule} with skip_nan = {skip_nan}"
        need = "updates that wait for the loss of all ranks"
        problems.append(Problem(got, need, "skip_nan = 0, or schedule = 1f1b"))
    if problems:
        raise PlanError(problems, where="the plan")


def check_specs(plan: Plan, specs: Sequence[ParamSpec]) -> None:
    """Raise PlanError if the plan cannot be carried out with these parameters, as the tensor axis splits them."""
    problems = param_problems(plan, specs)
    if problems:
        raise PlanError(problems, where="the plan")


def model_problems(model: nn.Module, plan: Plan) -> list[Problem]:
    """Every problem of the plan with this model."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    problems = _lazy_problems(model) or param_problems(plan, param_specs(trainable, {}))
    problems += _embedding_problems(model, plan) + _cast_problems(model)
    norms = [name for name, module in model.named_modules() if uses_batch_stats(module)]
    parts = plan.batch_split.num_parts
    if norms and plan.batch_norm == "refuse" and parts > 1:
        got = f"batch normalization at {', '.join(norms[:3])}{' …' if len(norms) > 3 else ''}"
        need = f"no statistics over a batch that is split into {parts} parts"
        attempt = f'{SYNC}, {FREEZE_HINT}, GroupNorm, or batch_norm = "local" (not the same training)'
        problems.append(Problem(got, need, attempt))
    return problems + _process_group_problems(model, plan) + _compiled_problems(model, plan)


def watch_norms(model: nn.Module, plan: Plan, elsewhere: Sequence[str] = ()) -> NormWatch:
    """The checks of a model's normalizations, of those that this plan would refuse if they were not frozen.

    `elsewhere`: modules that other pipeline stages have.
    """
    parts = plan.batch_split.num_parts
    if plan.batch_norm == "sync":
        return SyncBatchNorms(model, elsewhere)
    return FrozenBatchNorms(frozen_norms(model) if plan.batch_norm == "refuse" and parts > 1 else [], parts)


def _lazy_problems(model: nn.Module) -> list[Problem]:
    """Parameters and buffers must have shapes before they are laid over ranks."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    lazy = [name for name, tensor in tensors if torch.nn.parameter.is_lazy(tensor)]
    if not lazy:
        return []
    got = (
        f"lazy modules that have not been called: {', '.join(lazy[:3])}{' …' if len(lazy) > 3 else ''} without a shape"
    )
    return [Problem(got, "parameters with shapes", "one forward of a sample before the model is passed")]


def _cast_problems(model: nn.Module) -> list[Problem]:
    """A model that an earlier TrainStep has cast to two bytes: only that step has its float32 weights."""
    name = mixed_precision.find_cast_module(model)
    if name is None:
        return []
    need = "float32 weights, which only that step has"
    attempt = 'a new model, and model.load_state_dict(step.state_dict()["model"]) with that step'
    return [Problem(f"weights that an earlier TrainStep has rounded, at {name}", need, attempt)]


def _embedding_problems(model: nn.Module, plan: Plan) -> list[Problem]:
    """Embedding options that depend on all indices of the batch: a part of the batch has only its own."""
    embeddings = [
        (n or "the model", m) for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    ]
    parts, problems = plan.batch_split.num_parts, []
    if parts > 1 and (names := [n for n, m in embeddings if m.scale_grad_by_freq and m.weight.requires_grad]):
        got = f"scale_grad_by_freq at {', '.join(names[:3])}, and a batch that is split into {parts} parts"
        need = "gradients that do not depend on how often an index occurs in the batch: a part counts only its own"
        problems.append(Problem(got, need, "scale_grad_by_freq=False"))
    names = [n for n, m in embeddings if m.max_norm is not None]
    if names and plan.reduce_group_size > 1:
        got = f"max_norm at {', '.join(names[:3])}, and samples on {plan.reduce_group_size} ranks"
        need = "weights that forward does not change: each rank would renormalize only the rows of its own samples"
        problems.append(Problem(got, need, "max_norm=None, and F.normalize of the vectors after the lookup"))
    elif names and plan.precision != "keep":
        got = f'max_norm at {", ".join(names[:3])}, and precision = "{plan.precision}"'
        need = "weights that forward does not change: it sees rounded copies, not the weights that are updated"
        problems.append(Problem(got, need, "max_norm=None, and F.normalize of the vectors after the lookup"))
    return problems


def _process_group_problems(model: nn.Module, plan: Plan) -> list[Problem]:
    """A SyncBatchNorm may have a process group of its own: statistics of some ranks."""
    norms = [(n or "the model", m) for n, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)]
    names = [name for name, norm in norms if norm.process_group is not None]
    if not names or plan.batch_norm != "sync":
        return []
    got = f"{SYNC} and its own process group at {', '.join(names[:3])}{' …' if names[3:] else ''}"
    return [Problem(got, "statistics of all ranks, which one device has", "SyncBatchNorm(…, process_group=None)")]


def _compiled_problems(model: nn.Module, plan: Plan) -> list[Problem]:
    """Fourfold sees neither which weights compiled code uses, nor its calls of attention and batch normalization."""
    by_name = {name or "the model": module for name, module in model.named_modules() if is_compiled(module)}
    compiled = list(by_name)
    has_norms = any(isinstance(each, BatchNormBase) for module in by_name.values() for each in module.modules())
    if not compiled:
        return []
    where = f"compiled code at {', '.join(compiled[:3])}{' …' if len(compiled) > 3 else ''}"
    sees_weights = "to see when a weight is used, which compiled code hides"
    rules = [
        (plan.update == "in_forward", 'update = "in_forward"', sees_weights, 'update = "after"'),
        (plan.zero == 3, "zero = 3", sees_weights, "zero = 2"),
        (
            plan.tp > 1,
            f"tp = {plan.tp}",
            "to replace layers, which compiled code has inlined",
            "tp = 1",
        ),
        (plan.pp > 1, f"pp = {plan.pp}", "hooks of its own in each forward, which compiled code ignores", "pp = 1"),
        (plan.sp > 1, f"sp = {plan.sp}", "to see each call of attention, which compiled code hides", "sp = 1"),
        (
            plan.batch_norm == "sync" and has_norms,
            SYNC,
            "to see each call of batch normalization, which compiled code hides",
            "compiling parts of the model without it",
        ),
    ]
    return [Problem(f"{got} and {where}", need, attempt) for is_set, got, need, attempt in rules if is_set]
