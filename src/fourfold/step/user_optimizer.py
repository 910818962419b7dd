"""The user's optimizer beside flat updates: what these would leave out is refused, when built and in every step.

A flat update calls neither `optimizer.step` nor its hooks, and keeps states of its own. Step hooks are honoured where
each rank has all gradients and weights; see `parts.optim.step_hooks`.
Law: nothing that the optimizer was told to do is left out without a word.
"""

import operator

from torch.optim import Adagrad, Optimizer

from fourfold.parts.optim.step_hooks import has_custom_step
from fourfold.parts.torch_private import has_any_hook, has_step_hooks, state_dict_hooks, step_post_hooks, step_pre_hooks
from fourfold.plan.plan import Plan
from fourfold.words.errors import OptimizerError, Problem

USE_WRAPPER = "ff.DistributedOptimizer, which calls step() as it is"


def check_user_optimizer(optimizer: Optimizer, plan: Plan) -> None:
    """Raise OptimizerError for what an optimizer as it was made has that a flat update would leave out."""
    problems = _problems(optimizer, plan)
    if optimizer.state and not _is_fresh(optimizer):
        problems.append(_state_problem())
    if problems:
        raise OptimizerError(problems, where="the optimizer")


def _is_fresh(optimizer: Optimizer) -> bool:
    """Whether the states of an optimizer are those it was made with: Adagrad makes them at once."""
    steps = [state.get("step") for state in optimizer.state.values()]
    # On the meta device, before processes start, states have no values.
    return isinstance(optimizer, Adagrad) and not any(step is None or (not step.is_meta and step) for step in steps)


class OptimizerWatch:
    """Watches an optimizer after the build."""

    def __init__(self, optimizer: Optimizer, plan: Plan) -> None:
        self._optimizer, self._plan = optimizer, plan
        self._initial_params = [list(group["params"]) for group in optimizer.param_groups]
        self._initial_state_id, self._checked_step_functions = self._state_id(), self._step_functions()

    def _state_id(self) -> tuple[object, ...]:
        """What may not change; compared in every step, so few and cheap."""
        return id(self._optimizer.state), len(self._optimizer.state)

    def _has_initial_params(self) -> bool:
        """Whether every group has the parameters that it had."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._initial_params):
            return False
        # By identity: to compare tensors would read them.
        pairs = [(group["params"], built) for group, built in zip(groups, self._initial_params, strict=True)]
        return all(len(now) == len(built) and all(map(operator.is_, now, built)) for now, built in pairs)

    def _step_functions(self) -> tuple[object, object]:
        """The functions called by `optimizer.step()`."""
        return self._optimizer.__dict__.get("step"), type(self._optimizer).step

    def problems(self) -> list[Problem]:
        """What has been done to the optimizer since the build that an update would leave out."""
        problems, steps = [], self._step_functions()
        if steps != self._checked_step_functions or has_any_hook(self._optimizer):
            problems = _problems(self._optimizer, self._plan)
            self._checked_step_functions = self._checked_step_functions if problems else steps
        if not self._has_initial_params():
            got = "other parameters in the optimizer than at the build, or in other groups"
            problems.append(Problem(got, "the groups as they were", "a new TrainStep"))
        if self._state_id() != self._initial_state_id:
            problems.append(_state_problem())
        return problems


def _state_problem() -> Problem:
    need = "states that training goes on from: an update keeps its own, in flat buffers"
    return Problem("state in the optimizer itself", need, f"step.load_state_dict(…), or {USE_WRAPPER}")


def _problems(optimizer: Optimizer, plan: Plan) -> list[Problem]:
    problems = []
    before, after = step_pre_hooks(optimizer), step_post_hooks(optimizer)
    if (before or after) and (blocking := _conflicting_fields(plan)):
        kinds = " and ".join([*(["a step pre-hook"] if before else []), *(["a step post-hook"] if after else [])])
        kinds += "" if has_step_hooks(optimizer) else " of all optimizers"
        need = "all gradients and weights on every rank when the hook is called"
        attempt = f"{', '.join(blocking.values())}, or {USE_WRAPPER}"
        problems.append(Problem(f"{kinds} with {', '.join(blocking)}", need, attempt))
    if has_custom_step(optimizer):
        got = f"{type(optimizer).__name__} with a step of its own"
        problems.append(Problem(got, "the step of the class: updates run on flat buffers", USE_WRAPPER))
    if state_dict_hooks(optimizer):
        need = "none: step.state_dict() and checkpoints have a form of their own"
        problems.append(Problem("a state_dict hook of the optimizer", need, "a change of what step.state_dict() gives"))
    return problems


def _conflicting_fields(plan: Plan) -> dict[str, str]:
    """The fields of the plan that step hooks do not go with, and what would."""
    rows = [
        (plan.zero > 0 and plan.num_shards > 1, f"zero = {plan.zero}", "zero = 0"),
        (plan.update != "after", f'update = "{plan.update}"', 'update = "after"'),
        (plan.sync != "step", f'sync = "{plan.sync}"', 'sync = "step"'),
        (plan.precision != "keep", f'precision = "{plan.precision}"', 'precision = "keep"'),
        (plan.offload != "none", f'offload = "{plan.offload}"', 'offload = "none"'),
    ]
    return {got: attempt for holds, got, attempt in rows if holds}
