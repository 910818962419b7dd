"""Widened: operations meet float64 only, wherever their tensors come from.

stand-in   the copy of a parameter that a judgement computes with: it is taken wherever the parameter itself comes up
constant   a tensor that is no parameter, buffer or input, as class weights in a closure: it is widened at each use
Law: no operation within is given a model's own parameter, and with a dtype none is given a narrower real number.

What is written into a constant is lost: a judgement leaves no trace there. Not seen are the arguments of
`torch.autograd.Function.apply`; the operations within it are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fourfold.parts.data.param_access import METADATA_FUNCTIONS
from fourfold.step.dry_run.random_weights import cast_real


class WidenOperandsMode(TorchFunctionMode):
    """`instead`: by the id of a parameter, its stand-in. `dtype`: float64, or None to widen nothing."""

    def __init__(self, stand_ins: Mapping[int, Tensor], dtype: torch.dtype | None) -> None:
        super().__init__()
        self._stand_ins, self._dtype = stand_ins, dtype
        self.min_itemsize = 8
        """Of the least precise numbers that an operation has made of wide ones all the same."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_look = func in METADATA_FUNCTIONS
        dtype = None if is_look else self._dtype
        args = tuple(self._convert_operand(arg, dtype) for arg in args)
        named = {name: self._convert_operand(value, dtype) for name, value in (kwargs or {}).items()}
        result = func(*args, **named)
        return result if dtype is None else self._convert_result(result, (*args, *named.values()))

    def _convert_operand(self, value: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(value, Tensor):
            return cast_real(self._stand_ins.get(id(value), value), dtype)
        if type(value) in (list, tuple):
            changed = [self._convert_operand(each, dtype) for each in value]
            is_same = all(new is old for new, old in zip(changed, value, strict=True))
            return value if is_same else type(value)(changed)
        return value

    def _convert_result(self, result: Any, given: tuple[Any, ...]) -> Any:
        if type(result) in (list, tuple):
            return type(result)(self._convert_result(each, given) for each in result)
        if not isinstance(result, Tensor) or not (result.is_floating_point() or result.is_complex()):
            return result
        wide = cast_real(result, self._dtype)
        if wide is not result and any(isinstance(each, Tensor) and each.is_floating_point() for each in given):
            self.min_itemsize = min(self.min_itemsize, result.dtype.to_real().itemsize)
        return wide
