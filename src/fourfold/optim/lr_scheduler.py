"""LR scheduler: any of torch's schedulers over the optimizer's options, with its state as JSON.

factory  Task.scheduler: (optimizer) or (optimizer, steps) -> torch scheduler
plateau  a scheduler that follows a measure, and steps when it has been measured: ReduceLROnPlateau
options  what the optimizer's groups hold besides their parameters; a scheduler may change any of them
Law: after a resume each step has the options that it has in the undisturbed run.
Law: `from_json(to_json(value))` is an equal value of the same type, for all that `to_json` takes; `from_json` makes
only numbers, strings, tensors, and containers of these.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fourfold.optim.user_optimizer import comes_from_torch
from fourfold.plan.lr_schedule import SchedulerState
from fourfold.torch_kit.torch_private import mark_step_called
from fourfold.words.error_notes import noting
from fourfold.words.errors import CheckpointError, Problem, TaskError
from fourfold.words.task import SchedulerFactory

# ---- state as json -------------------------------------------------------------------------------------------------

MAX_TENSOR_ELEMENTS = 1024  # schedulers keep a rate for each group; weights belong into files
TENSOR_DTYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float64, torch.int64)}


class NotJsonError(ValueError):
    """A value that cannot be written, or text that does not stand for a value."""


def to_json(value: Any, path: str = "state") -> Any:
    """The value as JSON. Raises NotJsonError, which names its place, for callables and other objects."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return to_json(value.item(), path)
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, Tensor):
        return _tensor_to_json(value, path)
    return _container_to_json(value, path, type(value))


def _container_to_json(value: Any, path: str, kind: type) -> Any:
    if kind in (list, tuple):
        items = [to_json(each, f"{path}[{index}]") for index, each in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: to_json(each, f"{path}.{key}") for key, each in value.items()}}
    if kind in (dict, Counter):
        pairs = [[to_json(key, path), to_json(each, f"{path}[{key!r}]")] for key, each in value.items()]
        return {"counter" if kind is Counter else "items": pairs}
    raise NotJsonError(f"{path} is a {kind.__name__}")


def _tensor_to_json(value: Tensor, path: str) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    if value.numel() > MAX_TENSOR_ELEMENTS or dtype not in TENSOR_DTYPES:
        raise NotJsonError(f"{path} is a tensor of {value.numel()} elements of {dtype}")
    numbers = value.detach().cpu().reshape(-1).tolist()
    return {"tensor": [dtype, list(value.shape), [to_json(number) for number in numbers]]}


def from_json(value: Any) -> Any:
    """The value that `to_json` has written. Raises NotJsonError for anything that it does not write."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    try:
        ((tag, content),) = value.items()
        return READERS[tag](content)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError):
        raise NotJsonError("an object that stands for no value") from None


def _read_tensor(content: Any) -> Tensor:
    dtype, shape, numbers = content
    if len(numbers) > MAX_TENSOR_ELEMENTS or math.prod(shape) != len(numbers) or any(size < 0 for size in shape):
        raise ValueError(shape)
    return torch.tensor([from_json(each) for each in numbers], dtype=TENSOR_DTYPES[dtype]).reshape(shape)


def _read_float(content: Any) -> float:
    if content not in ("inf", "-inf", "nan"):
        raise ValueError(content)
    return float(content)


READERS: dict[str, Callable[[Any], Any]] = {
    "float": _read_float,
    "tuple": lambda content: tuple(from_json(each) for each in content),
    "dict": lambda content: {str(key): from_json(each) for key, each in content.items()},
    "items": lambda content: {from_json(key): from_json(each) for key, each in content},
    "counter": lambda content: Counter({from_json(key): from_json(each) for key, each in content}),
    "tensor": _read_tensor,
}


# ---- lr scheduler --------------------------------------------------------------------------------------------------


Options = dict[str, Any]


class SteppedScheduler:
    """A task's scheduler in a run: stepped after each step, or after each evaluation; saved and restored."""

    def __init__(self, factory: SchedulerFactory, optimizer: Optimizer, *, steps: int) -> None:
        """Make the scheduler, which sets the options of the first step. `steps`: those of the whole run.

        Raises TaskError if the factory fails, or makes something that cannot be stepped or saved.
        """
        self._optimizer = optimizer
        self._base_options = _copy_options(optimizer)
        self._scheduler = _call_factory(factory, optimizer, steps)
        if problems := list(_problems(self._scheduler, optimizer)):
            raise TaskError(problems, where="the task's scheduler")
        self._scaled_from: list[Any] | None = None
        """The scheduler's rates, while the groups hold these times a factor."""
        self._initial = self._state()

    @property
    def name(self) -> str:
        return type(self._scheduler).__name__

    @property
    def is_plateau(self) -> bool:
        """Whether it steps after evaluations rather than after steps."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    @property
    def base_options(self) -> Sequence[Options]:
        """By group: the options that the task gave the optimizer."""
        return self._base_options

    def scale(self, factor: float) -> None:
        """Multiply the scheduler's rates by a factor, for the next step."""
        self._unscale()
        self._scaled_from = [_copy(group["lr"]) for group in self._optimizer.param_groups]
        for group, lr in zip(self._optimizer.param_groups, self._scaled_from, strict=True):
            _set(group, "lr", lr * factor)

    def _unscale(self) -> None:
        # Many schedulers compute a rate from the one before it, which they read from the group.
        if self._scaled_from is not None:
            for group, lr in zip(self._optimizer.param_groups, self._scaled_from, strict=True):
                _set(group, "lr", lr)
            self._scaled_from = None

    def step_done(self) -> None:
        """To be called after each training step, a skipped one included."""
        if not self.is_plateau:
            self._unscale()
            mark_step_called(self._optimizer)  # torch warns otherwise if the first steps were skipped
            with noting(f"  in the task's scheduler, {self.name}"):
                self._scheduler.step()

    def evaluated(self, loss: float) -> None:
        """To be called after each evaluation, with the same loss on all ranks."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._unscale()
            with noting(f"  in the task's scheduler, {self.name}"):
                self._scheduler.step(loss)

    # ---- saving and restoring

    def state(self) -> SchedulerState:
        """The state to save. Raises CheckpointError for state that JSON cannot hold."""
        rates = self._scaled_from
        groups = _copy_options(self._optimizer)
        if rates is not None:
            groups = [{**group, "lr": lr} for group, lr in zip(groups, rates, strict=True)]
        options = [
            {key: value for key, value in group.items() if key == "lr" or not _is_same(base, key, value)}
            for base, group in zip(self._base_options, groups, strict=True)
        ]
        try:
            return SchedulerState(self.name, self._state(), self._initial, tuple(map(_tag_values, options)))
        except NotJsonError as error:
            need = "numbers, strings, and lists and dicts of these"
            raise CheckpointError(Problem(f"the scheduler's {error}", need)) from None

    def _state(self) -> Options:
        return _tag_values(self._scheduler.state_dict())

    def problems(self, saved: SchedulerState) -> Iterator[Problem]:
        """Why a saved state is not this scheduler's."""
        if saved.name != self.name:
            yield Problem(f"the state of a {saved.name}, now a {self.name}", "the same scheduler", "name=another")
            return
        if saved.state.keys() != self._initial.keys():
            names = ", ".join(sorted(saved.state.keys() ^ self._initial.keys()))
            yield Problem(f"the state of another {saved.name}: {names}", "the same scheduler, of the same torch")
        if len(saved.options) != len(self._base_options):
            yield Problem(f"a scheduler of {len(saved.options)} groups", f"{len(self._base_options)}")
        for content in (saved.state, *saved.options):
            try:
                _untag_values(content)
            except NotJsonError as error:
                yield Problem(f"the scheduler's state has {error}", "a state as Fourfold writes it")

    def load(self, saved: SchedulerState) -> None:
        """Continue from a state without `problems`."""
        self._scaled_from = None
        self._scheduler.load_state_dict(_untag_values(saved.state))
        for group, base, options in zip(self._optimizer.param_groups, self._base_options, saved.options, strict=True):
            # What the scheduler had changed at first may be the task's own value again.
            for key, value in {**base, **_untag_values(options)}.items():
                _set(group, key, value)

    def changed_arguments(self, saved: SchedulerState) -> list[str]:
        """The arguments in which this scheduler differs from the saved one, which it goes on with."""
        return [
            f"{key} = {from_json(value)}"
            for key, value in self._initial.items()
            if key != "_last_lr" and key in saved.initial and saved.initial[key] != value
        ]


