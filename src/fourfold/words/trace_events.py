"""Trace events: what a rank did and when, under the names of the program.

lane      a queue whose work runs one after the other: compute, reduce, send, gather, data (this rank waits for a batch)
span      a name on a lane, from start to stop, in nanoseconds of this host's monotonic clock
instant   a span without length: a bucket is ready (complete on this rank), sent (launched) or done (its sum is there)
recorder  receives the events of a step; `NULL_RECORDER` discards them
Law: code that reports an event never checks whether it is being recorded.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from fourfold.words.noop import noop
from fourfold.words.program import Action, Verb

COMPUTE_LANE, REDUCE_LANE, SEND_LANE, GATHER_LANE, DATA_LANE = "compute", "reduce", "send", "gather", "data"
# A trace file has their numbers: new ones go to the end.
LANES = (COMPUTE_LANE, REDUCE_LANE, SEND_LANE, GATHER_LANE, DATA_LANE)
WAIT_SPAN = "wait"
RING_SPAN = "ring"  # a message of ring attention
READY_EVENT, LAUNCHED_EVENT, DONE_EVENT = "ready", "sent", "done"


class Span(NamedTuple):
    """A named interval of a rank's time, in nanoseconds."""

    name: str
    lane: str
    start: int
    stop: int


class Recorder:
    """Receives what happens in a step, and here discards it: that of every step which is not sampled.

    The context managers record a span from entry to exit.
    """

    _null_context: AbstractContextManager[Any] = contextlib.nullcontext()

    def span(self, name: str) -> AbstractContextManager[Any]:
        """This rank does something that is not an action of the program, on the compute lane."""
        return self._null_context

    def reading(self) -> AbstractContextManager[Any]:
        """This rank waits for its next batch, on the data lane."""
        return self._null_context

    def action(self, action: Action) -> AbstractContextManager[Any]:
        """This rank runs an action of its program."""
        return self._null_context

    def reducing(self, bucket: int) -> AbstractContextManager[Any]:
        """This rank does its part of a bucket's reduction."""
        return self._null_context

    def waiting(self) -> AbstractContextManager[Any]:
        """This rank waits for other ranks, or for its own reductions. May be nested."""
        return self._null_context

    def sending(self, name: str) -> Callable[[], None]:
        """A message is in flight on the send lane, until the returned function is called."""
        return noop

    def unsharding(self, unshard_index: int) -> Callable[[], None]:
        """A bucket's weights are being brought together, until the returned function is called: it has waited."""
        return noop

    def instant(self, bucket: int, what: str) -> None:
        """A bucket is ready, sent or done: `what` is READY_EVENT, LAUNCHED_EVENT or DONE_EVENT."""

    def record_async(self, verb: Verb, index: int, future: Callable[[], Any]) -> None:
        """A reduction, gather or unshard runs asynchronously, from now until the future completes."""


NULL_RECORDER = Recorder()
