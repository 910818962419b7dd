"""Segments: which part of a model computes at a time: what is before the chain, a block of it, or what is behind it.

equal   blocks of one class, shapes and settings: they cost the same, and only the first of them computes
passing an equal block in whose place its input is returned
Law: every operation of a forward belongs to one segment, in the order of the chain.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fourfold.torch_kit.tensor_tree import tree_leaves

FIRST = 0  # the segment before the chain; block i is segment i + 1, and what is behind the chain comes last
COUNTERS = ("idx", "index", "layer_id")  # parts of the names of settings that only number a block


def equal_blocks(blocks: Mapping[str, nn.Module]) -> list[int]:
    """By block: the first one that is equal to it, perhaps itself. `blocks`: by name, in order."""
    found: dict[Any, int] = {}
    return [found.setdefault(_signature(name, block), place) for place, (name, block) in enumerate(blocks.items())]


def _signature(own_name: str, block: nn.Module) -> Any:
    """What decides the cost of a block: its modules and their settings, and the shapes of its tensors."""
    tensors = itertools.chain(block.named_parameters(), block.named_buffers())
    shapes = tuple((name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in tensors)
    settings = tuple(
        (name, type(module).__qualname__, key, _setting(value, own_name))
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if not key.startswith("_") and not any(part in key for part in COUNTERS)
    )
    return repr(block), shapes, settings


def _setting(value: Any, own_name: str) -> object:
    """A setting as something that can be compared: plain values by themselves, other objects by identity.

    The block's own name does not count: modules that say where they stand are equal in every block.
    """
    if isinstance(value, bool | int | float | None):
        return value
    return repr(value).replace(own_name, "") if isinstance(value, str | tuple | list | dict | set) else id(value)


class Boundary(NamedTuple):
    """What crosses from one stage to the next. `columns`: the last dim."""

    num_bytes: float
    columns: int
    element_bytes: int

    @classmethod
    def of(cls, hidden: Tensor | None) -> "Boundary | None":
        return None if hidden is None else cls(hidden.nbytes, hidden.shape[-1], hidden.element_size())


class SegmentTracker:
    """Knows which segment computes. `on_switch(segment)` is called when one has ended its forward."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        same_as: Sequence[int] = (),
        on_switch: Callable[[int], None] = lambda segment: None,
    ) -> None:
        """`same_as`: see `equal_blocks`."""
        self._blocks, self._same_as, self._on_switch = blocks, same_as, on_switch
        self.current = FIRST
        self.passed = set[int]()
        """Segments of blocks in whose place their input was returned."""
        self.boundary = Boundary(0.0, 0, 4)
        """What the first block has returned."""
        self._outputs: dict[int, Any] = {}
        self._arguments: dict[int, list[tuple[object, ...]]] = {}
        """By place: the shapes and dtypes that the block was called with."""

    @property
    def last(self) -> int:
        return len(self._blocks) + 1

    def counted_as(self, segment: int) -> int:
        """The segment that has computed in place of this one."""
        return self._same_as[segment - 1] + 1 if segment in self.passed else segment

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the forward of the model is watched, and equal blocks pass their input on."""
        hooks, replaced = [], []
        for place, block in enumerate(self._blocks):
            begin = functools.partial(self._begin, place + 1)
            hooks.append(block.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(block.register_forward_hook(lambda _, args, output, place=place: self._end(place, output)))
            if self._same_as[place] != place:
                replaced.append((block, block.__dict__.get("forward")))
                block.__dict__["forward"] = self._passing(place, block.forward)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for block, before in replaced:
                if before is None:
                    del block.__dict__["forward"]
                else:
                    block.__dict__["forward"] = before

    def _begin(self, segment: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self.current == FIRST:
            self._on_switch(FIRST)
        self.current = segment
        self._arguments.setdefault(segment - 1, [_form(each) for each in tree_leaves((args, kwargs))])

    def _end(self, place: int, output: Any) -> None:
        self._outputs.setdefault(place, output)
        if place == 0:
            self.boundary = Boundary.of(next(tree_leaves(output), None)) or self.boundary
        self._on_switch(place + 1)
        if place == len(self._blocks) - 1:
            self.current = self.last

    def _passing(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            same, forms = self._same_as[place], [_form(each) for each in tree_leaves((args, kwargs))]
            template = self._outputs.get(same)
            first = template[0] if isinstance(template, tuple) and template else template
            hidden = next(iter(tree_leaves((args, kwargs))), None)
            if not isinstance(first, Tensor) or hidden is None or _form(first) != _form(hidden):
                return forward(*args, **kwargs)
            if self._arguments.get(same) != forms:  # such as a mask that only some blocks get
                return forward(*args, **kwargs)
            self.passed.add(place + 1)
            output = hidden.view_as(hidden)
            return (output, *template[1:]) if isinstance(template, tuple) else output

        return run

    def end(self) -> None:
        """The forward has ended, with the loss. Nothing that it has made is held."""
        self._outputs.clear()
        self._on_switch(self.last if self._blocks else FIRST)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype
