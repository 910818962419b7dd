"""Layouts: how parameters lie in memory, and whether they still do as when slots were made for their gradients.

layout  dtype, device and strides
Law: a gradient lies in memory as its parameter does, so that a fused update goes through both in the same order.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.words.errors import Problem, TrainingError

MAX_NAMES = 3  # names in a message


def shape_and_strides(parameter: Tensor) -> list[int] | str:
    """The shape; where it is not contiguous, with the strides: ranks sum their gradients as these lie in memory."""
    like = torch.empty_like(parameter, device="meta")
    if like.is_contiguous():
        return list(like.shape)
    strides = [stride for size, stride in zip(like.shape, like.stride(), strict=True) if size > 1]
    return f"{list(like.shape)}, strides {strides},"


class MemoryFormats:
    """The layouts of parameters when slots were made."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._parameters = parameters
        self._initial = [_memory_format(parameter) for parameter in parameters.values()]
        self.uses_memory_order = any(group.get("fused") for group in optimizer.param_groups)
        """Whether updates go by places in memory, not by elements: then a change is looked for in every round."""

    def check_unchanged(self) -> None:
        """Raise TrainingError naming the parameters that lie otherwise now."""
        changed = [
            f"{name} ({_describe_change(built, _memory_format(parameter))})"
            for (name, parameter), built in zip(self._parameters.items(), self._initial, strict=True)
            if _memory_format(parameter) != built
        ]
        if changed:
            rest = f" and {len(changed) - MAX_NAMES} more" if len(changed) > MAX_NAMES else ""
            got = (
                f"parameters that were converted after DistributedOptimizer was built: {', '.join(changed[:MAX_NAMES])}"
            )
            need = "the dtype, device and memory format that gradients are reduced in"
            raise TrainingError(Problem(got + rest, need, "model.to(…) before DistributedOptimizer(…)"))


def _memory_format(parameter: Tensor) -> tuple[object, ...]:
    return parameter.dtype, parameter.device, parameter.stride()


def _describe_change(before: tuple[object, ...], now: tuple[object, ...]) -> str:
    """`torch.float32 to torch.float64`"""
    old, new = next((old, new) for old, new in zip(before, now, strict=True) if old != new)
    return f"strides {list(old)} to {list(new)}" if isinstance(old, tuple) else f"{old} to {new}"  # type: ignore[call-overload]
