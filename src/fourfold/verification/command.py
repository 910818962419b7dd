"""Verify: the training of a plan, compared step by step with that of one device: same model, loss and batches.

exact      both in float64, without dropout; a probe (one step of plain gradient descent at rate 1) shows the gradient
precision  the plan's own, compared with float64: the bound is from what it does to one device
descent    of a plan that compresses or rounds gradients in transit: plain gradient descent in float64, whose change of
           the weights is what was applied
Law: a plan whose training must equal one device's is compared number by number; any other is refused with the reason.
What was applied equals, with what error feedback holds back, one device's gradient at the same weights; without error
feedback it differs by what the rounding does to one device.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.axes.context.attach.check import NOT_CHECKED
from fourfold.comm.codec.protocol import RESIDUAL_KEY
from fourfold.comm.init import world
from fourfold.feed.data_input import open_data
from fourfold.feed.feed import Feed
from fourfold.model.batch import num_samples, slice_samples
from fourfold.optim.lr_scheduler import SteppedScheduler
from fourfold.orders.sample_order import shard_range
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.step.argument_checks import check_plan_argument
from fourfold.trainer.lr_factors import task_lr_factor
from fourfold.trainer.run_length import with_sizes
from fourfold.trainer.settings import make_settings
from fourfold.verification.comparison import FACTOR, GRADIENT, LOSS, TOLERANCE, WEIGHT, Comparison, VerifyResult
from fourfold.verification.one_device import (
    Batches,
    Lockstep,
    OneDevice,
    Training,
    buffers_by_kind,
    copy_with_hooks,
    disable_dropout,
    loss_tensor,
    mesh_state,
    rounding_bound,
    run_on_mesh,
    title,
    to_float64_model,
)
from fourfold.words import argument_checks
from fourfold.words.errors import PlanError, Problem, SettingError
from fourfold.words.task import Task, check_task

# ---- what a plan applies that rounds its gradients -------------------------------------------------------------------


DESCENT_RATE = 2.0**-10  # small enough to train on, and a power of two: the difference of weights is divided by it


def _compare_descent(training: Training, batches: Batches, result: VerifyResult) -> bool:
    """Compare what each step applies with the gradient at the weights before it. Returns whether this is rank 0."""
    plan, training = training.plan, training.by_descent(DESCENT_RATE)
    cast = training.cast
    result.bound = _descent_bound(plan, cast)
    uncompressed = 'codec = "none"' if plan.codec != "none" else 'reduce_dtype = "keep"'
    result.notes.append(
        f"by plain gradient descent at rate {DESCENT_RATE:.0e}: for the optimizer, verify with {uncompressed}"
    )
    comparison = Comparison(result, compute_eps=0.0 if cast is None else torch.finfo(cast).eps)
    step = training.on_mesh()
    one, parts = (training.on_one_device(), training.on_one_device()) if step.rank == 0 else (None, None)
    before, first_count = step.state_dict(), 0.0
    for number, (local, whole) in enumerate(batches(step.optimizer, False), 1):
        loss = run_on_mesh(training, step, local)
        after = step.state_dict()
        state = mesh_state(step, after)
        if one is not None and parts is not None:
            one.load_weights(before["model"])
            want = {LOSS: loss_tensor(one.backward([whole])), GRADIENT: one.gradients(), **buffers_by_kind(one.model)}
            first_count = first_count or float(one.count)
            applied = _applied(before, after, one, factor=first_count / float(one.count))
            got = {LOSS: loss_tensor(loss), GRADIENT: applied, **state}
            rounded = None
            if cast is not None:
                parts.load_weights(before["model"])
                errors = _rounding_errors(parts, one.count, _pieces(whole, plan), cast)
                rounded = {**want, GRADIENT: {name: grad + errors[name] for name, grad in one.gradients().items()}}
            comparison.add(number, got, want, rounded)
        before = after
    result.randomness += [] if one is None else one.randomness
    return one is not None


def _descent_bound(plan: Plan, cast: torch.dtype | None) -> str:
    if cast is None:
        return (
            f"{TOLERANCE:.0e} · max(1, |b|), in float64: what the ranks apply, and what error feedback holds back, add "
            "up to the gradient of one device at the same weights"
        )
    name = str(cast).removeprefix("torch.")
    parts = plan.dp * plan.microbatches
    return (
        f"{FACTOR:.0f} times what {name} does to one device, by tensor: the root mean square of the difference between "
        f"a sum in {name} of the gradients of {parts} parts of the batch, and their sum in float64"
    )


def _applied(
    before: Mapping[str, Any], after: Mapping[str, Any], one: OneDevice, *, factor: float
) -> dict[str, Tensor]:
    """The gradient that a step has applied, and the change of what error feedback holds back, by name.

    factor: the first step's count of the loss, by which what is held back was divided, over this step's
    """
    found = {}
    for name in one.gradients():
        applied = (before["model"][name] - after["model"][name]) / DESCENT_RATE
        held = after["codec"].get(name, {}).get(RESIDUAL_KEY)
        if held is not None:
            earlier = before["codec"].get(name, {}).get(RESIDUAL_KEY, torch.zeros_like(held))
            applied = applied + ((held - earlier).sum(0) * factor).view(applied.shape)
        found[name] = applied
    return found


def _pieces(whole: Any, plan: Plan) -> Iterator[Any]:
    """The parts of a global batch whose gradients are summed."""
    for rank in range(plan.dp):
        own = slice_samples(whole, *shard_range(0, num_samples(whole), plan.dp, rank))
        for index in range(plan.microbatches):
            yield slice_samples(own, *shard_range(0, num_samples(own), plan.microbatches, index))


def _rounding_errors(one: OneDevice, count: Any, pieces: Iterator[Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """What is lost where the gradients of the pieces are rounded and summed in a dtype."""
    exact = {name: torch.zeros_like(grad) for name, grad in one.gradients().items()}
    sums = {name: total.to(dtype) for name, total in exact.items()}
    for piece in pieces:
        if num_samples(piece):
            one.optimizer.zero_grad()
            with one.computing():
                (one.loss_sum(piece).total / count).backward()
            for name, gradient in one.gradients().items():
                exact[name] += gradient
                sums[name] += gradient.to(dtype)
    return {name: sums[name].to(total.dtype) - total for name, total in exact.items()}


# ---- a whole training ------------------------------------------------------------------------------------------------


def check_verifiable(plan: Plan) -> None:
    """Raise PlanError for a plan whose training is not meant to equal one device's."""
    comparable = {
        "sync": ("step", "ranks that have the same weights after every step"),
        "edge": ("none", "activations that arrive as they were sent"),
    }
    problems = [
        Problem(f'{name} = "{getattr(plan, name)}": trains differently from one device', need, f'{name} = "{value}"')
        for name, (value, need) in comparable.items()
        if getattr(plan, name) != value
    ]
    if plan.batch_norm == "local":
        need = "statistics of the whole batch"
        got = 'batch_norm = "local": trains differently from one device'
        problems.append(Problem(got, need, 'batch_norm = "sync", or GroupNorm'))
    if plan.is_asynchronous:
        got = f'schedule = "{plan.schedule}": trains differently from one device'
        problems.append(Problem(got, "batches that use weights without missing updates", 'schedule = "1f1b"'))
    if plan.codec != "none" and (plan.precision, plan.reduce_dtype) != ("keep", "keep"):
        got = f'codec = "{plan.codec}" with another precision: two roundings, of which each would hide the other'
        need = "one at a time"
        problems.append(Problem(got, need, 'precision = "keep", reduce_dtype = "keep"; then codec = "none"'))
    if problems:
        raise PlanError(problems, where="the plan to verify")


