"""Backward of the dry run: it runs inside torch function modes, and its gradients are counted."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fourfold.axes.tensor.work.split_logits import whole_logits
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import run_backward_under_modes


def run_backward(outputs: Any, grad_tensors: list[Tensor | None]) -> None:
    """Run backward from all outputs with these upstream gradients (None: skip the output).

    Torch function modes stay active, as in forward.
    """
    pairs = [
        (whole_logits(output), gradient)
        for output, gradient in zip(tree_leaves(outputs), grad_tensors, strict=True)
        if gradient is not None
    ]
    if not pairs:
        return
    roots, gradients = zip(*pairs, strict=True)
    # The modes would intercept `torch.autograd.backward` and run it with themselves off: a checkpoint would recompute
    # its forward in another dtype.
    run_backward_under_modes(roots, gradients)


@contextlib.contextmanager
def count_gradients(parameters: Mapping[str, Tensor]) -> Iterator[Mapping[str, int]]:
    """Context manager: counts how many gradients each parameter gets."""
    counts = dict.fromkeys(parameters, 0)

    def make_hook(name: str) -> Callable[[Tensor], None]:
        return lambda _: counts.__setitem__(name, counts[name] + 1)

    hooks = [p.register_post_accumulate_grad_hook(make_hook(name)) for name, p in parameters.items()]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
