"""User's optimizer: refuse whatever of it a flat update would ignore, when a step is built and in every step.

A flat update calls neither `optimizer.step` nor its hooks, and keeps its own optimizer states. Step hooks are called if
each rank has all gradients and weights: see `optim/step_hooks.py`.

Law: nothing that the user has set on the optimizer is silently ignored.
"""

import operator
from collections.abc import Mapping
from typing import NoReturn

from torch.optim import Adagrad, Optimizer

from fourfold.optim.option_tracker import OptionTracker
from fourfold.optim.step_hooks import has_custom_step
from fourfold.torch_kit.torch_private import (
    has_any_hook,
    has_step_hooks,
    state_dict_hooks,
    step_post_hooks,
    step_pre_hooks,
)
from fourfold.words.errors import OptimizerError, Problem

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
