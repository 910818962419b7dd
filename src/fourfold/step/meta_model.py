"""Meta models: a task's model on the meta device, to check it before anything is started.

Law: a meta model has the names, shapes and modules of the real model, but no values.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from fourfold.step.argument_checks import wrapper_problems
from fourfold.torch_kit.dropped_arguments import restore_arguments
from fourfold.words.argument_checks import format_argument
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import FourfoldError, Problem, SettingError, TaskError
from fourfold.words.task import Task
from fourfold.words.units import format_bytes

# Parts of torch's messages about tensors that are too large for 64 bits, or for the memory.
TOO_LARGE_MESSAGES = ("overflow", "can't allocate memory", "not enough memory", "out of memory")


def build_meta_model(task: Task, *, max_bytes: int | None = None) -> nn.Module:
    """The task's model on the meta device, or a real model if it cannot be made there.

    Raises TaskError if the task returns no model, and SettingError as soon as the parameters take more than
    `max_bytes`, or if a size does not fit into 64 bits.
    """
    # Some models compute with values while they are made. If the task itself is wrong, `_real_model` raises its error.
    model = try_meta_model(task, max_bytes=max_bytes)
    model = _real_model(task) if model is None else model
    if problem := model_problem(model):
        raise TaskError(problem, where="the task")
    return model


def model_problem(model: Any) -> Problem | None:
    """What is wrong with the result of a task's `model` function; None if it is a module that can be trained."""
    if not isinstance(model, nn.Module):
        return Problem(format_argument("model()", model), "a torch.nn.Module", "model=lambda: Net()")
    if wrapped := wrapper_problems(model):
        return wrapped[0]
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if not lazy:
        return None
    got = f"a lazy model: {lazy[0]} has no shape yet"
    return Problem(got, "parameters with shapes", "one forward with a sample before model() returns it, or nn.Linear")


def try_meta_model(task: Task, *, max_bytes: int | None = None) -> nn.Module | None:
    """The task's model on the meta device; None if it cannot be made there. Raises as `build_meta_model` does."""
    try:
        with torch.device("meta"), _SkipRandomInit(), _limit_parameter_bytes(max_bytes):
            return _uncached(task.model)()
    except FourfoldError:
        raise
    except Exception as error:  # a model may look at its values and object to them
        _raise_if_too_large(error)
        return None


def _uncached(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function inside `functools.cache`, which would return the meta model again when a real one is needed."""
    while isinstance(function, functools._lru_cache_wrapper):
        function = function.__wrapped__
    return function


def _real_model(task: Task) -> nn.Module:
    try:
        with noting(f"  in the model's function, {describe_function(task.model)}"):
            return task.model()
    except (RuntimeError, TypeError) as error:
        _raise_if_too_large(error)
        raise


def _raise_if_too_large(error: Exception) -> None:
    """Raise SettingError if torch could not make a tensor because of its size."""
    if not any(text in str(error).lower() for text in TOO_LARGE_MESSAGES):
        return
    got = f"a tensor of the model cannot be made: {str(error).splitlines()[0][:120]}"
    raise SettingError(Problem(got, "sizes that fit into memory", "a smaller model"), where="the model") from None


@contextlib.contextmanager
def _limit_parameter_bytes(max_bytes: int | None) -> Iterator[None]:
    """Inside, raise SettingError as soon as the parameters of this thread's modules take more than `max_bytes`."""
    thread, sizes, total = threading.get_ident(), dict[int, int](), [0]

    def forget(key: int) -> None:
        total[0] -= sizes.pop(key)

    def register(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if parameter is None or threading.get_ident() != thread or id(parameter) in sizes:
            return
        sizes[id(parameter)] = parameter.nbytes
        total[0] += parameter.nbytes
        # A parameter that is replaced, as in weight tying, is freed and does not count any more.
        weakref.finalize(parameter, forget, id(parameter)).atexit = False
        if max_bytes is not None and total[0] > max_bytes:
            got = f"a model whose first {len(sizes)} parameters take {format_bytes(total[0])}"
            need = f"at most {format_bytes(max_bytes)}, which is available on this host"
            raise SettingError(Problem(got, need, "a smaller model"), where="the memory of this host")

    if max_bytes is None:
        yield
        return
    handle = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()


class _SkipRandomInit(TorchFunctionMode):
    """Skips the random initialization of meta tensors.

    There it runs through torch's reference implementations, which import torch._dynamo (1.25 s).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = restore_arguments(func, args, kwargs or {})
        if getattr(func, "__name__", "") in _INIT_FUNCTIONS:
            tensor = args[0] if args else kwargs["tensor"]
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


_INIT_FUNCTIONS = {
    *(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")),
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
}
