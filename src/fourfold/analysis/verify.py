"""Verify: the training of a plan beside that of one device, on the same task and data.

exact    in float64 and complex128 throughout, also where a model asks for float32 itself, and without dropout
probe    one step of plain descent at rate 1: what the weights move by is the gradient
far      |a − b| / max(1, |b|), the largest of a tensor
Law: what is inside the law of every mesh is compared, number by number; what is outside is refused with the reason.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.feed.collate import check_data
from fourfold.feed.feed import Batch, Feed
from fourfold.parts.comm.init import world
from fourfold.parts.torch_private import DropoutBase
from fourfold.plan.plan import Plan
from fourfold.step.argument_checks import check_plan_argument
from fourfold.step.batch import num_samples, unpack_batch
from fourfold.step.build import parallelize
from fourfold.step.dry_run.float64_mode import Float64Mode
from fourfold.step.loss_sum import sum_loss
from fourfold.step.model_call import call_model, model_loss
from fourfold.step.tensor_tree import tree_map
from fourfold.words import argument_checks
from fourfold.words.errors import PlanError, Problem, SettingError
from fourfold.words.task import Task, check_task

TOLERANCE = 1e-9
DEFAULT_STEPS = 3


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """How far the plan's training is from one device's: losses by step, gradients and weights by name."""

    loss_deviations: list[float]
    grad_deviations: dict[str, float]
    weight_deviations: dict[str, float]
    num_dropouts: int
    has_randomness: bool
    """Whether the model drew random numbers all the same: then each mesh has other ones."""

    @property
    def max_deviation(self) -> float:
        every = (*self.loss_deviations, *self.grad_deviations.values(), *self.weight_deviations.values())
        return float("inf") if any(far != far for far in every) else max(every)


def check_verifiable(plan: Plan) -> None:
    """Raise PlanError for a plan whose training is not meant to be one device's."""
    apart = "ranks that have the same weights after every step"
    reasons = {
        "codec": (
            "none",
            f'codec = "{plan.codec}"',
            "gradients that arrive as they were",
        ),
        "sync": ("step", f'sync = "{plan.sync}"', apart),
        "reduce_dtype": ("keep", f'reduce_dtype = "{plan.reduce_dtype}"', "gradients that are summed in float64"),
        "precision": ("keep", f'precision = "{plan.precision}"', "float64, in which rounding does not hide a mistake"),
    }
    problems = [
        Problem(f"{got}: another training than one device's", need, f'{name} = "{value}"')
        for name, (value, got, need) in reasons.items()
        if getattr(plan, name) != value
    ]
    if plan.batch_norm == "local":
        need = "statistics of the whole batch"
        problems.append(Problem('batch_norm = "local": another training than one device\'s', need, "GroupNorm"))
    if problems:
        raise PlanError(problems, where="what is to be verified")


def verify(task: Task, plan: Plan, *, seed: int = 0) -> VerifyResult | None:
    """Train `task.steps` steps on the plan's mesh, and on rank 0 alone as well; what is found, there. Collective.

    Raises PlanError for a plan outside the law, and whatever a training raises.
    """
    check_task(task)
    check_plan_argument(plan)
    if problems := argument_checks.seed_problems(seed):
        raise SettingError(problems, where="the settings")
    check_verifiable(plan)
    torch.manual_seed(seed)
    data = task.data()
    check_data(data, where="the task's data")
    source = data.train
    model = _to_float64_model(task.model())
    num_dropouts = _disable_dropout(model)
    # Each of the trainings begins with these weights; rank 0's, for it is rank 0 that compares.
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    how = {"batch_size": task.batch_size, "seed": seed}
    with Float64Mode():
        probed, _ = _train_on_mesh(
            _gradient_task(task), copy.deepcopy(model), plan, Feed(source, plan, **how), seed=seed
        )
        trained, losses = _train_on_mesh(task, copy.deepcopy(model), plan, Feed(source, plan, **how), seed=seed)
        if world().rank:
            return None
        state = torch.get_rng_state()
        alone, _ = _train_on_one_device(_gradient_task(task), copy.deepcopy(model), Feed.single_rank(source, **how))
        expected, their_losses = _train_on_one_device(task, model, Feed.single_rank(source, **how))
        draws = not torch.equal(state, torch.get_rng_state())
    return VerifyResult(
        loss_deviations=[abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, their_losses, strict=True)],
        grad_deviations={name: _max_deviation(first[name] - probed[name], first[name] - alone[name]) for name in first},
        weight_deviations={name: _max_deviation(trained[name], expected[name]) for name in first},
        num_dropouts=num_dropouts,
        has_randomness=draws,
    )


def _gradient_task(task: Task) -> Task:
    """The task with one step, that of the gradient itself."""
    descent = functools.partial(torch.optim.SGD, lr=1.0)
    return dataclasses.replace(task, steps=1, clip=None, optimizer=descent, schedule=None)


def _train_on_mesh(
    task: Task, model: nn.Module, plan: Plan, feed: Feed, *, seed: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a training as the plan has it."""
    step = parallelize(model, task.loss, task.optimizer, plan, clip=task.clip, seed=seed)
    losses = [step(batch).loss for batch in _batches_with_lr(task, step.optimizer, feed)]
    state = step.state_dict()["model"]
    return {name: state[name].cpu() for name, _ in step.model.named_parameters()}, losses


def _train_on_one_device(task: Task, model: nn.Module, feed: Feed) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a training in this process, in plain torch."""
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
    """The batches of all steps, in float64; before each one the rate is the schedule's."""
    rates = [group["lr"] for group in optimizer.param_groups]
    batches: Any = feed.repeat()
    with contextlib.closing(batches):
        for number in range(task.steps):
            if task.schedule is not None:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * task.schedule(number, task.steps)
            batch = next(batches)
            samples = batch.samples
            yield Batch.wrap(tree_map(dict(batch) if isinstance(batch, dict) else tuple(batch), _to_float64), samples)


def _to_float64_model(model: nn.Module) -> nn.Module:
    """The model in float64 and complex128."""
    model.double()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():  # `double` leaves it as it is
            tensor.data = tensor.data.to(torch.complex128)
    return model


def _to_float64(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _max_deviation(a: Tensor, b: Tensor) -> float:
    """The largest |a − b| / max(1, |b|): moduli where numbers are complex."""
    a, b = _to_float64(a), _to_float64(b)
    return ((a - b).abs() / b.abs().clamp(min=1.0)).max().item() if a.numel() else 0.0


def _disable_dropout(model: nn.Module) -> int:
    """Set every probability of dropout in a model to 0; how many there were."""
    found = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_one = name == "p" if isinstance(module, DropoutBase) else "drop" in name
            if is_one and type(value) is float and value > 0.0:
                setattr(module, name, 0.0)
                found += 1
    return found