def compare(training: Training, batches: Batches, *, name: str) -> VerifyResult | None:
    """Train on the mesh and on one device; rank 0 gets the comparison. Collective."""
    model, optimizer = copy_with_hooks(training.model, training.optimizer)
    training = dataclasses.replace(training, model=model, optimizer=optimizer)
    result = VerifyResult(name, num_dropouts=disable_dropout(training.model))
    if not training.has_precision:
        to_float64_model(training.model)
        if training.plan.reduce_dtype == "fp32":  # which rounds nothing of a model in float32
            training = dataclasses.replace(training, plan=dataclasses.replace(training.plan, reduce_dtype="keep"))
    is_main = _compare_descent(training, batches, result) if training.is_descent else _train(training, batches, result)
    if training.plan.cp > 1:
        result.notes.append(f"the dry run of cp = {training.plan.cp} does not see {NOT_CHECKED}")
    return result if is_main else None


def _train(training: Training, batches: Batches, result: VerifyResult) -> bool:
    """Compare a probe's gradient, and a training by the user's optimizer. Returns whether this is rank 0."""
    plan = training.plan
    compute = COMPUTE_FORMATS.get(plan.precision)
    eps = 0.0 if compute is None else torch.finfo(getattr(torch, compute.dtype)).eps
    if compute is not None:
        result.bound = rounding_bound(plan.precision)
    _probe(training.by_descent(1.0), batches, Comparison(result, compute_eps=eps))
    step = training.on_mesh()
    one = training.on_one_device() if step.rank == 0 else None
    rounded = training.on_one_rank() if one is not None and training.has_precision else None
    lockstep = Lockstep(step, Comparison(result, compute_eps=eps), one, rounded)
    for local, whole in batches(step.optimizer, True):
        lockstep.run(functools.partial(run_on_mesh, training, step, local), [whole])
    result.randomness += [] if one is None else one.randomness
    return one is not None


