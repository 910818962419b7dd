"""Verify a script: the user's loop, unchanged, on the ranks of a launcher, compared step by step with one device.

recorded    what `step(batch)` of `ff.parallelize` got on each rank; of a loop with `ff.DistributedOptimizer` see
            `verify_loop`
one device  trains on the ranks' batches, concatenated, from the same weights, with the same optimizer and its options
rounded     the same in the dtype of the script, which says how far that is from float64
Law: the script sees what it would see without this; after some steps it ends.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fourfold.analysis.comparison import Comparison, VerifyResult
from fourfold.analysis.one_device import (
    OneDevice,
    OneRank,
    Reference,
    copied,
    disable_dropout,
    run_step,
    script_precision,
)
from fourfold.analysis.trial import Lockstep, rounding_bound, title
from fourfold.analysis.verify import check_verifiable
from fourfold.analysis.verify_loop import LoopTrial, joined
from fourfold.parts.comm.init import world
from fourfold.parts.optim.user_optimizer import OptimizerSource
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.step import parallelize
from fourfold.step.batch import unpack_batch
from fourfold.step.broadcast_tree import broadcast_tree
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.train_step import TrainStep
from fourfold.words.errors import PlanError, Problem


class Enough(BaseException):
    """All steps have been compared: the script ends."""


class ScriptVerifier:
    """Watches the first step, or the first wrapped optimizer, that a script makes. `result`: on rank 0."""

    def __init__(self, name: str, *, steps: int) -> None:
        self._name, self._steps, self._num_trials = name, steps, 0
        self._trial: StepTrial | LoopTrial | None = None
        self.result = VerifyResult(name)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, a script runs. It ends, without an error, when the steps have been compared."""
        functions = (
            (parallelize, "parallelize", self._parallelize),
            (TrainStep, "__call__", self._call_step),
            (DistributedOptimizer, "__init__", self._wrap),
            (DistributedOptimizer, "_on_backward_end", self._end_backward),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, function in functions:
                stack.enter_context(_replaced(owner, name, function))
            with contextlib.suppress(Enough):
                yield
        if self._num_trials > 1:
            self.result.notes.append(f"the script makes {self._num_trials} steps or optimizers: the first is compared")

    def _parallelize(
        self, make: Callable[..., TrainStep], model: Any, loss: Any, optimizer: Any, *args: Any, **options
    ):
        self._num_trials += 1
        if self._num_trials > 1:
            return make(model, loss, optimizer, *args, **options)
        plan = args[0] if args else options.get("plan")
        plan = plan or Plan(dp=world().size)
        _check_script_plan(plan)
        trial = self._trial = StepTrial(self.result, model, loss, optimizer, plan, options.get("clip"))
        trial.step = make(trial.without_dropout(model), loss, optimizer, *args, **options)
        return trial.step

    def _call_step(self, call: Callable[..., Any], step: TrainStep, batch: Any) -> Any:
        trial = self._trial
        if not isinstance(trial, StepTrial) or trial.step is not step:
            return call(step, batch)
        metrics = trial.run(functools.partial(call, step), batch)
        self._count_step(trial.plan)
        return metrics

    def _wrap(
        self, initialize: Callable[..., None], own: Any, optimizer: Optimizer, model: nn.Module, *args: Any, **rest
    ):
        self._num_trials += 1
        if self._num_trials > 1:
            initialize(own, optimizer, model, *args, **rest)
            return
        self.result.num_dropouts = disable_dropout(model)
        copies = [copied(model, optimizer) for _ in range(2)] if world().rank == 0 else []
        initialize(own, optimizer, model, *args, **rest)
        plan = Plan(dp=world().size)
        self._trial = LoopTrial(own, optimizer, model, copies, self.result, lambda: self._count_step(plan))

    def _end_backward(self, end: Callable[..., None], own: Any) -> None:
        end(own)
        if isinstance(self._trial, LoopTrial) and self._trial.wrapper is own:
            self._trial.note_gradients()

    def _count_step(self, plan: Plan) -> None:
        assert self._trial is not None
        num_steps = self._trial.num_steps
        self.result.title = title(self._name, plan, num_steps, precision=self._trial.precision)
        if num_steps == self._steps:
            raise Enough


def _check_script_plan(plan: Plan) -> None:
    check_verifiable(plan)
    if plan.codec != "none" or (plan.reduce_dtype != "keep" and plan.precision == "keep"):
        got = "a script whose plan compresses or rounds gradients"
        need = "steps whose gradients can be seen: plain gradient descent, which the script does not use"
        raise PlanError(
            Problem(got, need, "ff.verify(model, loss, optimizer, batches, plan)"), where="the plan to verify"
        )


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within, `function(what was there, *args)` is called in its place."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


class StepTrial:
    """The step of a script, and one device that makes the same steps, on rank 0. `step`: set when it is made."""

    step: TrainStep

    def __init__(
        self, result: VerifyResult, model: Any, loss: Any, optimizer: OptimizerSource, plan: Plan, clip: float | None
    ) -> None:
        self.plan, self.num_steps, self.precision, self._eps, self._result = plan, 0, "", 0.0, result
        self._lockstep: Lockstep | None = None
        self._references: list[Reference] = []
        if world().rank:
            return
        with torch.random.fork_rng():
            whole = model if isinstance(model, nn.Module) else model()
        result.num_dropouts = disable_dropout(whole)
        compute = COMPUTE_FORMATS.get(plan.precision)
        self.precision, self._eps = script_precision(whole, None if compute is None else compute.dtype)
        exact, near = (copied(whole, optimizer) for _ in range(2))
        self._references.append(OneDevice(exact[0], loss, exact[1], clip=clip))
        if compute is not None:
            self._references.append(OneRank(near[0], loss, near[1], plan=plan, clip=clip))
        elif self._eps:
            self._references.append(OneDevice(near[0], loss, near[1], clip=clip, is_exact=False))
        if len(self._references) > 1:
            result.bound = rounding_bound(self.precision)

    def without_dropout(self, model: Any) -> Any:
        """The model, or the function that makes it, without dropout."""
        if isinstance(model, nn.Module):
            disable_dropout(model)
            return model

        @functools.wraps(model)
        def make() -> nn.Module:
            made = model()
            disable_dropout(made)
            return made

        return make

    def run(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """One step of the script, and of one device. Collective. Returns what the script gets."""
        if self._lockstep is None:
            state = self.step.state_dict()
            for reference in self._references:
                reference.load(state)
            comparison = Comparison(self._result, compute_eps=self._eps)
            self._lockstep = Lockstep(self.step, comparison, *(self._references or [None]))
        parts, found = self._whole_batch(batch), []

        def run_mesh() -> float:
            return run_step(lambda each: found.append(call(each)) or found[-1], batch)

        self._lockstep.run(run_mesh, parts)
        self.num_steps += 1
        one = self._references[0] if self._references else None
        self._result.randomness = one.randomness if isinstance(one, OneDevice) else []
        return found[-1]

    def _whole_batch(self, batch: Any) -> list[Any]:
        """The batches of all data ranks, as one; or one after the other if samples differ in shape. Collective."""
        mesh, parts = self.plan.mesh, []
        for rank in range(mesh.size):
            if all(index == 0 for axis, index in mesh.coordinates(rank).items() if axis != "dp"):
                inputs, targets = broadcast_tree(self.step.communicator, unpack_batch(batch), src=rank)
                parts.append(inputs if targets is None else (inputs, targets))
        return joined(parts)
