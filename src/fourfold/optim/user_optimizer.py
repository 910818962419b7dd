"""The user's optimizer: given, or made by the user's factory, and checked for what its update needs on flat buffers.

element-wise  an update in which no element depends on another: it may run on flat buffers as it is
layer-wise    an update in which an element depends on two norms of its parameter: see `lars_lamb`
Law: an optimizer that trains every parameter exactly once, in one of these two ways, is accepted. Others are refused.
Law: an option that would make every weight NaN or infinite in the first update is refused before that update.

pre-hook   called after all gradients are reduced and clipped, before the first weight changes; may change `.grad`
post-hook  called after all weights are updated; may change them in place
Law: a hook sees what it would see in one process: the model's parameters and, in `.grad`, the gradient of the global
batch, as this rank's own copy. Access to anything else raises.
Law: whatever torch, a scheduler or a GradScaler reads or sets on the proxy, it reads or sets on the wrapped optimizer,
except the attributes that the proxy's own class gives it until `_is_built` is set.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.memory_order import shaped
from fourfold.comm.reduce.protocol import GradReducer
from fourfold.optim.lars_lamb import LAYERWISE
from fourfold.torch_kit.torch_private import (
    StepHook,
    avoid_dynamo_import,
    has_any_hook,
    step_post_hooks,
    step_pre_hooks,
    step_without_wrappers,
)
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import OptimizerError, Problem

# ---- option checks -------------------------------------------------------------------------------------------------

# These multiply what is added to a weight. Others may be infinite on purpose, for example a bound on the step size.
FINITE_OPTIONS = ("lr", "weight_decay", "momentum", "dampening", "lr_decay", "eps")
_TORCH = Path(torch.__file__).parent


def call_factory(factory: Callable[[Any], Any], parameters: Any) -> Any:
    """`factory(parameters)`. Raises OptimizerError for options that torch refuses, for example a negative rate."""
    try:
        with noting(f"  in the optimizer's function, {describe_function(factory)}"):
            return factory(parameters)
    except (TypeError, ValueError) as error:
        if not comes_from_torch(error.__traceback__):
            raise  # An error of the user's own code: its traceback says more.
        got = f"{describe_function(factory)}: {error}"
        raise OptimizerError(Problem(got, "options that the optimizer accepts")) from error


def check_options(optimizer: Optimizer) -> None:
    """Raise OptimizerError with all options that are not finite, of all groups."""
    if problems := option_problems(optimizer):
        raise OptimizerError(problems, where="the optimizer")


def option_problems(optimizer: Optimizer) -> list[Problem]:
    """All options that are not finite, of all groups."""
    problems = []
    for number, group in enumerate(optimizer.param_groups):
        where = f" in group {number}" if len(optimizer.param_groups) > 1 else ""
        for name, value in _numeric_options(group):
            if math.isnan(value) or (name in FINITE_OPTIONS and math.isinf(value)):
                attempt = "lr = 1e-3" if name == "lr" else ""
                problems.append(Problem(f"{name} = {value}{where}", "a finite number", attempt))
    return problems


def _numeric_options(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, float) or (isinstance(each, Tensor) and each.numel() == 1 and not each.is_meta):
                yield name, float(each)


def comes_from_torch(traceback: TracebackType | None) -> bool:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and _TORCH in Path(traceback.tb_frame.f_code.co_filename).parents


# ---- the user's optimizer ------------------------------------------------------------------------------------------


ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
OptimizerSource = OptimizerFactory | Optimizer
"""What the user gives: a function that makes the optimizer of the model's parameters, or this optimizer itself."""


def support_problems(optimizer: Optimizer) -> list[Problem]:
    """Why the optimizer's update cannot run on flat buffers, where it is made again from class and options."""
    kind = type(optimizer)
    if kind not in (*ELEMENTWISE, *LAYERWISE):
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        ours = ", ".join(f"ff.optim.{cls.__name__}" for cls in LAYERWISE)
        attempt = "one of these, or ff.DistributedOptimizer, which runs any optimizer as it is"
        need = f"an element-wise optimizer of torch.optim ({known}), or {ours}"
        base = next((cls.__name__ for cls in kind.__mro__ if cls in (*ELEMENTWISE, *LAYERWISE)), None)
        return [Problem(kind.__name__ if base is None else f"{kind.__name__}, a subclass of {base}", need, attempt)]
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return [Problem("differentiable = True", "an update outside autograd", "differentiable = False")]
    return []


def is_layerwise(optimizer: Optimizer) -> bool:
    """Whether the update depends on which elements belong to one parameter."""
    return isinstance(optimizer, LAYERWISE)