def _probe(training: Training, batches: Batches, comparison: Comparison) -> None:
    """Compare the change of the weights by one step at rate 1, which is the gradient. Collective."""
    step = training.on_mesh()
    before = step.state_dict()["model"]
    with contextlib.closing(batches(step.optimizer, False)) as pairs:  # type: ignore[type-var]
        local, whole = next(pairs)
    run_on_mesh(training, step, local)
    after = step.state_dict()["model"]
    if step.rank:
        return
    one = training.on_one_device()
    one.backward([whole])
    want = one.gradients()
    rounded = None
    if training.has_precision:
        rank = training.on_one_rank()
        rank.step([whole])
        rounded = {GRADIENT: {name: before[name] - rank.state()[WEIGHT][name] for name in want}}
    comparison.add(1, {GRADIENT: {name: before[name] - after[name] for name in want}}, {GRADIENT: want}, rounded)


# ---- a task, and objects of a program ---------------------------------------------------------------------


def verify(task: Task, plan: Plan, *, seed: int = 0, name: str = "the task") -> VerifyResult | None:
    """Train `task.steps` steps on the plan's mesh, and on rank 0 alone; rank 0 gets the comparison. Collective.

    Raises PlanError for a plan that cannot be compared, and whatever a training raises.
    """
    check_task(task)
    check_plan_argument(plan)
    if problems := argument_checks.seed_problems(seed):
        raise SettingError(problems, where="the settings")
    check_verifiable(plan)
    torch.manual_seed(seed)
    source = open_data(task.data(), where="the task's data").train
    sizes = with_sizes(make_settings(task), task, source)
    task = dataclasses.replace(task, steps=sizes.steps, epochs=None, batch_size=sizes.batch_size)
    options: dict[str, Any] = {"batch_size": sizes.batch_size, "seed": seed, "drop_last": sizes.drop_last}
    step_options = {"clip": task.clip, "seed": seed, "tensor": task.tensor}
    training = Training(task.model(), task.loss, task.optimizer, plan, step_options)

    def batches(optimizer: torch.optim.Optimizer, has_schedule: bool) -> Iterator[tuple[Any, Any]]:
        local, whole = Feed(source, plan, **options).repeat(), Feed.single_rank(source, **options).repeat()
        with contextlib.closing(local), contextlib.closing(whole):  # type: ignore[type-var]
            for _ in _scheduled(task, optimizer) if has_schedule else range(sizes.steps):
                yield next(local), next(whole)

    return compare(training, batches, name=title(name, plan, sizes.steps))


def verify_batches(training: Training, batches: Sequence[Any]) -> VerifyResult | None:
    """As `verify`, of a model, a loss and an optimizer, on global batches. Collective."""
    check_verifiable(training.plan)
    plan = training.plan

    def pairs(optimizer: torch.optim.Optimizer, has_schedule: bool) -> Iterator[tuple[Any, Any]]:
        for whole in batches:
            index = plan.mesh.coordinates(world().rank)["dp"]
            yield slice_samples(whole, *shard_range(0, num_samples(whole), plan.dp, index)), whole

    return compare(training, pairs, name=title(type(training.model).__name__, plan, len(batches)))


def _scheduled(task: Task, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """The numbers of the steps; each step's learning rate is set before its number is yielded."""
    assert task.steps is not None
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    scheduler = None if task.scheduler is None else SteppedScheduler(task.scheduler, optimizer, steps=task.steps)
    for number in range(task.steps):
        if task.schedule is not None:
            for group, lr in zip(optimizer.param_groups, base_lrs, strict=True):
                group["lr"] = lr * task_lr_factor(task, task.steps, number)
        yield number
        if scheduler is not None:
            scheduler.step_done()
