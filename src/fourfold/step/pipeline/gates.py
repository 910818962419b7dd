"""Gates: the model's own forward, of which only one stage is computed.

gate         what a block of another stage does in place of its forward
placeholder  zeros, without memory, in the shape and dtype of what a module would return
carried      outputs of earlier modules that a stage needs besides that of the block before its first one: of a
             connection that skips blocks over a boundary; they and their gradients travel with it
Law: a stage computes what the whole model computes between the outputs of the block before its first one and of its
last one. What the model makes of the batch alone (rotary angles, masks) exists on every stage.

The forward runs as the user wrote it. Modules of earlier stages return placeholders, the block just before the stage's
first one returns what was received, as do those whose outputs are carried, and after its last block a stage leaves the
forward.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from fourfold.parts.tensor.split_region import SplitRegion
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


class Carried(NamedTuple):
    """The modules whose outputs a stage receives, and those whose it sends, besides its own input and output."""

    received: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()


NOTHING_CARRIED = Carried()


class SplitResidual(NamedTuple):
    """Where tensor ranks begin to hold some tokens of hidden tensors: the modules at whose entry; empty: nowhere.

    Stages send each other these tokens only. How many there are altogether, a stage sees of the placeholders.
    """

    entries: frozenset[str]
    region: SplitRegion


class Gates:
    """The gates of one stage of a model."""

    def __init__(self, model: nn.Module, stages: StageMap, stage: int, residual: SplitResidual) -> None:
        self.stage, self.chain, self._model, self._residual = stage, stages.chain, model, residual
        blocks, names = stages.blocks[stage], stages.chain.blocks
        self._skipped = [*stages.chain.before, *names[: max(0, blocks.start - 1)]] if stage else []
        self._input_block = names[blocks.start - 1] if stage else None
        self._exit = names[blocks.stop - 1] if stage < stages.num_stages - 1 else None

    @property
    def may_be_carried(self) -> Sequence[str]:
        """The modules whose outputs the stage may need, besides that of the block before it."""
        return self._skipped

    @contextlib.contextmanager
    def closed(
        self, templates: Templates, received: Sequence[Tensor], carried: Carried = NOTHING_CARRIED
    ) -> Iterator[None]:
        """Within, a call of the model computes this stage, from what the stage before has sent.

        Unless it is the last stage, the call raises StageEnd with the outputs, those that are carried last.
        """
        given = self._given(templates, received, carried)
        sent = {name: list(tree_leaves(given[name])) for name in carried.sent if name in given}
        replaced: list[tuple[nn.Module, Any]] = []

        def gate(name: str, function: Callable[..., Any]) -> None:
            module = self._model.get_submodule(name)
            replaced.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = self._beginning_tokens(function) if self._splits_at(name) else function

        def keep(name: str, output: Any) -> None:
            sent[name] = list(tree_leaves(output))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            raise StageEnd([*tree_leaves(output), *itertools.chain.from_iterable(sent[name] for name in carried.sent)])

        for name in self._skipped:
            if name not in given:
                gate(name, templates[name].placeholder)
        for name, output in given.items():
            gate(name, lambda *args, output=output, **kwargs: output)
        hooks = [
            self._model.get_submodule(name).register_forward_hook(lambda m, args, output, name=name: keep(name, output))
            for name in carried.sent
            if name not in given
        ]
        if self._exit is not None:
            hooks.append(self._model.get_submodule(self._exit).register_forward_hook(leave))
        try:
            yield
        finally:
            self.end_tokens()
            for hook in hooks:
                hook.remove()
            for module, before in reversed(replaced):
                if before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before

    def _given(self, templates: Templates, received: Sequence[Tensor], carried: Carried) -> dict[str, Any]:
        """By module of an earlier stage: what it returned there."""
        if self._input_block is None:
            return {}
        tensors = iter([_writable(each) for each in received])
        return {
            name: templates[name].filled([next(tensors) for _ in templates[name].shapes])
            for name in (self._input_block, *carried.received)
        }

    def _splits_at(self, name: str) -> bool:
        return name in self._residual.entries

    def _beginning_tokens(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A gate at whose entry hidden tensors would be split."""

        def begin(*args: Any, **kwargs: Any) -> Any:
            hidden = next(each for each in tree_leaves((args, kwargs)) if each.is_floating_point())
            self._residual.region.begin_tokens(hidden)
            return function(*args, **kwargs)

        return begin

    def end_tokens(self) -> None:
        """A forward or a backward of this stage has ended: the next one may have other tokens."""
        self._residual.region.end_tokens()


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


def _first(given: Sequence[Tensor], accepts: Callable[[Tensor], bool]) -> int | None:
    return next((index for index, tensor in enumerate(given) if accepts(tensor)), None)
