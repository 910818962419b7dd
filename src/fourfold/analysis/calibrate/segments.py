"""Segments: seconds of a forward and of a backward, whole and in two halves, of each segment of a model.

turn   one forward and one backward, on all ranks at once
halves a backward as zero-bubble schedules divide it, and the forward that prepares it
cold   before a turn, memory is read and written as an update would: a step finds other data in the caches
Law: every rank takes the same turns. Gradients are taken from autograd as a step takes them, and dropped.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.analysis.calibrate.clock import SegmentClock
from fourfold.analysis.calibrate.probe import Probe
from fourfold.analysis.calibrate.timing import Turns, now
from fourfold.parts.deferred_grads import BackwardHalves, DeferredGrads, WholeBackward
from fourfold.step.batch import Microbatch

COLD_BYTES = 64 * 2**20


Backward = Callable[[Tensor, "_DroppedGrads"], tuple[list[float], list[float]]]
"""The seconds by segment of a whole backward, or of its first half; and those of its second half."""


class SegmentTurns(NamedTuple):
    """Seconds by segment, medians over the turns of this rank. `second_half`: empty if backwards are whole."""

    forward: list[float]
    backward: list[float]
    second_half: list[float]


class _DroppedGrads:
    """Takes gradients and drops them. `taken`: when the last one of each segment was."""

    def __init__(self, parameters: Sequence[Tensor], clock: SegmentClock) -> None:
        self._parameters = parameters
        self._segments = [clock.segment_of(parameter) for parameter in parameters]
        self.seconds = [0.0] * clock.num_segments
        self._last = 0.0

    def begin(self) -> None:
        self.seconds = [0.0] * len(self.seconds)
        self._last = now()

    def on_grad(self, param_index: int) -> None:
        self._parameters[param_index].grad = None
        taken = now()
        self.seconds[self._segments[param_index]] += taken - self._last
        self._last = taken


class SegmentTimer:
    """Measures the segments of one probe."""

    def __init__(self, probe: Probe, turns: Turns) -> None:
        self._probe, self._turns, self._chunk = probe, turns, probe.stage.chunks[0]
        self._clock = SegmentClock(probe.model)
        self._cold = torch.zeros(COLD_BYTES // 4, device=turns.ranks.device)

    def whole(self, batch: Any) -> SegmentTurns:
        """With whole backwards. Collective."""
        return self._run(batch, WholeBackward(), self._whole_backward)

    def halves(self, batch: Any) -> SegmentTurns:
        """With backwards in two halves. Collective."""
        deferred = DeferredGrads(self._probe.parameters)

        def backward(loss: Tensor, sink: _DroppedGrads) -> tuple[list[float], list[float]]:
            self._clock.begin_backward()
            with deferred.first_half(self._probe.stage.grad_hooks) as pending:
                self._chunk.backward([loss], None)
                first = self._clock.end_backward()
            sink.begin()
            deferred.second_half(pending, sink)
            return first, list(sink.seconds)

        return self._run(batch, deferred, backward)

    def _whole_backward(self, loss: Tensor, sink: _DroppedGrads) -> tuple[list[float], list[float]]:
        self._clock.begin_backward()
        with self._probe.stage.grad_hooks.calling(sink):
            self._chunk.backward([loss], None)
        return self._clock.end_backward(), []

    def _run(self, batch: Any, halves: BackwardHalves, backward: Backward) -> SegmentTurns:
        sink = _DroppedGrads(self._probe.parameters, self._clock)
        taken: list[tuple[list[float], list[float], list[float]]] = []

        def turn() -> float:
            layout = self._probe.assembly.batches.microbatches(batch, 1, step=len(taken), samples=None)
            with layout as (part,), self._clock.marking():
                self._cold.add_(1.0)
                self._turns.begin()
                forward, loss = self._forward(part, halves)
                taken.append((forward, *backward(loss, sink)))
            return sum(map(sum, taken[-1]))

        timed = taken[-self._turns.take(turn) :]
        return SegmentTurns(*(_medians(each) for each in zip(*timed, strict=True)))

    def _forward(self, part: Microbatch, halves: BackwardHalves) -> tuple[list[float], Tensor]:
        self._clock.begin_forward()
        with halves.in_forward():
            output = self._chunk.forward(part, [])
        assert self._chunk.loss is not None
        loss = self._chunk.loss(output, part)
        return self._clock.end_forward(), loss.total / max(1.0, float(loss.count))


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """By segment."""
    return [median(values) for values in zip(*rows, strict=True)]
