"""Argument checks: wrong arguments of the public functions, found before a rank waits for another.

Law: the arguments of a public function are checked together; the user's model, loss and optimizer are neither called
nor changed.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from fourfold.comm import init
from fourfold.optim.user_optimizer import OptimizerProxy
from fourfold.plan.intervals import DRIFT_CHECK
from fourfold.plan.plan import Plan
from fourfold.words import argument_checks
from fourfold.words.errors import OptimizerError, PlanError, Problem, SettingError

# ---- step options ---------------------------------------------------------------------------------------------------


class StepOptions(NamedTuple):
    """The keywords of `ff.parallelize`, which says what they mean."""

    clip: float | None = None
    seed: int = 0
    skip_nan: int = 0
    same_batches: str = "error"
    drift_check: int = DRIFT_CHECK
    tensor: Mapping[str, str] = {}

    def compared(self, *, shares_samples: bool) -> dict[str, Any]:
        """What must be the same on all ranks: the seed too where ranks share samples, and draw alike for them."""
        return {name: value for name, value in self._asdict().items() if name != "seed" or shares_samples}


class StepKeywords(TypedDict, total=False):
    """The fields of `StepOptions`, as keywords."""

    clip: float | None
    seed: int
    skip_nan: int
    same_batches: str
    drift_check: int
    tensor: Mapping[str, str]


# ---- argument checks ------------------------------------------------------------------------------------------------


WRAPPER_PLAN_FIELDS = ("dp", "bucket_bytes", "unused", "batch_norm", "transport")
"""The fields of a plan that a DistributedOptimizer carries out."""

WRAPPERS = {
    "DistributedDataParallel": "{model}.module",
    "DataParallel": "{model}.module",
    "DDP": "{model} without replicate(…)",
    "DeepSpeedEngine": "{model} before deepspeed.initialize(…)",
    "FullyShardedDataParallel": "{model} before it was wrapped, and zero = 3 in the plan, which splits its weights",
    "FSDPModule": "{model} without fully_shard(…), and zero = 3 in the plan, which splits its weights",
}
"""By the name of a class that lays a model over devices by itself: what to pass instead. By name, since some need
packages that are not installed, or imports that take seconds."""


def check_arguments(
    *, model: Any, loss: Any, optimizer: Any, plan: Any, clip: Any = None, seed: Any = 0, skip_nan: Any = 0, tensor: Any
) -> None:
    """Raise SettingError with every wrong argument of `parallelize`, which moves a model from the CPU by itself."""
    problems = (
        _model_or_function_problems(model, optimizer)
        + loss_argument_problems(loss)
        + optimizer_argument_problems(optimizer)
        + plan_argument_problems(plan)
    )
    problems += argument_checks.positive_problems("clip", clip, optional=True, attempt="clip=1.0")
    problems += argument_checks.seed_problems(seed) + argument_checks.int_problems("skip_nan", skip_nan, minimum=0)
    problems += argument_checks.tensor_rule_problems("tensor", tensor)
    if problems:
        raise SettingError(problems, where="the arguments of parallelize")


def _model_or_function_problems(model: Any, optimizer: Any) -> list[Problem]:
    """Require a model, or a function that makes one; its result is checked when it is made."""
    if isinstance(model, nn.Module) or not callable(model):
        return model_argument_problems(model) or device_problems(model, init.world().device, may_be_on_cpu=True)
    if isinstance(optimizer, Optimizer):
        got = "a function that makes the model, and an optimizer of parameters that exist already"
        return [Problem(got, argument_checks.OPTIMIZER_NEED, argument_checks.OPTIMIZER_ATTEMPT)]
    return []


def optimizer_argument_problems(optimizer: Any) -> list[Problem]:
    """Require a torch optimizer, or a function that makes one."""
    attempt = "torch.optim.AdamW(model.parameters(), lr=3e-4)"
    if isinstance(optimizer, OptimizerProxy):
        got = f"optimizer = a {type(optimizer).__name__}"
        return [Problem(got, "the torch optimizer itself: a step reduces the gradients by itself", attempt)]
    if isinstance(optimizer, Optimizer):
        return []
    need = "a torch optimizer, or a function from parameters to one"
    return argument_checks.callable_problems("optimizer", optimizer, need=need, attempt=attempt)


def check_wrapper_arguments(*, optimizer: Any, model: Any, plan: Any, device: torch.device) -> None:
    """Raise SettingError with every wrong argument of `DistributedOptimizer`. `device`: that of this rank."""
    problems = model_argument_problems(model) or device_problems(model, device, may_be_on_cpu=False)
    problems += plan_argument_problems(plan)
    if not isinstance(optimizer, Optimizer):
        need = "a torch optimizer of the model's parameters"
        attempt = "ff.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)"
        problems.insert(0, Problem(argument_checks.format_argument("optimizer", optimizer), need, attempt))
    if problems:
        raise SettingError(problems, where="the arguments of DistributedOptimizer")


def check_wrapper_plan(plan: Plan) -> None:
    """Raise PlanError with every field that is not at its default and that DistributedOptimizer does not carry out."""
    default, need = Plan(), f"with DistributedOptimizer only {', '.join(WRAPPER_PLAN_FIELDS)}"
    attempts = {"microbatches": "no_sync()"}
    problems = [
        Problem(f"{name} = {value}", need, attempts.get(name, "ff.parallelize"))
        for name, value in dataclasses.asdict(plan).items()
        if name not in WRAPPER_PLAN_FIELDS and value != getattr(default, name)
    ]
    if problems:
        raise PlanError(problems, where="the plan")


def check_wrapper_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise OptimizerError where the optimizer's parameters are not the model's."""
    foreign = {id(p) for group in optimizer.param_groups for p in group["params"]} - {id(p) for p in model.parameters()}
    if foreign:
        got = f"{len(foreign)} parameters that are not the model's"
        raise OptimizerError(Problem(got, "an optimizer of model.parameters()"))


