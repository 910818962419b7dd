"""Model checks: whether a plan can be carried out with a model, a loss and an optimizer on these ranks.

Law: no silent fallback. What a plan asks for happens, or is refused: before anything is built, all problems at once.
Law: nothing that the user has set on the optimizer is silently ignored. A flat update calls neither `optimizer.step`
nor its hooks, and keeps its own optimizer states; step hooks are called if each rank has all gradients and weights: see
`optim/user_optimizer.py`.

Whether the fields of the plan go together is decided without torch, in `plan/check.py`.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

from fourfold.axes.data.work.weight_storage import param_specs
from fourfold.comm import transports
from fourfold.comm.communicator import Communicator
from fourfold.model.batch_statistics import FrozenBatchNorms, NormWatch, SyncBatchNorms, frozen_norms, uses_batch_stats
from fourfold.optim.option_tracker import OptionTracker
from fourfold.optim.user_optimizer import has_custom_step, is_layerwise
from fourfold.plan.check import (
    combination_problems,
    layerwise_problems,
    model_trait_problems,
    param_problems,
    size_problems,
    step_hook_conflicts,
)
from fourfold.plan.model_traits import ModelTraits, own_loss_problems
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.proof.digests.build import check_same_build
from fourfold.step.argument_checks import StepOptions
from fourfold.step.model_layout import laid_out_specs
from fourfold.torch_kit import mixed_precision
from fourfold.torch_kit.shared_memory import check_weights_apart
from fourfold.torch_kit.torch_private import (
    BatchNormBase,
    has_any_hook,
    has_step_hooks,
    is_compiled,
    state_dict_hooks,
    step_post_hooks,
    step_pre_hooks,
)
from fourfold.words.errors import OptimizerError, PlanError, Problem, TaskError

# ---- user's optimizer -----------------------------------------------------------------------------------------------


USE_WRAPPER = "ff.DistributedOptimizer, which calls the optimizer's own step()"


def check_user_optimizer(optimizer: Optimizer, hook_conflicts: Mapping[str, str]) -> None:
    """Raise OptimizerError for whatever of a new optimizer a flat update would ignore.

    `hook_conflicts`: the plan's `step_hook_conflicts`.
    """
    problems = _problems(optimizer, hook_conflicts)
    if optimizer.state and not _is_fresh(optimizer):
        problems.append(_state_problem())
    if problems:
        raise OptimizerError(problems, where="the optimizer")


def refuse_own_state_dict(optimizer: Optimizer) -> None:
    """Make the optimizer's own `state_dict` raise: it has the options only, and would be saved as if it were all."""
    setattr(optimizer, "state_dict", _raise_no_state)  # noqa: B010


def _raise_no_state() -> NoReturn:
    got = "optimizer.state_dict(), which has the options alone"
    need = "the optimizer states too: the step keeps them in flat buffers"
    raise OptimizerError(Problem(got, need, "step.state_dict(), on all ranks"))


def _is_fresh(optimizer: Optimizer) -> bool:
    """Whether the optimizer has made no step: Adagrad has states from the start."""
    steps = [state.get("step") for state in optimizer.state.values()]
    # On the meta device states have no values.
    return isinstance(optimizer, Adagrad) and not any(step is None or (not step.is_meta and step) for step in steps)


