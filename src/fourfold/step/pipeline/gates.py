"""Gates: the model's own forward, of which only one stage is computed.

gate         what a block of another stage does in place of its forward
placeholder  zeros, without memory, in the shape and dtype of what a module would return
Law: a stage computes what the whole model computes between the outputs of the block before its first one and of its
last one. What the model makes of the batch alone (rotary angles, masks) exists on every stage.

The forward runs as the user wrote it. Modules of earlier stages return placeholders, the block just before the stage's
first one returns what was received, and after its last block a stage leaves the forward.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from fourfold.step.pipeline.chain import StageMap
from fourfold.step.tensor_tree import tree_leaves, tree_map


class StageEnd(BaseException):
    """A stage has ended within the model's forward. Not an Exception: a model may catch these."""

    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs


class OutputShape(NamedTuple):
    """The shape and dtype of a returned tensor.

    dims      its sizes in the dry run
    sources   by dim: the argument of the module that has the same size at this dim; None: none has
    dtype_of  the argument with its dtype; None: none has
    """

    dims: tuple[int, ...]
    sources: tuple[int | None, ...]
    dtype: torch.dtype
    dtype_of: int | None

    @classmethod
    def of(cls, output: Tensor, given: Sequence[Tensor]) -> Self:
        """That of a tensor which a module has returned for these arguments."""
        sources = tuple(
            _first(given, lambda t, d=dim, n=size: t.dim() > d and t.shape[d] == n)
            for dim, size in enumerate(output.shape)
        )
        dtype_of = _first(given, lambda t: t.dtype == output.dtype)
        return cls(tuple(output.shape), sources, output.dtype, dtype_of)

    def zeros(self, given: Sequence[Tensor]) -> Tensor:
        """Zeros in the shape that the module would return for these arguments; they have one element of memory."""
        dims = (
            size if source is None else given[source].shape[dim]
            for dim, (size, source) in enumerate(zip(self.dims, self.sources, strict=True))
        )
        dtype = self.dtype if self.dtype_of is None else given[self.dtype_of].dtype
        device = given[0].device if given else torch.device("cpu")
        return torch.zeros((), dtype=dtype, device=device).expand(tuple(dims))


class Template(NamedTuple):
    """What a module returned in the dry run: its containers with tensors on the meta device, and their shapes."""

    output: Any
    shapes: tuple[OutputShape, ...]

    @classmethod
    def of(cls, output: Any, arguments: Any) -> Self:
        """That of what a module has returned for these arguments."""
        given = list(tree_leaves(arguments))
        shapes = tuple(OutputShape.of(each, given) for each in tree_leaves(output))
        return cls(tree_map(output, lambda each: torch.empty_like(each, device="meta")), shapes)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The same containers with other tensors."""
        values = iter(tensors)
        return tree_map(self.output, lambda _: next(values))

    def placeholder(self, *args: Any, **kwargs: Any) -> Any:
        """What a module of an earlier stage returns."""
        given = list(tree_leaves((args, kwargs)))
        return self.filled([each.zeros(given) for each in self.shapes])


Templates = Mapping[str, Template]


class Gates:
    """The gates of one stage of a model."""

    def __init__(self, model: nn.Module, stages: StageMap, stage: int) -> None:
        self._model = model
        blocks, names = stages.blocks[stage], stages.chain.blocks
        self._skipped = [*stages.chain.before, *names[: max(0, blocks.start - 1)]] if stage else []
        self._input_block = names[blocks.start - 1] if stage else None
        self._exits = [names[blocks.stop - 1]] if stage < stages.num_stages - 1 else []

    @contextlib.contextmanager
    def closed(self, templates: Templates, received: Sequence[Tensor]) -> Iterator[None]:
        """Within, a call of the model computes this stage, from what the stage before has sent.

        Unless it is the last stage, the call raises StageEnd with the outputs.
        """
        replaced: list[tuple[nn.Module, Any]] = []

        def gate(name: str, function: Callable[..., Any]) -> None:
            module = self._model.get_submodule(name)
            replaced.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = function

        for name in self._skipped:
            gate(name, templates[name].placeholder)
        if self._input_block is not None:
            output = templates[self._input_block].filled([_writable(each) for each in received])
            gate(self._input_block, lambda *args, **kwargs: output)
        hooks = [self._model.get_submodule(name).register_forward_hook(_leave) for name in self._exits]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, before in reversed(replaced):
                if before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before


class _Received(torch.autograd.Function):
    """What was received, in the same memory, as a module's output: one that the next module may write in place.

    It is a leaf, for its gradient is sent; and autograd refuses to write a leaf or a view of one.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.data  # not detach(): a view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _writable(received: Tensor) -> Tensor:
    return cast(Tensor, _Received.apply(received)) if received.requires_grad else received


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    raise StageEnd(output)


def _first(given: Sequence[Tensor], accepts: Callable[[Tensor], bool]) -> int | None:
    return next((index for index, tensor in enumerate(given) if accepts(tensor)), None)
