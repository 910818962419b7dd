"""Split randomness: random numbers that a model draws for activations which are split over the tensor axis.

draw   a call of dropout, of attention with dropout, or of a function that makes random numbers
Law: tensor ranks draw the same numbers, which is right for whole activations. For split ones, the slices of a tensor
would have equal masks: a draw whose tensor is not the whole model's is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fourfold.parts.dropped_arguments import restore_arguments
from fourfold.parts.torch_private import DisableTorchFunction, is_in_backward
from fourfold.step.dry_run.fixed_random import DROPOUT_FUNCTIONS, RANDOM_FUNCTION_NAMES
from fourfold.step.sequence.tolerance import is_close
from fourfold.step.tensor.module_trace import ModuleTrace
from fourfold.step.tensor_tree import tree_leaves


class Draw(NamedTuple):
    """A draw: the module that made it, what drew (for messages), and the tensor that it was for."""

    module: str
    what: str
    tensor: Tensor


class DrawRecorder(TorchFunctionMode):
    """Records the draws of a forward."""

    def __init__(self, trace: ModuleTrace) -> None:
        super().__init__()
        self._trace = trace
        self.draws: list[Draw] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = restore_arguments(func, args, kwargs or {})
        what = None if is_in_backward() else _what_draws(func, args, kwargs)
        result = func(*args, **kwargs)
        if what is not None:
            # Of a function that makes random numbers, what it has made; of dropout, its input.
            tree = (result,) if what in RANDOM_FUNCTION_NAMES else (args, kwargs)
            with DisableTorchFunction():
                tensor = next(tree_leaves(tree), None)
                if tensor is not None:
                    self.draws.append(Draw(self._trace.current, what, tensor.detach()))
        return result


def split_draws(whole: Sequence[Draw], local: Sequence[Draw]) -> list[Draw]:
    """The draws of the model that is cut which are not those of the whole model."""
    pairs = zip(whole, local, strict=False)
    return [mine for full, mine in pairs if full[:2] == mine[:2] and not _is_same(full, mine)]


def _is_same(whole: Draw, local: Draw) -> bool:
    if whole.tensor.shape != local.tensor.shape:
        return False
    return whole.what in RANDOM_FUNCTION_NAMES or is_close(whole.tensor, local.tensor)


def _what_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What a call draws for, in words; None: it draws nothing."""
    name = getattr(func, "__name__", "")
    if func in DROPOUT_FUNCTIONS:
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
        return f"dropout = {p:g}" if p > 0 and training else None
    if func is F.scaled_dot_product_attention:
        p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return f"attention with dropout_p = {p:g}" if p > 0 else None
    if func is F.multi_head_attention_forward:
        p = kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0)
        return f"attention with dropout_p = {p:g}" if p > 0 and kwargs.get("training", True) else None
    return name if name in RANDOM_FUNCTION_NAMES else None
