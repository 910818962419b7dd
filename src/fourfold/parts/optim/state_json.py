"""State as JSON: the values of a state_dict with tags for what JSON does not have (`plan.scheduler_state`).

Law: `from_json(to_json(value))` is an equal value of the same type, for all that `to_json` takes; `from_json` makes
only numbers, strings, tensors, and containers of these.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
