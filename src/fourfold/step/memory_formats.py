"""Memory formats: how parameters lie in memory, and whether that has changed since their gradient slots were made.

memory format  dtype, device and strides
Law: a gradient has the memory format of its parameter, so that a fused update reads both in the same order.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.words.errors import Problem, TrainingError

MAX_NAMES = 3  # names in a message
_MemoryFormat = tuple[object, ...]


def shape_and_strides(tensor: Tensor) -> list[int] | str:
    """The shape; of a trained one with its strides if it is not contiguous: ranks add gradients in memory order."""
    like = torch.empty_like(tensor, device="meta")
    if not tensor.requires_grad or like.is_contiguous():
        return list(like.shape)
    strides = [stride for size, stride in zip(like.shape, like.stride(), strict=True) if size > 1]
    return f"{list(like.shape)}, strides {strides}"


class MemoryFormats:
    """The memory formats that parameters had when their slots were made."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._initial = [(name, parameter, _memory_format(parameter)) for name, parameter in parameters.items()]
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        self._in_memory_order = self._initial if is_fused else []

    def check_memory_order(self) -> None:
        """`check_unchanged`, if updates go through memory in order, as fused ones do."""
        _check(self._in_memory_order)

    def check_unchanged(self) -> None:
        """Raise TrainingError naming the parameters whose memory format has changed."""
        _check(self._initial)


def _check(initial: Sequence[tuple[str, Tensor, _MemoryFormat]]) -> None:
    changed = [
        f"{name} ({_describe_change(before, _memory_format(parameter))})"
        for name, parameter, before in initial
        if _memory_format(parameter) != before
    ]
    if changed:
        more = f" and {len(changed) - MAX_NAMES} more" if len(changed) > MAX_NAMES else ""
        got = f"parameters that were converted after DistributedOptimizer was built: {', '.join(changed[:MAX_NAMES])}"
        need = "the dtype, device and memory format that gradients are reduced in"
        raise TrainingError(Problem(got + more, need, "model.to(…) before DistributedOptimizer(…)"))


def _memory_format(parameter: Tensor) -> _MemoryFormat:
    return parameter.dtype, parameter.device, parameter.stride()


def _describe_change(before: _MemoryFormat, now: _MemoryFormat) -> str:
    """For example `torch.float32 to torch.float64`."""
    old, new = next((old, new) for old, new in zip(before, now, strict=True) if old != new)
    return f"strides {list(old)} to {list(new)}" if isinstance(old, tuple) else f"{old} to {new}"  # type: ignore[call-overload]
