"""Initial model: the module that a step trains, given as it is or as the function that makes it.

Law: with tp > 1 a rank that is given a function never holds more than its shards and one whole weight at a time. Where
that cannot be, the model is made whole, as one device makes it, and the log says why. The weights are the same.
Law: a meta model has the names, shapes and modules of the real model, but no values.
"""

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from fourfold.step.argument_checks import device_problems, model_argument_problems, wrapper_problems
from fourfold.torch_kit.deferred_init import OWN_WEIGHTS, InitialModel, InitialWeights, deferred_model
from fourfold.torch_kit.param_access import restore_arguments
from fourfold.words.argument_checks import format_argument
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import FourfoldError, Problem, SettingError, TaskError
from fourfold.words.task import Task
from fourfold.words.units import format_bytes

# ---- meta models ----------------------------------------------------------------------------------------------------


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


# ---- initial model --------------------------------------------------------------------------------------------------


log = logging.getLogger("fourfold")


def make_initial_model(
    model: nn.Module | Callable[[], nn.Module] | InitialModel,
    device: torch.device,
    *,
    defers: bool,
    is_log_rank: bool,
) -> InitialModel:
    """The model itself, or what the function makes, moved to the device. `defers`: weights of a function are deferred.

    Raises SettingError, and what the function raises.
    """
    if isinstance(model, InitialModel):
        return model
    if isinstance(model, nn.Module):
        return InitialModel(model.to(device))
    with noting(f"  in the model's function, {describe_function(model)}"):
        made, weights = _deferred(model, device, is_log_rank=is_log_rank) if defers else (model(), OWN_WEIGHTS)
    if problems := model_argument_problems(made, "model()") or device_problems(made, device, may_be_on_cpu=True):
        raise SettingError(problems, where="the arguments of parallelize")
    return InitialModel(made.to(device), weights)


def _deferred(
    make: Callable[[], nn.Module], device: torch.device, *, is_log_rank: bool
) -> tuple[nn.Module, InitialWeights]:
    """What `make` makes, with deferred weights if it can be."""
    before = torch.get_rng_state()
    try:
        return deferred_model(make, device)
    except FourfoldError:
        raise
    except Exception as error:  # a model may look at its weights in ways that need memory; or `make` itself is wrong
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    torch.set_rng_state(before)
    model = make()
    if is_log_rank:
        log.warning("tp > 1: each rank makes the whole model before it is split: %s", reason)
    return model, OWN_WEIGHTS
