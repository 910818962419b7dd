"""Tracer: records what every rank does in a few steps of a run, on one clock, in trace.json.

sampled step  a step that is recorded: steps 3 and 4, then every `every`-th; all others run with a null recorder
span          what the process did; on a GPU the time to launch an action, not the time its kernels take
clock offset  how far a host's clock is ahead of rank 0's
Law: every rank samples the same steps, and when a sampled step has ended the file has all ranks' spans: a run that is
killed leaves its trace.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fourfold.comm.communicator import host_id
from fourfold.environment.atomic_file import write_atomically
from fourfold.plan.rank_program import lane_of
from fourfold.step.train_step import TrainStep
from fourfold.trace.trace_file import (
    COLLECTIVE_LANES,
    DATA_SPAN,
    STEP_SPAN,
    Event,
    Trace,
    clock_offset_bounds,
    encode_trace,
)
from fourfold.trainer.settings import TRACE_EVERY
from fourfold.words.errors import os_error_text
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import (
    COMPUTE_LANE,
    DATA_LANE,
    GATHER_LANE,
    NULL_RECORDER,
    REDUCE_LANE,
    SEND_LANE,
    WAIT_SPAN,
    Recorder,
    Span,
)

TRACE_FILE = "trace.json"
# The launch order is fixed after the first step, and memory no longer grows after the second.
FIRST_SAMPLED = (3, 4)
MAX_KEPT_STEPS = 20


class _OpenSpan:
    """A span that has begun. Not a generator, which would take three times as long."""

    __slots__ = ("_lane", "_name", "_spans", "_start")

    def __init__(self, spans: list[Span], name: str, lane: str) -> None:
        self._spans, self._name, self._lane = spans, name, lane

    def __enter__(self) -> None:
        self._start = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        self._spans.append(Span(self._name, self._lane, self._start, time.monotonic_ns()))


class _OpenGather(_OpenSpan):
    """The start of a gather, or all of it unless it runs asynchronously."""

    __slots__ = ("_async_actions",)

    def __init__(self, spans: list[Span], name: str, async_actions: set[str]) -> None:
        super().__init__(spans, name, GATHER_LANE)
        self._async_actions = async_actions

    def __exit__(self, *error: object) -> None:
        if self._name not in self._async_actions:
            super().__exit__(*error)


class SpanRecorder(Recorder):
    """A recorder that keeps the spans of one rank in one step."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._seen: set[tuple[int, str]] = set()
        self._async_actions: set[str] = set()
        """The actions that run asynchronously: their spans last until they have ended."""

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return _OpenSpan(self.spans, name, COMPUTE_LANE)

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        return _OpenSpan(self.spans, DATA_SPAN, DATA_LANE)

    def action(self, action: Action) -> contextlib.AbstractContextManager[Any]:
        # What begins within a forward or backward is recorded where it begins.
        if action.verb in (Verb.REDUCE, Verb.UNSHARD):
            return contextlib.nullcontext()
        if action.verb == Verb.GATHER:
            return _OpenGather(self.spans, str(action), self._async_actions)
        return _OpenSpan(self.spans, str(action), lane_of(action))

    def reducing(self, bucket: int) -> contextlib.AbstractContextManager[Any]:
        return _OpenSpan(self.spans, _reduce_name(bucket), REDUCE_LANE)

    def waiting(self) -> contextlib.AbstractContextManager[Any]:
        return _OpenSpan(self.spans, WAIT_SPAN, COMPUTE_LANE)

    def sending(self, name: str) -> Callable[[], None]:
        start = time.monotonic_ns()
        return lambda: self.spans.append(Span(name, SEND_LANE, start, time.monotonic_ns()))

    def unsharding(self, unshard_index: int) -> Callable[[], None]:
        start, name = time.monotonic_ns(), str(Action(Verb.UNSHARD, 0, unshard_index))
        return lambda: self.spans.append(Span(name, GATHER_LANE, start, time.monotonic_ns()))

    def instant(self, bucket: int, what: str) -> None:
        now = time.monotonic_ns()
        if (bucket, what) not in self._seen:
            self._seen.add((bucket, what))
            self.spans.append(Span(f"{_reduce_name(bucket)} {what}", REDUCE_LANE, now, now))

    def record_async(self, verb: Verb, index: int, future: Callable[[], Any]) -> None:
        start, action = time.monotonic_ns(), Action(verb, 0, index)
        self._async_actions.add(str(action))

        def done(_: Any) -> None:
            self.spans.append(Span(str(action), lane_of(action), start, time.monotonic_ns()))

        future().add_done_callback(done)


@functools.cache
def _reduce_name(bucket: int) -> str:
    return str(Action(Verb.REDUCE, 0, bucket))