class OptimizerWatch:
    """Finds changes of an optimizer after the build."""

    def __init__(self, optimizer: Optimizer, hook_conflicts: Mapping[str, str]) -> None:
        self._optimizer, self._hook_conflicts = optimizer, hook_conflicts
        self.options = OptionTracker(optimizer)
        """The options of the optimizer's groups, which the call of every step carries."""
        self._initial_params = [list(group["params"]) for group in optimizer.param_groups]
        self._initial_state_id, self._checked_step_functions = self._state_id(), self._step_functions()

    def _state_id(self) -> tuple[object, ...]:
        """What must not change. It is compared in every step, so it must be cheap."""
        return id(self._optimizer.state), len(self._optimizer.state)

    def _has_initial_params(self) -> bool:
        """Whether every group still has its parameters of the build."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._initial_params):
            return False
        # By identity: == would compare values.
        pairs = [(group["params"], initial) for group, initial in zip(groups, self._initial_params, strict=True)]
        return all(len(now) == len(initial) and all(map(operator.is_, now, initial)) for now, initial in pairs)

    def _step_functions(self) -> tuple[object, object]:
        """The functions that `optimizer.step()` calls."""
        return self._optimizer.__dict__.get("step"), type(self._optimizer).step

    def problems(self) -> list[Problem]:
        """Changes of the optimizer since the build that an update would ignore."""
        problems, steps = [], self._step_functions()
        if steps != self._checked_step_functions or has_any_hook(self._optimizer):
            problems = _problems(self._optimizer, self._hook_conflicts)
            self._checked_step_functions = self._checked_step_functions if problems else steps
        if not self._has_initial_params():
            got = "other parameters in the optimizer than at the build, or in other groups"
            problems.append(Problem(got, "the groups of the build", "a new TrainStep"))
        if self._state_id() != self._initial_state_id:
            problems.append(_state_problem())
        return problems


def _state_problem() -> Problem:
    need = "one without state: updates keep their own optimizer states, in flat buffers"
    attempt = f"ff.parallelize before the optimizer's first step, step.load_state_dict(…), or {USE_WRAPPER}"
    return Problem("an optimizer that has already made steps, or loaded a state", need, attempt)


def _problems(optimizer: Optimizer, hook_conflicts: Mapping[str, str]) -> list[Problem]:
    problems = []
    before, after = step_pre_hooks(optimizer), step_post_hooks(optimizer)
    if (before or after) and hook_conflicts:
        kinds = " and ".join([*(["a step pre-hook"] if before else []), *(["a step post-hook"] if after else [])])
        kinds += "" if has_step_hooks(optimizer) else " of all optimizers"
        need = "all gradients and weights on every rank when the hook is called"
        attempt = f"{', '.join(hook_conflicts.values())}, or {USE_WRAPPER}"
        problems.append(Problem(f"{kinds} with {', '.join(hook_conflicts)}", need, attempt))
    if has_custom_step(optimizer):
        got = f"{type(optimizer).__name__} with its own step()"
        problems.append(Problem(got, "the step() of its class: updates run on flat buffers", USE_WRAPPER))
    if state_dict_hooks(optimizer):
        need = "no hook: step.state_dict() and checkpoints do not call it"
        problems.append(
            Problem("a state_dict hook of the optimizer", need, "a change of what step.state_dict() returns")
        )
    return problems


# ---- model checks ---------------------------------------------------------------------------------------------------


def join_mesh(
    communicator: Communicator,
    model: nn.Module,
    loss: Callable[[Any, Any], Any] | None,
    plan: Plan,
    options: StepOptions,
) -> Communicator:
    """The ranks on the plan's mesh, if all of them build the same step, and can. Collective.

    Raises PlanError, and TaskError for weights that share memory.
    """
    compared = options.compared(shares_samples=plan.mesh.size > plan.dp)
    check_same_build(communicator, "ff.parallelize", model, plan=plan, options=compared, loss=loss)
    check_plan_on_ranks(model, plan, communicator, clip=options.clip)
    check_weights_apart(model)
    return communicator.on_mesh(plan.mesh)


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
    if loss is None and (problems := own_loss_problems(plan.cp)):
        raise TaskError(problems, where="the loss")


def model_plan_problems(model: nn.Module, plan: Plan, *, clip: float | None) -> list[Problem]:
    """Every problem of the plan by itself, and of the plan with this model."""
    return model_problems(model, plan) + combination_problems(plan, clip=clip)


def check_update_timing(optimizer: Optimizer, plan: Plan, *, skip_nan: int = 0) -> None:
    """Raise PlanError if the plan updates buckets before all is known that their updates need."""
    problems = layerwise_problems(plan, type(optimizer).__name__) if is_layerwise(optimizer) else []
    if plan.is_asynchronous and skip_nan:
        got = f'schedule = "{plan.schedule}" with skip_nan = {skip_nan}'
        need = "updates that wait for the loss of all ranks"
        problems.append(Problem(got, need, 'skip_nan = 0, or schedule = "1f1b"'))
    if problems:
        raise PlanError(problems, where="the plan")


def check_optimizer(
    optimizer: Optimizer, model: nn.Module, plan: Plan, tensor: Mapping[str, str], *, skip_nan: int = 0
) -> list[ParamSpec]:
    """The trained parameters as the plan lays them out. Raises PlanError or OptimizerError if they cannot be, or if
    this optimizer cannot update them so. `tensor`: the rules of the tensor axis."""
    specs = laid_out_specs(model, optimizer, tensor, plan.tensor_spec, plan.stage_spec)
    if problems := param_problems(plan, specs):
        raise PlanError(problems, where="the plan")
    check_update_timing(optimizer, plan, skip_nan=skip_nan)
    check_user_optimizer(optimizer, step_hook_conflicts(plan))
    return specs


def model_problems(model: nn.Module, plan: Plan) -> list[Problem]:
    """Every problem of the plan with this model."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    problems = _lazy_problems(model) or param_problems(plan, param_specs(trainable, {}))
    return problems + _cast_problems(model) + model_trait_problems(plan, model_traits(model))


def model_traits(model: nn.Module) -> ModelTraits:
    """What of a model not every plan can be carried out with, in the present modes of its modules."""
    modules = [(name or "the model", module) for name, module in model.named_modules()]
    embeddings = [(name, each) for name, each in modules if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    compiled = {name: each for name, each in modules if is_compiled(each)}
    norms = [(name, each) for name, each in modules if isinstance(each, nn.SyncBatchNorm)]
    return ModelTraits(
        batch_norms=tuple(name for name, each in modules if uses_batch_stats(each)),
        own_group_norms=tuple(name for name, each in norms if each.process_group is not None),
        frequency_scaled=tuple(n for n, each in embeddings if each.scale_grad_by_freq and each.weight.requires_grad),
        renormalized=tuple(name for name, each in embeddings if each.max_norm is not None),
        compiled=tuple(compiled),
        compiles_norms=any(isinstance(part, BatchNormBase) for each in compiled.values() for part in each.modules()),
    )


def watch_norms(model: nn.Module, plan: Plan, elsewhere: Sequence[str] = ()) -> list[NormWatch]:
    """The checks of a model's normalizations, of those that this plan would refuse if they were not frozen.

    `elsewhere`: modules that other pipeline stages have.
    """
    parts = plan.batch_split.num_parts
    if plan.batch_norm == "sync":
        return [SyncBatchNorms(model, elsewhere)]
    frozen = frozen_norms(model) if plan.batch_norm == "error" and parts > 1 else []
    return [FrozenBatchNorms(frozen, parts)] if frozen else []


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
