"""Outline: a task's model without memory behind it, to be looked at before anything is started.

Law: an outline has the names, shapes and modules of the model, and no values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.words.task import Task


def outline(task: Task) -> nn.Module:
    """The task's model on the meta device, or a real one where it cannot do without memory."""
    try:
        with torch.device("meta"), _WithoutValues():
            return task.model()
    except (RuntimeError, NotImplementedError):
        # Some models compute with values while they are made; an error of the task's own comes again here.
        return task.model()


class _WithoutValues(TorchFunctionMode):
    """Leaves tensors as they are where they would be filled with random numbers.

    On the meta device these run through torch's reference implementations, which import torch._dynamo (1.25 s).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLING:
            tensor = args[0] if args else kwargs["tensor"]
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


_FILLING = {
    *(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")),
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
}