def is_sampled(step_number: int, every: int) -> bool:
    """Whether a step is recorded; the first step is 1."""
    return every > 0 and (step_number in FIRST_SAMPLED or step_number % every == 0)


class Tracer:
    """The sampled steps of a run, in `folder`/trace.json. Only rank 0 is given a folder.

    `log_message` is called when the disk does not take the file: once, until it does again.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        every: int = TRACE_EVERY,
        folder: Path | None = None,
        max_kept: int = MAX_KEPT_STEPS,
        log_message: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._step, self._every, self._folder, self._log_message = step, every, folder, log_message
        self._max_kept = max_kept
        self._has_write_error = False
        self._clock_offsets: list[int] | None = None
        self._programs = step.programs
        self._steps: dict[int, list[list[Span]]] = {}

    @contextlib.contextmanager
    def sample(self, step_number: int) -> Iterator[Recorder]:
        """Within: a step, which is recorded if it is sampled. Collective."""
        if not is_sampled(step_number, self._every):
            yield NULL_RECORDER
            return
        recorder = SpanRecorder()
        self._step.set_recorder(recorder)
        try:
            with recorder.span(STEP_SPAN):
                yield recorder
        finally:
            self._step.set_recorder(NULL_RECORDER)
        self._add_step(step_number, self._step.all_gather_json(list(recorder.spans)))

    def _add_step(self, step_number: int, spans_by_rank: list[list[list[Any]]]) -> None:
        if self._clock_offsets is None:
            self._clock_offsets = _clock_offsets(self._step.all_gather_json)
        self._programs = self._step.programs
        self._steps[step_number] = [[Span(*span) for span in spans] for spans in spans_by_rank]
        if len(self._steps) > self._max_kept:
            # The first ones show how the run began, the last ones how it ended.
            del self._steps[list(self._steps)[len(FIRST_SAMPLED)]]
        if self._folder is not None:
            self._write(self._folder)

    def write_again(self) -> None:
        """At the end: write what the disk has not taken."""
        if self._folder is not None and self._has_write_error:
            self._write(self._folder)

    def _write(self, folder: Path) -> None:
        try:
            write_atomically(folder / TRACE_FILE, encode_trace(self.trace))
            self._has_write_error = False
        except OSError as error:
            # Training must not end for its trace, and the next sampled step writes all of it again.
            if not self._has_write_error:
                reason = f"{TRACE_FILE} could not be written: {os_error_text(error)}"
                self._log_message(f"warning: {reason}; its steps are kept; training continues")
            self._has_write_error = True

    @property
    def trace(self) -> Trace:
        """All steps that are kept, on rank 0's clock: the same on every rank."""
        offsets = self._clock_offsets or []
        rows = [
            (rank, number, span._replace(start=span.start - offsets[rank], stop=span.stop - offsets[rank]))
            for number, by_rank in self._steps.items()
            for rank, spans in enumerate(by_rank)
            for span in _without_overlap(spans)
        ]
        begin = min((span.start for _, _, span in rows), default=0)
        events = tuple(
            Event(rank, number, span.name, span.lane, (span.start - begin) / 1e9, (span.stop - begin) / 1e9)
            for rank, number, span in rows
        )
        program = self._programs if offsets else {}
        return Trace(program, events, self._step.plan.mesh, self._step.ranks_by_memory)


def _without_overlap(spans: list[Span]) -> list[Span]:
    """Collectives that run at the same time on one lane follow each other: each begins when the one before ended."""
    tiled: list[Span] = []
    free: dict[str, int] = dict.fromkeys(COLLECTIVE_LANES, 0)
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        if span.lane in free and span.stop > span.start:
            span = span._replace(start=max(span.start, min(free[span.lane], span.stop)))
            free[span.lane] = max(free[span.lane], span.stop)
        tiled.append(span)
    return tiled


NUM_CLOCK_READINGS = 8  # rounds in which all ranks read their clocks


def _clock_offsets(all_gather: Callable[[Any], list[Any]]) -> list[int]:
    """How far each rank's clock is ahead of rank 0's, in nanoseconds; ranks of one host share a clock. Collective."""
    hosts = all_gather(host_id())
    if len(set(hosts)) == 1:
        return [0] * len(hosts)
    readings = list(zip(*(all_gather(time.monotonic_ns()) for _ in range(NUM_CLOCK_READINGS)), strict=True))
    offsets = []
    for host, column in zip(hosts, readings, strict=True):
        least, most = clock_offset_bounds(list(readings[0]), list(column))
        offsets.append(0 if host == hosts[0] else (least + most) // 2)
    # One offset per host: its first rank's.
    return [offsets[hosts.index(host)] for host in hosts]
