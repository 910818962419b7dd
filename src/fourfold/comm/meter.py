"""Comm meter: how long one rank has waited for others, how much it has sent, and who records that.

timed    time in which this rank waits, also for its own reductions: recorded as a wait, and counted
counted  time in which it moves gradients: counted, and recorded as something else
Law: one meter per rank; whatever communicates is given it when it is made. Nested times count once.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from fourfold.environment.processes import processor_delay_seconds
from fourfold.words.noop import noop
from fourfold.words.program import Verb
from fourfold.words.trace_events import NULL_RECORDER, Recorder


class CommMeter:
    """The communication of one rank since its start."""

    def __init__(self) -> None:
        self.recorder: Recorder = NULL_RECORDER
        """Records waits, messages, and this rank's part of each reduction: the one place where it is set."""
        self.waiting_seconds = 0.0
        """Seconds spent moving gradients and waiting for other ranks."""
        self.delay_seconds = 0.0
        """The part of them in which this thread was ready and others had the processors."""
        self.sent_bytes = 0.0
        """Bytes of gradients, weights and tokens sent over process groups, counted as for rings."""

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Within, this rank waits."""
        with self.recorder.waiting(), self.counted():
            yield

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time within as waiting, without recording a wait."""
        waited, delayed = self.waiting_seconds, self.delay_seconds
        begin, delay = time.perf_counter(), processor_delay_seconds()
        yield
        self.waiting_seconds = waited + time.perf_counter() - begin
        self.delay_seconds = delayed + processor_delay_seconds() - delay

    def reducing(self, reduction_index: int | None) -> AbstractContextManager[Any]:
        """Within, this rank does its part of a reduction; None: of one that is not recorded."""
        return contextlib.nullcontext() if reduction_index is None else self.recorder.reducing(reduction_index)

    def unsharding(self, unshard_index: int | None) -> Callable[[], None]:
        """A bucket's weights are being brought together, until the returned function is called; None: not recorded."""
        return noop if unshard_index is None else self.recorder.unsharding(unshard_index)

    def record_async(self, verb: Verb, index: int | None, future: Callable[[], Any] | None) -> None:
        """A reduction, gather or unshard runs asynchronously until the future completes; None: it is not recorded."""
        if index is not None and future is not None:
            self.recorder.record_async(verb, index, future)
