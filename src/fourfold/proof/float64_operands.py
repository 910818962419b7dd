"""Float64 operands: every operation gets float64 tensors, whatever their source.

parameter copy  a check computes with it; it replaces the parameter wherever the parameter is an operand
constant        a tensor that is no parameter, buffer or input, such as class weights in a closure: cast at each use
Law: inside the mode no operation gets one of the model's own parameters, and, with a dtype, none gets a narrower one.

A write into a constant is lost, so a check leaves no trace there. The arguments of `torch.autograd.Function.apply` are
not replaced; those of the operations inside it are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fourfold.proof.random_weights import cast_real
from fourfold.torch_kit.param_access import METADATA_FUNCTIONS


class WidenOperandsMode(TorchFunctionMode):
    """`param_copies`: the copy of each parameter, by the parameter's id. `dtype`: float64, or None to cast nothing."""

    def __init__(self, param_copies: Mapping[int, Tensor], dtype: torch.dtype | None) -> None:
        super().__init__()
        self._param_copies, self._dtype = param_copies, dtype
        self.min_itemsize = 8
        """Size in bytes of the least precise numbers that an operation returned for float64 operands."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dtype = None if func in METADATA_FUNCTIONS else self._dtype
        args = tuple(self._convert_operand(arg, dtype) for arg in args)
        named = {name: self._convert_operand(value, dtype) for name, value in (kwargs or {}).items()}
        result = func(*args, **named)
        return result if dtype is None else self._convert_result(result, (*args, *named.values()))

    def _convert_operand(self, value: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(value, Tensor):
            return cast_real(self._param_copies.get(id(value), value), dtype)
        if type(value) in (list, tuple):
            converted = [self._convert_operand(each, dtype) for each in value]
            is_same = all(new is old for new, old in zip(converted, value, strict=True))
            return value if is_same else type(value)(converted)
        return value

    def _convert_result(self, result: Any, operands: tuple[Any, ...]) -> Any:
        if type(result) in (list, tuple):
            return type(result)(self._convert_result(each, operands) for each in result)
        if not isinstance(result, Tensor):
            return result
        wide = cast_real(result, self._dtype)
        if wide is not result and any(isinstance(each, Tensor) and each.is_floating_point() for each in operands):
            self.min_itemsize = min(self.min_itemsize, result.dtype.to_real().itemsize)
        return wide
