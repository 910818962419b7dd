"""Fixed random numbers: a forward in which a sample has the same loss in every batch.

Law: inside the mode, torch's random functions return fixed values and dropout drops nothing. On exit, all random
number generators of this process have the state that they had before.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fourfold.model import sdpa_interception
from fourfold.torch_kit import generators
from fourfold.torch_kit.param_access import restore_arguments
from fourfold.torch_kit.torch_private import DisableTorchFunction, is_view

DROPOUT_FUNCTIONS = {
    *sdpa_interception.DROPOUT_FUNCTIONS,
    *(F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
}
RNN_FUNCTIONS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class FixedRandomMode(TorchFunctionMode):
    """Replaces random functions, and observes a forward.

    has_randomness  whether some generator was used nevertheless
    min_itemsize    size in bytes of the least precise numbers
    num_elements    how many numbers the operations computed: about as many as autograd keeps
    """

    has_randomness = False
    min_itemsize = 8
    num_elements = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = restore_arguments(func, args, kwargs or {})
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        result = _call_without_randomness(func, args, kwargs)
        if isinstance(result, Tensor):
            with DisableTorchFunction():
                self._observe(result)
        return result

    def _observe(self, result: Tensor) -> None:
        if result.dtype.is_floating_point:
            self.min_itemsize = min(self.min_itemsize, result.dtype.itemsize)
            self.num_elements += 0 if is_view(result) else result.numel()


@contextlib.contextmanager
def without_randomness(device: torch.device) -> Iterator[FixedRandomMode]:
    """Within, torch's Python functions draw no random numbers; all generators are restored on exit."""
    before = _rng_states(device)
    mode = FixedRandomMode()
    try:
        with mode:
            yield mode
    finally:
        after = _rng_states(device)
        mode.has_randomness = not all(map(_is_same_state, before, after))
        random.setstate(before[0])
        np.random.set_state(before[1])
        generators.restore(device, before[2:])


def _rng_states(device: torch.device) -> list[Any]:
    return [random.getstate(), np.random.get_state(), *generators.states_of(device)]


def _is_same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a[1], np.ndarray):  # numpy's: names, numbers and one array
        return all(map(np.array_equal, a, b))
    return bool(a == b)


def _call_without_randomness(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call, with fixed values in place of random ones."""
    name, original = getattr(func, "__name__", ""), sdpa_interception.original_function(func)
    if original in DROPOUT_FUNCTIONS:
        return args[0] if args else kwargs["input"]
    if original is sdpa_interception.SDPA:
        if len(args) > 4:
            return func(*args[:4], 0.0, *args[5:], **kwargs)
        return func(*args, **{**kwargs, "dropout_p": 0.0})
    if func is F.multi_head_attention_forward:
        return func(*args, **{**kwargs, "training": False})
    if func is F.rrelu:
        return func(args[0], *args[1:3], **{**kwargs, "training": False})
    if name in RNN_FUNCTIONS and any(type(arg) is float for arg in args):
        index = next(index for index, arg in enumerate(args) if type(arg) is float)  # the probability of dropout
        return func(*args[:index], 0.0, *args[index + 1 :], **kwargs)
    replacement = _REPLACEMENTS.get(name)
    return func(*args, **kwargs) if replacement is None else replacement(func, args, kwargs)


DRAW_FRACTION = 0.375  # of a range or of a standard deviation: the value in place of a draw


def _fill_new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return torch.empty(*args, **_without_generator(kwargs)).fill_(DRAW_FRACTION)


def _fill_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return torch.empty_like(*args, **_without_generator(kwargs)).fill_(DRAW_FRACTION)


def _fixed_randint(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch.randint(low=0, high, size) and torch.randint_like."""
    numbers = [arg for arg in args if isinstance(arg, int)]
    numbers += [kwargs[name] for name in ("low", "high") if name in kwargs]
    value = sum(numbers) // 2
    kwargs = {name: arg for name, arg in _without_generator(kwargs).items() if name not in ("low", "high")}
    given = [*(arg for arg in args if not isinstance(arg, int)), kwargs.pop("input", None), kwargs.pop("size", None)]
    shape = next(arg for arg in given if arg is not None)
    if isinstance(shape, Tensor):
        return torch.empty_like(shape, **kwargs).fill_(value)
    return torch.empty(shape, **{"dtype": torch.int64, **kwargs}).fill_(value)


def _fixed_normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = dict(zip(("mean", "std", "size"), args, strict=False)) | _without_generator(kwargs)
    mean, std = given.pop("mean", 0.0), given.pop("std", 1.0)
    if "size" in given:
        return torch.empty(given.pop("size"), **given).fill_(mean + DRAW_FRACTION * std)
    return mean + DRAW_FRACTION * std


def _fixed_bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch.bernoulli"""
    given = dict(zip(("input", "p"), args, strict=False)) | _without_generator(kwargs)
    means = given["input"]
    return torch.zeros_like(means).add_(torch.as_tensor(given.get("p", means) >= 0.5, device=means.device))


def _fixed_multinomial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch.multinomial"""
    given = dict(zip(("input", "num_samples", "replacement"), args, strict=False)) | _without_generator(kwargs)
    if given.get("replacement"):
        best = given["input"].argmax(-1, keepdim=True)
        return best.expand(*best.shape[:-1], given["num_samples"]).clone()
    return given["input"].topk(given["num_samples"], dim=-1).indices


def _fixed_randperm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return torch.arange(*args, **_without_generator(kwargs))


def _make_inplace_fill(names: tuple[str, str], defaults: tuple[float, float], value: Callable[[Any, Any], Any]) -> Any:
    def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given: dict[str, Any] = dict(zip(names, defaults, strict=True))
        given |= dict(zip(names, args[1:], strict=False)) | _without_generator(kwargs)
        drawn = value(*(given[name] for name in names))
        return args[0].copy_(drawn) if isinstance(drawn, Tensor) else args[0].fill_(drawn)

    return fill


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "generator"}


_REPLACEMENTS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(("rand", "randn"), _fill_new),
    **dict.fromkeys(("rand_like", "randn_like"), _fill_like),
    **dict.fromkeys(("randint", "randint_like"), _fixed_randint),
    "normal": _fixed_normal,
    "bernoulli": _fixed_bernoulli,
    "multinomial": _fixed_multinomial,
    "randperm": _fixed_randperm,
    "uniform_": _make_inplace_fill(("from", "to"), (0.0, 1.0), lambda low, high: low + DRAW_FRACTION * (high - low)),
    "normal_": _make_inplace_fill(("mean", "std"), (0.0, 1.0), lambda mean, std: mean + DRAW_FRACTION * std),
    "bernoulli_": _make_inplace_fill(
        ("p", ""), (0.5, 0.0), lambda p, _: p >= 0.5 if isinstance(p, Tensor) else float(p >= 0.5)
    ),
    "exponential_": _make_inplace_fill(("lambd", ""), (1.0, 0.0), lambda rate, _: 1.0 / rate),
}

RANDOM_FUNCTION_NAMES = frozenset(_REPLACEMENTS)
"""The functions, but for dropout, that are replaced because they draw random numbers."""
