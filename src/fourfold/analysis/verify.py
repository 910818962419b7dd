"""Verify: the training of a plan compared with that of one device, on the same task and data.

exact      in float64 and complex128 throughout, even if a model asks for float32, and without dropout
probe      one step of plain gradient descent at rate 1: the change of the weights is the gradient
deviation  |a − b| / max(1, |b|), the largest of a tensor
Law: a plan whose training must equal one device's is compared number by number; any other is refused with the reason.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.feed.batches import Batch
from fourfold.feed.data_input import open_data
from fourfold.feed.feed import Feed
from fourfold.parts.comm.init import world
from fourfold.parts.optim.lr_scheduler import SteppedScheduler
from fourfold.parts.torch_private import DropoutBase
from fourfold.plan.plan import Plan
from fourfold.step.argument_checks import check_plan_argument
from fourfold.step.batch import num_samples, unpack_batch
from fourfold.step.batch_statistics import own_statistics
from fourfold.step.dry_run.float64_mode import Float64Mode
from fourfold.step.loss_sum import sum_loss
from fourfold.step.model_call import call_model, model_loss
from fourfold.step.parallelize import parallelize
from fourfold.step.tensor_tree import tree_map
from fourfold.trainer.lr_factors import task_lr_factor
from fourfold.trainer.run_length import with_sizes
from fourfold.trainer.settings import make_settings
from fourfold.words import argument_checks
from fourfold.words.errors import PlanError, Problem, SettingError
from fourfold.words.task import Task, check_task

TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """How far the plan's training deviates from one device's: losses by step, gradients and weights by name.

    has_randomness  the model drew random numbers although dropout was off: every mesh draws others
    """

    loss_deviations: list[float]
    grad_deviations: dict[str, float]
    weight_deviations: dict[str, float]
    num_dropouts: int
    has_randomness: bool

    @property
    def max_deviation(self) -> float:
        deviations = (*self.loss_deviations, *self.grad_deviations.values(), *self.weight_deviations.values())
        return float("inf") if any(deviation != deviation for deviation in deviations) else max(deviations)


def check_verifiable(plan: Plan) -> None:
    """Raise PlanError for a plan whose training is not meant to equal one device's."""
    comparable = {
        "codec": ("none", "gradients that arrive as they were sent"),
        "sync": ("step", "ranks that have the same weights after every step"),
        "reduce_dtype": ("keep", "gradients that are summed in float64"),
        "edge": ("none", "activations that arrive as they were sent"),
        "precision": ("keep", "float64, in which rounding does not hide a mistake"),
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
        got = f"schedule = {plan.schedule}: trains differently from one device"
        problems.append(Problem(got, "batches that use weights without missing updates", "schedule = 1f1b"))
    if problems:
        raise PlanError(problems, where="the plan to verify")


def verify(task: Task, plan: Plan, *, seed: int = 0) -> VerifyResult | None:
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
    model = _to_float64_model(task.model())
    num_dropouts = _disable_dropout(model)
    # Both trainings begin with these weights. They are this rank's; only rank 0 compares.
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    options: dict[str, Any] = {"batch_size": sizes.batch_size, "seed": seed, "drop_last": sizes.drop_last}
    probe = _probe_task(task)
    with Float64Mode():
        mesh_probed, _ = _train_on_mesh(probe, copy.deepcopy(model), plan, Feed(source, plan, **options), seed=seed)
        mesh_weights, mesh_losses = _train_on_mesh(
            task, copy.deepcopy(model), plan, Feed(source, plan, **options), seed=seed
        )
        if world().rank:
            return None
        rng_state = torch.get_rng_state()
        probe_model = copy.deepcopy(model)
        with own_statistics(probe_model), own_statistics(model):
            probed, _ = _train_on_one_device(probe, probe_model, Feed.single_rank(source, **options))
            weights, losses = _train_on_one_device(task, model, Feed.single_rank(source, **options))
        has_randomness = not torch.equal(rng_state, torch.get_rng_state())
    return VerifyResult(
        loss_deviations=[abs(a - b) / max(1.0, abs(b)) for a, b in zip(mesh_losses, losses, strict=True)],
        grad_deviations={n: _max_deviation(initial[n] - mesh_probed[n], initial[n] - probed[n]) for n in initial},
        weight_deviations={n: _max_deviation(mesh_weights[n], weights[n]) for n in initial},
        num_dropouts=num_dropouts,
        has_randomness=has_randomness,
    )


def _probe_task(task: Task) -> Task:
    """The task with one step, which moves the weights by the gradient."""
    descent = functools.partial(torch.optim.SGD, lr=1.0)
    changes: dict[str, Any] = {"epochs": None, "clip": None, "schedule": None, "scheduler": None}
    return dataclasses.replace(task, steps=1, optimizer=descent, **changes)


def _train_on_mesh(
    task: Task, model: nn.Module, plan: Plan, feed: Feed, *, seed: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a training by the plan. Collective."""
    names = [name for name, _ in model.named_parameters()]  # with pp > 1, the step's model has those of its stages
    step = parallelize(model, task.loss, task.optimizer, plan, clip=task.clip, seed=seed, tensor=task.tensor)
    losses = [step(batch).loss for batch in _batches_with_lr(task, step.optimizer, feed)]
    state = step.state_dict()["model"]
    return {name: state[name].cpu() for name in names}, losses


def _train_on_one_device(task: Task, model: nn.Module, feed: Feed) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a training in this process, with plain torch."""
    optimizer = task.optimizer(list(model.parameters()))
    losses = []
    for batch in _batches_with_lr(task, optimizer, feed):
        inputs, targets = unpack_batch(batch)
        outputs = call_model(model, inputs)
        value = model_loss(outputs, inputs) if task.loss is None else task.loss(outputs, targets)
        loss = sum_loss(value, num_samples(batch))
        mean = loss.total / loss.count
        optimizer.zero_grad()
        mean.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        losses.append(mean.item())
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def _batches_with_lr(task: Task, optimizer: torch.optim.Optimizer, feed: Feed) -> Iterator[Any]:
    """The batches of all steps, in float64; each step's learning rate is set before its batch is yielded."""
    assert task.steps is not None
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    scheduler = None if task.scheduler is None else SteppedScheduler(task.scheduler, optimizer, steps=task.steps)
    batches: Any = feed.repeat()
    with contextlib.closing(batches):
        for number in range(task.steps):
            if task.schedule is not None:
                for group, lr in zip(optimizer.param_groups, base_lrs, strict=True):
                    group["lr"] = lr * task_lr_factor(task, task.steps, number)
            batch = next(batches)
            samples = batch.samples
            yield Batch.wrap(tree_map(dict(batch) if isinstance(batch, dict) else tuple(batch), _to_float64), samples)
            if scheduler is not None:
                scheduler.step_done()


def _to_float64_model(model: nn.Module) -> nn.Module:
    """The model in float64 and complex128."""
    model.double()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():  # `double` leaves complex tensors as they are
            tensor.data = tensor.data.to(torch.complex128)
    return model


def _to_float64(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _max_deviation(a: Tensor, b: Tensor) -> float:
    """The largest |a − b| / max(1, |b|), with moduli for complex numbers."""
    a, b = _to_float64(a), _to_float64(b)
    return ((a - b).abs() / b.abs().clamp(min=1.0)).max().item() if a.numel() else 0.0


def _disable_dropout(model: nn.Module) -> int:
    """Set every dropout probability in a model to 0; returns how many there were."""
    num_dropouts = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_probability = name == "p" if isinstance(module, DropoutBase) else "drop" in name
            if is_probability and type(value) is float and value > 0.0:
                setattr(module, name, 0.0)
                num_dropouts += 1
    return num_dropouts