def build_optimizer(source: OptimizerSource, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The user's optimizer over the original parameters. Raises OptimizerError if it cannot run on flat buffers.

    An optimizer that is given is returned as it is, so that its schedulers go on acting on it.
    """
    avoid_dynamo_import()
    optimizer = source if isinstance(source, Optimizer) else call_factory(source, parameters)
    if not isinstance(optimizer, Optimizer):
        attempt = "functools.partial(torch.optim.AdamW, lr=3e-4)"
        raise OptimizerError(Problem(repr(optimizer), "a function from parameters to a torch optimizer", attempt))
    problems = support_problems(optimizer)
    problems += option_problems(optimizer) + _param_problems(optimizer, parameters, is_given=optimizer is source)
    if problems:
        raise OptimizerError(problems, where="the optimizer")
    return optimizer


def _param_problems(optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, is_given: bool) -> list[Problem]:
    """Require every trainable parameter of the model once, and no other."""
    problems, own_ids = [], {id(p) for p in parameters}
    grouped_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    num_foreign = len(grouped_ids - own_ids)
    if num_foreign:
        need = "an optimizer of model.parameters()" if is_given else "an optimizer of the parameters it is given"
        attempt = "the optimizer made last, when the model has all its parameters" if is_given else ""
        problems.append(Problem(f"{num_foreign} parameters that are not the model's", need, attempt))
    # torch only warns, and updates them once for each mention.
    num_repeated = sum(len(group["params"]) for group in optimizer.param_groups) - len(grouped_ids)
    if num_repeated:
        got = f"{num_repeated} parameters that are in a group more than once"
        problems.append(Problem(got, "every parameter once", "each parameter once, as in model.parameters()"))
    num_missing = sum(p.requires_grad and id(p) not in grouped_ids for p in parameters)
    if num_missing:
        got = f"{num_missing} trainable parameters that are in no group"
        problems.append(Problem(got, "every trainable parameter in a group", "p.requires_grad_(False) for them"))
    return problems


def num_state_tensors(optimizer: Optimizer, group: int) -> int:
    """How many tensors of a parameter's shape an update keeps for each parameter of a group."""
    state, trial = _trial_state(optimizer, group)
    return sum(isinstance(value, Tensor) and value.shape == trial.shape for value in state.values())


def state_keys(optimizer: Optimizer, group: int) -> set[str]:
    """What an update keeps for each parameter of a group, by name."""
    return set(_trial_state(optimizer, group)[0])


@torch.no_grad()
def _trial_state(optimizer: Optimizer, group: int) -> tuple[dict[str, Any], nn.Parameter]:
    """The state after an update of a small parameter with a group's options, and that parameter."""
    # Found by trying: it depends on options (momentum, amsgrad), and optimizers do not say it.
    trial = nn.Parameter(torch.zeros(2))
    trial.grad = torch.zeros(2)
    options = {k: v for k, v in optimizer.param_groups[group].items() if k != "params"}
    kind: Any = type(optimizer)
    flat: Optimizer = kind([trial], lr=options["lr"])
    flat.param_groups[0].update(options)
    step_without_wrappers(flat)
    return flat.state[trial], trial


def group_indices(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """The index of each parameter's group, by name. Parameters in no group are left out."""
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: group_of[id(p)] for name, p in parameters.items() if id(p) in group_of}


# ---- Step hooks: the hooks of the user's optimizer, around an update over flat buffers ------------------------------


def has_custom_step(optimizer: Optimizer) -> bool:
    """Whether user code has replaced `step`, on the instance or its class. A torch scheduler's wrapper is allowed."""
    step: Any = optimizer.__dict__.get("step")
    if step is not None:
        # A scheduler's wrapper is known by its globals: `functools.wraps` would copy any other mark.
        while getattr(step, "__globals__", None) is vars(lr_scheduler):
            step = step.__wrapped__
        if getattr(step, "__func__", step) is not type(optimizer).step:
            return True
    step = type(optimizer).step
    while step is not None:
        if not step.__module__.startswith(("torch.", "fourfold.")) or not _is_torch_or_fourfold(step):
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def _is_torch_or_fourfold(function: Any) -> bool:
    return function.__globals__.get("__name__", "").startswith(("torch.", "fourfold."))


class _ForbiddenState:
    """Replaces `optimizer.state` while hooks run: states rest in flat buffers, not by parameter."""

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        need = "hooks that use parameters and gradients only: the states are stored in flat buffers"
        raise OptimizerError(Problem("the state of the optimizer in a step hook", need, "ff.DistributedOptimizer"))

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = __getattr__ = _raise


class StepHooks:
    """The step hooks of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        parameters: Sequence[Sequence[nn.Parameter]],
        *,
        is_unbucketed: bool,
        can_skip_params: bool,
    ) -> None:
        """`parameters` are by bucket and slot.

        is_unbucketed    gradients are in `.grad` anyway, and the update reads them there
        can_skip_params  the update can leave out a parameter that has no gradient
        """
        self._optimizer, self._buckets, self._parameters = optimizer, buckets, parameters
        self._is_unbucketed, self._can_skip_params = is_unbucketed, can_skip_params
        self.bucket_grads: Sequence[Tensor | None] = [None] * len(buckets)
        """By bucket, after the pre-hooks: the gradient to update with in place of the sums; None: use the sums."""
        self._saved_grads: list[tuple[nn.Parameter, Tensor | None]] = []

    @property
    def has_any_hook(self) -> bool:
        return has_any_hook(self._optimizer)

    def run_pre_hooks(
        self, reducer: GradReducer, used: Sequence[float] | None, factor: float
    ) -> Sequence[float] | None:
        """Call the pre-hooks, after all reductions have ended. Not collective.

        used    by slot of all buckets: on how many ranks it has a gradient; None = all
        factor  what the sums must still be multiplied by
        Returns `used` as the hooks leave it.
        """
        if not self._is_unbucketed:
            self.bucket_grads = [self._full_grad(bucket, reducer, factor) for bucket in self._buckets]
            self._expose_grads(used)
        self._call_hooks(step_pre_hooks(self._optimizer))
        if not self._is_unbucketed:
            used = self._collect_grads(used)
        self._saved_grads = [(p, p.grad) for p in self._all_params()]
        return used

    def run_post_hooks(self) -> None:
        """Call the post-hooks, after all weights are updated. Afterwards no parameter has a gradient."""
        for parameter, gradient in self._saved_grads:
            parameter.grad = gradient
        self._call_hooks(step_post_hooks(self._optimizer))
        for parameter in self._all_params():
            parameter.grad = None
        self._saved_grads, self.bucket_grads = [], [None] * len(self._buckets)

    def _all_params(self) -> list[nn.Parameter]:
        return [parameter for members in self._parameters for parameter in members]

    @torch.no_grad()
    def _full_grad(self, bucket: Bucket, reducer: GradReducer, factor: float) -> Tensor:
        first = self._parameters[bucket.index][0]
        # A copy: a hook may write into it, while other ranks still read the sums.
        full = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        for view in reducer.reduced_views(bucket.index):
            full[view.start : view.stop] = view.flat
        return full if factor == 1.0 else full.mul_(factor)

    def _views(self) -> list[Tensor]:
        return [
            shaped(flat[slot.start : slot.stop], parameter)
            for bucket, flat, members in zip(self._buckets, self.bucket_grads, self._parameters, strict=True)
            for slot, parameter in zip(bucket.slots, members, strict=True)
            if flat is not None
        ]

    def _expose_grads(self, used: Sequence[float] | None) -> None:
        for index, (parameter, view) in enumerate(zip(self._all_params(), self._views(), strict=True)):
            parameter.grad = view if used is None or used[index] else None

    @torch.no_grad()
    def _collect_grads(self, used: Sequence[float] | None) -> Sequence[float] | None:
        """Copy what the hooks have put into `.grad` to the flat copies."""
        names = [slot.name for bucket in self._buckets for slot in bucket.slots]
        has_grad = [parameter.grad is not None for parameter in self._all_params()]
        if not (self._can_skip_params or all(has_grad)):
            got = f"a step pre-hook that sets the gradient of {names[has_grad.index(False)]} to None"
            raise OptimizerError(Problem(got, "a gradient for every parameter", 'unused = "allow", or a gradient of 0'))
        for parameter, view in zip(self._all_params(), self._views(), strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        return used if all(has_grad) and used is None else has_grad

    def _call_hooks(self, hooks: Sequence[StepHook]) -> None:
        optimizer: Any = self._optimizer
        args, state = (optimizer,), optimizer.state
        optimizer.state = _ForbiddenState()
        try:
            for hook in hooks:
                result = hook(optimizer, args, {})
                if result is not None and result != (args, {}):
                    got = "a step hook that returns other arguments for step"
                    raise OptimizerError(Problem(got, "None: the update takes no arguments", "ff.DistributedOptimizer"))
        finally:
            optimizer.state = state


# ---- Optimizer proxy: an optimizer that stands for another one, whose state, groups and attributes it shows as its ow


class OptimizerProxy(torch.optim.Optimizer):
    """Forwards to `_optimizer`. A subclass sets `_optimizer` first, and `_is_built` last."""

    _optimizer: torch.optim.Optimizer
    _is_built: bool

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # type: ignore[override]
        self._optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # type: ignore[override]
        self._optimizer.state = state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes that the proxy does not have, such as a GradScaler's scale, on the wrapped optimizer."""
        if self._is_own_attribute(name):
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own_attribute(name):
            super().__delattr__(name)
        else:
            delattr(self._optimizer, name)

    def _is_own_attribute(self, name: str) -> bool:
        attributes = self.__dict__
        return name in attributes or "_is_built" not in attributes or hasattr(type(self), name)
