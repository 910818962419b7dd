"""Meta calls: operations on the meta device whose results are known from an earlier call.

form  of a tensor: shape, strides and dtype; of an argument: its type and value
Law: a result has the form, and the memory of its own, that the operation would give it.

Torch finds forms in Python, which takes a tenth of a millisecond; the variants of a search call most operations again
with arguments of the same forms.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.analysis.task_facts.fake_ranks import META
from fourfold.parts.torch_private import storage_key
from fourfold.step.tensor_tree import tree_leaves

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


class MetaCalls:
    """The results that are known."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}
        """By operation and the forms of its arguments; None: its result is in the memory of an argument."""

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`func(*args, **kwargs)`."""
        key = (func, *_form_of((tuple(args), tuple(kwargs.items()))))
        if _UNKNOWN in key:
            return func(*args, **kwargs)
        if (form := self._forms.get(key)) is not None:
            return torch.empty_strided(form[0], form[1], dtype=form[2], device=META)
        result = func(*args, **kwargs)
        if key not in self._forms:
            self._forms[key] = _result_form(result, (args, kwargs))
        return result


_UNKNOWN = object()


def _form_of(value: Any) -> list[Any]:
    """The form of an argument, flat; with _UNKNOWN in it: it is none that can be compared."""
    if isinstance(value, Tensor):
        return [value.shape, value.stride(), value.dtype] if value.device == META else [_UNKNOWN]
    if isinstance(value, list | tuple):
        return [len(value), *(part for each in value for part in _form_of(each))]
    return [type(value), value] if isinstance(value, PLAIN) else [_UNKNOWN]


def _result_form(result: Any, arguments: Any) -> tuple[Any, ...] | None:
    if not isinstance(result, Tensor) or result.device != META:
        return None
    keys = {storage_key(each) for each in tree_leaves(arguments) if isinstance(each, Tensor)}
    return None if storage_key(result) in keys else (result.shape, result.stride(), result.dtype)
