"""Clock: how long each segment of a model computes in a forward and in a backward.

segment  the first end, a block of the chain, the last end
mark     a moment at which one segment ends and the next one begins: a block is entered or left, or the gradient of
         what it was given is complete
Law: the seconds of the segments add up to those of the whole pass.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fourfold.analysis.calibrate.timing import now
from fourfold.step.pipeline.chain import find_chain
from fourfold.step.tensor_tree import tree_leaves


class SegmentClock:
    """Marks the passes of one model, whose chain has `num_blocks` blocks; it has two segments more."""

    def __init__(self, model: nn.Module) -> None:
        chain = find_chain(model)
        self._blocks = [model.get_submodule(name) for name in chain.blocks]
        self._parameters = {id(p) for p in model.parameters()}
        self._segment_of = {id(p): index for index, block in enumerate(self._blocks, 1) for p in block.parameters()}
        behind = [p for name in chain.behind for p in model.get_submodule(name).parameters()]
        self._segment_of |= {id(p): self.num_segments - 1 for p in behind if id(p) not in self._segment_of}
        self._forward: list[float] = []
        self._backward: dict[int, float] = {}

    @property
    def num_segments(self) -> int:
        return len(self._blocks) + 2

    def segment_of(self, parameter: Tensor) -> int:
        """The segment that has a parameter; what belongs to no block and lies behind none is of the first end."""
        return self._segment_of.get(id(parameter), 0)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Inside, forwards and their backwards are marked."""
        handles = []
        for index, block in enumerate(self._blocks):
            handles.append(block.register_forward_pre_hook(self._entering(index), with_kwargs=True))
        handles.append(self._blocks[-1].register_forward_hook(self._leave) if self._blocks else None)
        try:
            yield
        finally:
            for handle in handles:
                if handle is not None:
                    handle.remove()

    def _entering(self, index: int) -> Any:
        def enter(_: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
            self._forward.append(now())
            self._watch(index, [*tree_leaves(list(arguments)), *tree_leaves(dict(keywords))])

        return enter

    def _leave(self, _: nn.Module, arguments: Any, outputs: Any) -> None:
        self._forward.append(now())
        self._watch(len(self._blocks), list(tree_leaves(outputs)))

    def _watch(self, boundary: int, values: Sequence[Any]) -> None:
        """Mark when the gradient of the first of the values that has one is complete."""
        found = [v for v in values if isinstance(v, Tensor) and v.requires_grad and id(v) not in self._parameters]
        if found:

            def complete(_: Tensor) -> None:
                self._backward.setdefault(boundary, now())

            found[0].register_hook(complete)

    def begin_forward(self) -> None:
        self._forward, self._backward = [now()], {}

    def end_forward(self) -> list[float]:
        """Seconds of the forward by segment."""
        marks = [*self._forward, now()]
        if not self._blocks:  # all of the model is the first end
            marks.append(marks[-1])
        assert len(marks) == self.num_segments + 1, "the model calls each block of its chain once"
        return [stop - start for start, stop in itertools.pairwise(marks)]

    def begin_backward(self) -> None:
        self._backward_start = now()

    def end_backward(self) -> list[float]:
        """Seconds of the backward by segment. A segment whose input has no gradient ends with the backward."""
        stop, marks = now(), [self._backward_start]
        if not self._blocks:
            return [stop - marks[0], 0.0]
        for boundary in range(len(self._blocks), -1, -1):
            marks.append(max(marks[-1], self._backward.get(boundary, stop)))
        marks.append(stop)
        return [after - before for before, after in itertools.pairwise(marks)][::-1]