def _call_factory(factory: SchedulerFactory, optimizer: Optimizer, steps: int) -> Any:
    arguments = {"steps": steps} if "steps" in _parameters(factory) else {}
    try:
        return factory(optimizer, **arguments)
    except (TypeError, ValueError, KeyError) as error:
        if not comes_from_torch(error.__traceback__):
            raise  # an error of the user's own code: its traceback says more
        raise TaskError(_arguments_problem(factory, error), where="the task's scheduler") from error


def _arguments_problem(factory: SchedulerFactory, error: Exception) -> Problem:
    """What torch's class says of its arguments; where a `partial` gave them, with the call to complete."""
    kind, given = getattr(factory, "func", factory), getattr(factory, "keywords", {})
    name = kind.__name__ if isinstance(kind, type) else "the scheduler"
    got, need = f"{name} rejected its arguments: {' '.join(str(error).split())}", "arguments that it accepts"
    if not isinstance(kind, type):
        return Problem(got, need)
    length = ["total_steps=steps"] if "total_steps" in _parameters(kind).keys() - given.keys() else []
    arguments = ", ".join(["optimizer", *(f"{key}=…" for key in given), *length])
    return Problem(got, need, f"lambda optimizer, steps: {name}({arguments})")


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a function without a signature
        return {}


def _problems(scheduler: Any, optimizer: Optimizer) -> Iterator[Problem]:
    if not isinstance(scheduler, LRScheduler):
        need = "a scheduler of torch.optim.lr_scheduler, or of a class that extends LRScheduler"
        yield Problem(f"it made a {type(scheduler).__name__}", need)
        return
    if scheduler.optimizer is not optimizer:
        yield Problem("a scheduler of another optimizer", "one of the optimizer that the function is given")
    try:
        _tag_values(scheduler.state_dict())
    except NotJsonError as error:
        attempt = "a state_dict that leaves it out, or has numbers in its place"
        yield Problem(f"its {error}", "numbers, strings, and lists and dicts of these", attempt)


def _copy_options(optimizer: Optimizer) -> list[Options]:
    return [{k: _copy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _set(group: Options, key: str, value: Any) -> None:
    """Set an option as torch's schedulers do: a tensor stays the same tensor."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _is_same(base: Options, key: str, value: Any) -> bool:
    if key not in base or type(base[key]) is not type(value):
        return False
    return torch.equal(base[key], value) if isinstance(value, Tensor) else base[key] == value


def _tag_values(values: Mapping[str, Any]) -> Options:
    return {key: to_json(value, f"state {key}") for key, value in values.items()}


def _untag_values(values: Mapping[str, Any]) -> Options:
    return {key: from_json(value) for key, value in values.items()}