def check_join_states(states: Any) -> None:
    """Raise SettingError for `states` of `join` that cannot be copied from one rank to another."""
    need = "a list of objects with state_dict() and load_state_dict(), such as schedulers and a GradScaler"
    if not isinstance(states, list | tuple):
        raise SettingError(Problem(argument_checks.format_argument("states", states), need, "states=[scheduler]"))
    lacking = [each for each in states if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))]
    if lacking:
        problems = [Problem(f"a {type(each).__name__} in states", need) for each in lacking]
        raise SettingError(problems, where="the arguments of join")


def check_plan_argument(plan: Any) -> None:
    """Raise PlanError unless `plan` is a Plan or None."""
    if problems := plan_argument_problems(plan):
        raise PlanError(problems)


def plan_argument_problems(plan: Any) -> list[Problem]:
    attempts = {dict: "ff.Plan(**plan)", str: "ff.Plan.from_toml(text)"}
    return argument_checks.instance_problems(
        "plan", plan, Plan, optional=True, attempt=attempts.get(type(plan), "ff.Plan(dp=2)")
    )


def model_argument_problems(model: Any, name: str = "model") -> list[Problem]:
    """Require a model with values, which nothing else lays over devices."""
    if isinstance(model, nn.Module):
        if wrapped := wrapper_problems(model):
            return wrapped
        meta = [name for name, p in model.named_parameters() if p.is_meta]
        if not meta:
            return []
        got = f"a model with {len(meta)} parameters on the meta device, {meta[0]} the first of them"
        # Fourfold has called the task's model() on the meta device before. A model() that caches its result returns
        # that meta model again.
        attempt = 'a model() that makes a new model each time; or model.to_empty(device="cpu"), then initialize it'
        return [Problem(got, "parameters with values", attempt)]
    attempt = "its result: model()" if callable(model) else ""
    return [Problem(argument_checks.format_argument(name, model), "a torch.nn.Module", attempt)]


def wrapper_problems(model: nn.Module) -> list[Problem]:
    """Refuse a model that is laid over devices already, as a whole or in parts."""
    need = "a plain model: Fourfold itself splits weights and reduces gradients, which another wrapper would lose"
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        for kind in (cls.__name__ for cls in type(module).__mro__ if cls.__name__ in WRAPPERS):
            found.setdefault(kind, f"model.{name}" if name else "model")
    if found:
        return [Problem(f"{at} in {kind}", need, WRAPPERS[kind].format(model=at)) for kind, at in found.items()]
    split = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
    if not split:
        return []
    got = f"a model whose parameters are split over devices already, {split[0]} the first of them"
    return [Problem(got, need, "the model before it was wrapped or split")]


def device_problems(model: nn.Module, device: torch.device, *, may_be_on_cpu: bool) -> list[Problem]:
    """Require a model on the device of this rank; or, if it is moved from there, on the CPU."""
    allowed = {_place(device), *([("cpu", 0)] if may_be_on_cpu else [])}
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    elsewhere = {name: tensor.device for name, tensor in tensors if _place(tensor.device) not in allowed}
    if not elsewhere:
        return []
    first, places = next(iter(elsewhere)), " and ".join(sorted({str(place) for place in elsewhere.values()}))
    got = f"a model with {len(elsewhere)} tensors on {places}, {first} the first of them"
    attempt = "model.to(ff.world().device), before the optimizer is made"
    if device.type == "cpu" and "cuda" in places:
        attempt += ', or init_process_group("nccl") for GPUs'
    return [Problem(got, f"{device}, the device of this rank", attempt)]


def _place(device: torch.device) -> tuple[str, int]:
    return device.type, device.index or 0


def loss_argument_problems(loss: Any) -> list[Problem]:
    need = "a function (outputs, targets) -> loss, or None for the model's own loss"
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        got = argument_checks.format_argument("loss", loss)
        return [Problem(got, need, f'an instance: {loss.__name__}(reduction="none")')]
    if loss is None:
        return []
    return argument_checks.callable_problems("loss", loss, need=need, attempt='torch.nn.MSELoss(reduction="none")')
