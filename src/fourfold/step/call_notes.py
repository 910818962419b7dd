"""Call notes: which module of the user's has failed, on which batch and which samples.

Law: a step costs the same. Notes are made of the traceback when an error passes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fourfold.model.loss_function import UserLoss
from fourfold.step.nan_guard import sample_list
from fourfold.words.error_notes import add_notes, has_note, innermost_self, user_place

MAX_EXTRA = 100  # characters of what a module says of itself
MAX_SAMPLES = 8  # any of a batch may be the cause: these find the rest, by the position in the epoch


def noting_batch(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method(self, batch)` of what has a `model`: an error of model or loss names the module, batch and samples."""

    @functools.wraps(method)
    def call(self: Any, batch: Any, **options: Any) -> Any:
        try:
            return method(self, batch, **options)
        except Exception as error:
            failed = innermost_self(error, (nn.Module, UserLoss))
            if failed is not None:
                add_notes(error, [f"  in {_describe(failed, self.model)}"])
            if has_note(error):
                add_notes(error, _describe_batch(batch))
            raise

    return call


def _describe(failed: nn.Module | UserLoss, model: nn.Module) -> str:
    if not isinstance(failed, nn.Module):
        return f"the loss, {failed}"
    name = next((name for name, each in model.named_modules() if each is failed), None)
    text = f"{type(failed).__name__}({failed.extra_repr()[:MAX_EXTRA]}){user_place(type(failed).forward)}"
    if name is None:
        return text
    return f"module {name}, {text}" if name else f"the model, {text}"


def _describe_batch(batch: Any) -> list[str]:
    """Shapes and dtypes of a rank's batch, and its samples if a feed has read it."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    named = zip(("inputs", "targets"), batch, strict=True) if is_pair else [("inputs", batch)]
    lines = [f"  batch: {', '.join(_describe_values(name, values) for name, values in named)}"]
    samples = getattr(batch, "samples", None)
    if samples is not None:
        lines.append(f"  samples: {sample_list(samples.sample_ids(), limit=MAX_SAMPLES)} ({samples})")
    return lines


def _describe_values(name: str, values: Any) -> str:
    """The dtype and shape of each tensor: "inputs float32 [32, 64]"."""
    if isinstance(values, Mapping):
        return ", ".join(_describe_values(f"{name}[{key!r}]", each) for key, each in values.items())
    if isinstance(values, Tensor):
        return f"{name} {str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    return f"{name} {type(values).__name__}"
