"""Without randomness: a forward that gives each sample the same loss in whatever batch it comes.

Law: inside, torch's random functions return fixed values, and dropout leaves out nothing; afterwards all generators of
this process are where they were.
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

from fourfold.parts.lost_arguments import restore_arguments

DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class Watched(TorchFunctionMode):
    """What a forward has shown.

    has_drawn  whether it has drawn from a generator all the same
    itemsize   of its least precise numbers
    made       how many numbers its operations have made: about as many as autograd keeps
    """

    has_drawn = False
    itemsize = 8
    made = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = restore_arguments(func, args, kwargs or {})
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        result = _fixed(func, args, kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.itemsize = min(self.itemsize, result.dtype.itemsize)
            self.made += 0 if result._is_view() else result.numel()
        return result


@contextlib.contextmanager
def without_randomness(device: torch.device) -> Iterator[Watched]:
    """Within, nothing is left to chance, as far as torch's Python functions are asked."""
    before = _states(device)
    watched = Watched()
    try:
        with watched:
            yield watched
    finally:
        after = _states(device)
        watched.has_drawn = not all(map(_same, before, after))
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        if device.type == "cuda":
            torch.cuda.set_rng_state(before[3], device)


def _states(device: torch.device) -> list[Any]:
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return all(map(_same, a, b))
    return bool(np.array_equal(a, b))


def _fixed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call, with a fixed value where it would be drawn."""
    name = getattr(func, "__name__", "")
    if func in DROPOUTS:
        return args[0] if args else kwargs["input"]
    if func is F.scaled_dot_product_attention:
        args, kwargs = args[:4] + args[5:], {**kwargs, "dropout_p": 0.0} if len(args) < 6 else kwargs
        return func(*args, **kwargs)
    if func is F.multi_head_attention_forward:
        return func(*args, **{**kwargs, "training": False})
    if func is F.rrelu:
        return func(args[0], *args[1:3], **{**kwargs, "training": False})
    if name in RECURRENT and any(type(arg) is float for arg in args):
        place = next(index for index, arg in enumerate(args) if type(arg) is float)
        return func(*args[:place], 0.0, *args[place + 1 :], **kwargs)
    maker = _MAKERS.get(name)
    return func(*args, **kwargs) if maker is None else maker(func, args, kwargs)


SHARE = 0.375  # of a range, or of a standard deviation: what stands for a draw


def _sized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return torch.empty(*args, **_plain(kwargs)).fill_(SHARE)


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return torch.empty_like(*args, **_plain(kwargs)).fill_(SHARE)


def _whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch.randint(low=0, high, size), and its `like`."""
    numbers = [arg for arg in args if isinstance(arg, int)]
    numbers += [kwargs[name] for name in ("low", "high") if name in kwargs]
    value = sum(numbers) // 2
    kwargs = {name: arg for name, arg in _plain(kwargs).items() if name not in ("low", "high")}
    given = [*(arg for arg in args if not isinstance(arg, int)), kwargs.pop("input", None), kwargs.pop("size", None)]
    shape = next(arg for arg in given if arg is not None)
    if isinstance(shape, Tensor):
        return torch.empty_like(shape, **kwargs).fill_(value)
    return torch.empty(shape, **{"dtype": torch.int64, **kwargs}).fill_(value)


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = dict(zip(("mean", "std", "size"), args, strict=False)) | _plain(kwargs)
    mean, std = given.pop("mean", 0.0), given.pop("std", 1.0)
    if "size" in given:
        return torch.empty(given.pop("size"), **given).fill_(mean + SHARE * std)
    return mean + SHARE * std


def _chosen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch.bernoulli"""
    given = dict(zip(("input", "p"), args, strict=False)) | _plain(kwargs)
    means = given["input"]
    return torch.zeros_like(means).add_(torch.as_tensor(given.get("p", means) >= 0.5, device=means.device))


def _picked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch.multinomial"""
    given = dict(zip(("input", "num_samples", "replacement"), args, strict=False)) | _plain(kwargs)
    if given.get("replacement"):
        best = given["input"].argmax(-1, keepdim=True)
        return best.expand(*best.shape[:-1], given["num_samples"]).clone()
    return given["input"].topk(given["num_samples"], dim=-1).indices


def _in_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return torch.arange(*args, **_plain(kwargs))


def _filled(names: tuple[str, str], defaults: tuple[float, float], value: Callable[[Any, Any], Any]) -> Any:
    def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given: dict[str, Any] = dict(zip(names, defaults, strict=True))
        given |= dict(zip(names, args[1:], strict=False)) | _plain(kwargs)
        drawn = value(*(given[name] for name in names))
        return args[0].copy_(drawn) if isinstance(drawn, Tensor) else args[0].fill_(drawn)

    return fill


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "generator"}


_MAKERS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(("rand", "randn"), _sized),
    **dict.fromkeys(("rand_like", "randn_like"), _like),
    **dict.fromkeys(("randint", "randint_like"), _whole),
    "normal": _normal,
    "bernoulli": _chosen,
    "multinomial": _picked,
    "randperm": _in_order,
    "uniform_": _filled(("from", "to"), (0.0, 1.0), lambda low, high: low + SHARE * (high - low)),
    "normal_": _filled(("mean", "std"), (0.0, 1.0), lambda mean, std: mean + SHARE * std),
    "bernoulli_": _filled(("p", ""), (0.5, 0.0), lambda p, _: p >= 0.5 if isinstance(p, Tensor) else float(p >= 0.5)),
    "exponential_": _filled(("lambd", ""), (1.0, 0.0), lambda rate, _: 1.0 / rate),
}
