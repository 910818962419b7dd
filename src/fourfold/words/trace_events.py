"""Spans: what a rank did when, under the program's own names.

lane      what runs one after the other: compute, reduce, send
span      a name on a lane, from start to stop, in nanoseconds of this host's monotonic clock
moment    a span without length: a bucket is ready (complete on this rank), sent (launched), done (its sum is there)
recorder  who is told; `SILENT` forgets at once
Law: those who tell never ask whether anybody listens.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from fourfold.words.program import Action

COMPUTE_LANE, REDUCE_LANE, SEND_LANE = "compute", "reduce", "send"
LANES = (COMPUTE_LANE, REDUCE_LANE, SEND_LANE)
WAIT_SPAN = "wait"
RING_SPAN = "ring"  # a message around the ring of a sequence
READY_EVENT, LAUNCHED_EVENT, DONE_EVENT = "ready", "sent", "done"


class Span(NamedTuple):
    """A stretch of a rank's time."""

    name: str
    lane: str
    start: int
    stop: int


class Recorder(Protocol):
    """Told of what happens in a step."""

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Within: this rank does something that is no action of the program, in the compute lane."""
        ...

    def action(self, action: Action) -> AbstractContextManager[Any]:
        """Within: this rank's program is at this action."""
        ...

    def reducing(self, bucket: int) -> AbstractContextManager[Any]:
        """Within: this rank does its part of a bucket's reduction."""
        ...

    def waiting(self) -> AbstractContextManager[Any]:
        """Within: this rank waits for others, or for its own reductions. May be nested."""
        ...

    def sending(self, name: str) -> Callable[[], None]:
        """A message is on its way, in the send lane, until what is returned is called."""
        ...

    def instant(self, bucket: int, what: str) -> None:
        """A bucket is ready, sent or done."""
        ...

    def record_async_reduction(self, bucket: int, future: Callable[[], Any]) -> None:
        """A bucket's reduction has begun elsewhere, and ends when the future does."""
        ...


def _noop() -> None:
    pass


class NullRecorder:
    """The recorder of every step that is not sampled."""

    _null_context = contextlib.nullcontext()

    def span(self, name: str) -> AbstractContextManager[Any]:
        return self._null_context

    def action(self, action: Action) -> AbstractContextManager[Any]:
        return self._null_context

    def reducing(self, bucket: int) -> AbstractContextManager[Any]:
        return self._null_context

    def waiting(self) -> AbstractContextManager[Any]:
        return self._null_context

    def sending(self, name: str) -> Callable[[], None]:
        return _noop

    def instant(self, bucket: int, what: str) -> None:
        pass

    def record_async_reduction(self, bucket: int, future: Callable[[], Any]) -> None:
        pass


NULL_RECORDER: Recorder = NullRecorder()


class WaitsOnlyRecorder(NullRecorder):
    """Passes on when this rank waits, and nothing else."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def waiting(self) -> AbstractContextManager[Any]:
        return self._recorder.waiting()
