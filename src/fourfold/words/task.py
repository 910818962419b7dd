"""Task: what is learned, in plain single-device PyTorch behind factories.

factory  a function that makes the model, the data sources or the optimizer, called once the plan is valid
Law: a task knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fourfold.words import argument_checks
from fourfold.words.errors import Problem, TaskError

if TYPE_CHECKING:
    import torch

SchedulerFactory = Callable[..., "torch.optim.lr_scheduler.LRScheduler"]


class Source(Protocol):
    """Numbered samples without a batch dim: `source[i]` is (inputs, targets), or a dict of the model's inputs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


DEFAULT_STEPS, DEFAULT_BATCH_SIZE = 1000, 32  # of a task that says neither how long nor in which batches


@dataclass(frozen=True, kw_only=True)
class Data:
    """The samples to train on, and those to evaluate on: sources, torch DataLoaders or IterableDatasets."""

    train: Any
    valid: Any = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned.

    model      makes the module
    loss       (outputs, targets) -> unreduced values, or a pair (sum, count), or a scalar. None: the model returns its
               own loss; samples are then dicts of its inputs, with the labels among them
    data       opens the sources
    optimizer  (parameters) -> torch optimizer
    evaluate   (outputs, targets) -> {name: (sum, count)}, summed over batches and ranks; with loss = None the targets
               are the dict of inputs
    sample     (model) -> text to print at the end of training; `model` is called on inputs as a batch has them
    schedule   (step, steps) -> factor of the learning rate
    scheduler  (optimizer) or (optimizer, steps) -> torch scheduler, in place of `schedule`. It is stepped once after
               each step, with microbatches too; ReduceLROnPlateau after each evaluation, with the validation loss
    unit       what throughput counts: "samples"; "tokens", those that a dict of inputs shows, else the elements of the
               targets; or another name for these elements. Samples, and so named, where there is nothing else to count
    steps, epochs   how long to train: one of them, or neither: 1000 steps
    batch_size global; None: that of a DataLoader given as data, else 32
    tuned_for  the global batch size that the optimizer's learning rate was tuned for; None: batch_size
    tensor     pattern of module names -> how its weights are split over the tensor axis, such as "column"
    tokenizer  of a transformers model: its files are saved with the run, for `fourfold checkpoint export --format hf`
    """

    model: Callable[[], torch.nn.Module]
    loss: Callable[[Any, Any], Any] | None
    data: Callable[[], Data]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    evaluate: Callable[[Any, Any], dict[str, tuple[Any, Any]]] | None = None
    sample: Callable[[Any], str] | None = None
    schedule: Callable[[int, int], float] | None = None
    scheduler: SchedulerFactory | None = None
    unit: str = "samples"
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None  # global
    clip: float | None = None
    tuned_for: int | None = None
    tokenizer: Any = None
    tensor: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise TaskError with every invalid field; no factory is called."""
        if problems := _problems(self):
            raise TaskError(problems, where="the task")


def check_task(task: Any) -> None:
    """Raise TaskError unless `task` is a Task."""
    if not isinstance(task, Task):
        is_function = callable(task) and not hasattr(task, "state_dict")
        attempt = "its result" if is_function else "ff.Task(model=…, loss=…, data=…, optimizer=…)"
        raise TaskError(Problem(argument_checks.format_argument("task", task), "a Task", attempt))


def _problems(task: Task) -> list[Problem]:
    problems = []
    needs = {
        "model": ("a function that makes the model", "model=lambda: Net()"),
        "loss": ("a function (outputs, targets) -> loss", ""),
        "data": ("a function that opens the data", "data=lambda: ff.Data(train=source)"),
        "evaluate": ("a function (outputs, targets) -> {name: (sum, count)}", ""),
        "sample": ("a function (model) -> text", ""),
        "schedule": ("a function (step, steps) -> factor", ""),
    }
    for name, (need, attempt) in needs.items():
        value, optional = getattr(task, name), name in ("loss", "evaluate", "sample", "schedule")
        problems += argument_checks.callable_problems(name, value, need=need, optional=optional, attempt=attempt)
    problems += argument_checks.optimizer_factory_problems(task.optimizer)
    problems += argument_checks.scheduler_factory_problems(task.scheduler)
    if task.schedule is not None and task.scheduler is not None:
        problems.append(Problem("both schedule and scheduler", "one of them", "without schedule"))
    if callable(task.model) and hasattr(task.model, "named_parameters") and not isinstance(task.model, type):
        problems.append(Problem(f"model = an instance of {type(task.model).__name__}", *needs["model"]))
    for name, minimum in (("steps", 0), ("epochs", 1), ("batch_size", 1)):
        problems += argument_checks.int_problems(name, getattr(task, name), minimum=minimum, optional=True)
    problems += length_problems(task.steps, task.epochs)
    problems += argument_checks.positive_problems("clip", task.clip, optional=True, attempt="clip=1.0")
    problems += argument_checks.int_problems("tuned_for", task.tuned_for, minimum=1, optional=True)
    problems += argument_checks.tokenizer_problems("tokenizer", task.tokenizer)
    problems += argument_checks.tensor_rule_problems("tensor", task.tensor)
    return problems + argument_checks.str_problems("unit", task.unit)


def length_problems(steps: Any, epochs: Any) -> list[Problem]:
    """How long to train is given in steps or in epochs."""
    if steps is None or epochs is None:
        return []
    return [Problem(f"steps = {steps} and epochs = {epochs}", "one of them", f"epochs={epochs}")]
