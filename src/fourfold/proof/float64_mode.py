"""Float64 mode: code that asks for float32 or less gets float64; for complex64 or less, complex128.

grouped_mm      torch's grouped matrix product has no float64 kernel; here it is one product per group
parameter copy  a check computes with it; it replaces the parameter wherever the parameter is an operand
constant        a tensor that is no parameter, buffer or input, such as class weights in a closure: cast at each use
Law: inside the mode every floating-point result of a float64 model is float64.
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
from fourfold.torch_kit.param_access import METADATA_FUNCTIONS, restore_arguments
from fourfold.torch_kit.torch_private import GROUPED_MM_OPS, run_backward_under_modes

# ---- operands ------------------------------------------------------------------------------------------------------


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


# ---- mode ----------------------------------------------------------------------------------------------------------


WIDER_DTYPE = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
_WIDER_CAST_NAMES = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble", "chalf": "cdouble"}
WIDER_CAST = {getattr(Tensor, narrow): getattr(Tensor, wide) for narrow, wide in _WIDER_CAST_NAMES.items()}
BACKWARDS = frozenset({torch.autograd.backward, Tensor.backward})
FACTORIES = frozenset({torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.eye, torch.linspace})


class Float64Mode(TorchFunctionMode):
    """`new_tensors`: tensors created without a dtype, as by `torch.zeros(4)`, are float64 too."""

    def __init__(self, *, new_tensors: bool = False) -> None:
        super().__init__()
        self._new_tensors = new_tensors

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in BACKWARDS and not any(options.get(name) for name in ("retain_graph", "create_graph", "inputs")):
            return self._run_backward(args[0], *args[1:2], **options)
        args = tuple(_widen_dtype(arg) for arg in args)
        named = {name: _widen_dtype(value) for name, value in restore_arguments(func, args, options).items()}
        if func in WIDER_CAST:
            func = WIDER_CAST[func]
        elif func in GROUPED_MM_OPS and args[0].dtype == torch.float64:
            func = grouped_mm
        elif self._new_tensors and func in FACTORIES:
            named.setdefault("dtype", torch.float64)
        return func(*args, **named)

    def _run_backward(self, roots: Any, grad_tensors: Any = None, gradient: Any = None, **_: Any) -> None:
        """A backward with the mode on: a checkpoint computes its forward again."""
        roots = tuple(roots) if isinstance(roots, tuple | list) else (roots,)
        gradients = gradient if grad_tensors is None else grad_tensors
        gradients = gradients if isinstance(gradients, tuple | list) else [gradients] * len(roots)
        known = (torch.ones_like(a) if b is None else b for a, b in zip(roots, gradients, strict=True))
        with self:
            run_backward_under_modes(roots, tuple(known))


def _widen_dtype(value: Any) -> Any:
    return WIDER_DTYPE.get(value, value) if isinstance(value, torch.dtype) else value


def grouped_mm(
    a: Tensor,
    b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.grouped_mm` in any dtype: one ordinary product per group.

    Group g ends at `offs[g]`. The offsets split the rows of a [n, K] with b [G, K, N], the columns of b [K, n] with
    a [G, M, K], or the summed dim of a [M, n] and b [n, N]. Without `offs`, both have a first dim of groups.
    """
    if offs is None:
        out = a @ b
    else:
        stops = offs.tolist()
        ranges = [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
        if a.dim() == 2 and b.dim() == 2:
            out = torch.stack([a[:, each] @ b[each] for each in ranges])
        elif a.dim() == 2:
            parts = [a[each] @ b[group] for group, each in enumerate(ranges)]
            out = torch.cat([*parts, a.new_zeros(a.shape[0] - stops[-1], b.shape[2])])
        else:
            parts = [a[group] @ b[:, each] for group, each in enumerate(ranges)]
            out = torch.cat([*parts, a.new_zeros(a.shape[1], b.shape[1] - stops[-1])], dim=1)
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)
