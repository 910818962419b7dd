"""Trace file: what all ranks recorded in the sampled steps of a run, and the file it is saved in.

event  a span of a rank in a step, in seconds since the first event of the trace; an instant has no length
trace  the program that ran, and its events
Law: decode_trace(encode_trace(trace)) == trace, to the nanosecond. The file opens in Perfetto and chrome://tracing.

Format: "Trace Event Format", as a JSON object; a process is a rank, a thread is a lane.

wait    a rank's time until what it waits for has arrived; a delay until it resumes is its own time
nested  an update that ran inside a forward or backward, because it is fused into it
Law: every second of a rank's own time belongs to one action, or lies before its first or after its last one.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from fourfold.plan.decode import DecodeError, from_json
from fourfold.plan.dependencies import RanksByMemory
from fourfold.words.errors import FourfoldError, Problem
from fourfold.words.mesh import Mesh
from fourfold.words.program import Program, ProgramError, Verb, format_program, parse_program
from fourfold.words.trace_events import COMPUTE_LANE, GATHER_LANE, LANES, REDUCE_LANE, WAIT_SPAN

TRACE_VERSION = 1
STEP_SPAN = "step"  # the name of the span that holds a whole step
DATA_SPAN = "data"  # the name of the span in which a step waits for its batch


class TraceError(FourfoldError):
    """A trace that cannot be read."""


class Event(NamedTuple):
    """A span of a rank, in seconds with nanosecond resolution."""

    rank: int
    step: int
    name: str
    lane: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Trace:
    """The program that ran, the events of its sampled steps, and the places of the ranks; None: all are data ranks.

    ranks_by_memory  the ranks that meet in shared memory, a tuple for each; those of other transports are in none
    """

    program: Program
    events: tuple[Event, ...]
    mesh: Mesh | None = None
    ranks_by_memory: RanksByMemory = ()

    @property
    def ranks(self) -> list[int]:
        return sorted(self.program)

    @property
    def steps(self) -> list[int]:
        return sorted({event.step for event in self.events})

    def program_of_step(self, step: int) -> Program:
        """The program of one sampled step: under local SGD, pushes and pulls happen only in some steps."""
        names = {event.name for event in self.events if event.step == step}
        return {
            rank: tuple(a for a in actions if a.verb not in (Verb.PUSH, Verb.PULL) or str(a) in names)
            for rank, actions in self.program.items()
        }

    def events_of(self, *, step: int, rank: int) -> list[Event]:
        """The events of one rank in one step."""
        return [event for event in self.events if event.step == step and event.rank == rank]


def encode_trace(trace: Trace) -> bytes:
    """The trace as the bytes of a file."""
    rows: list[dict[str, Any]] = []
    for rank in trace.ranks:
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for number, lane in enumerate(LANES):
            rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
    for event in trace.events:
        common = {
            "name": event.name,
            "pid": event.rank,
            "tid": LANES.index(event.lane),
            "ts": _to_microseconds(event.start),
        }
        kind = "wait" if event.name == WAIT_SPAN else event.lane
        length = {"ph": "X", "dur": _to_microseconds(event.seconds)} if " " not in event.name else {"ph": "i", "s": "t"}
        rows.append({**common, **length, "cat": kind, "args": {"step": event.step}})
    mesh = None if trace.mesh is None else dataclasses.asdict(trace.mesh)
    other = {"fourfold": TRACE_VERSION, "program": format_program(trace.program), "mesh": mesh}
    other["ranks_by_memory"] = trace.ranks_by_memory
    return b"{" + b",\n".join([
        b'"displayTimeUnit": "ms"',
        b'"otherData": ' + msgspec.json.encode(other),
        b'"traceEvents": [\n' + b",\n".join(map(msgspec.json.encode, rows)) + b"\n]",
    ]) + b"}\n"  # fmt: skip


def _to_microseconds(seconds: float) -> float:
    return round(seconds * 1e9) / 1e3


def decode_trace(data: bytes, *, where: str = "trace.json") -> Trace:
    """Read the trace in a file. Raises TraceError unless Fourfold wrote it."""
    try:
        document = from_json(data)
        program = parse_program(document["otherData"]["program"])
        mesh = document["otherData"].get("mesh")  # the first traces had none
        memory = tuple(map(tuple, document["otherData"].get("ranks_by_memory", ())))  # these had none for longer
        rows = [row for row in document["traceEvents"] if row["ph"] in "Xi"]
        return Trace(program, tuple(map(_event, rows)), None if mesh is None else Mesh(**mesh), memory)
    except (DecodeError, KeyError, TypeError, AttributeError, IndexError, ProgramError) as error:
        problem = Problem(f"no trace of a run ({error})", "the file that fourfold train writes", "the same run again")
        raise TraceError(problem, where=where) from None


def _event(row: Mapping[str, Any]) -> Event:
    start = round(row["ts"] * 1e3)
    stop = start + round(row.get("dur", 0) * 1e3)
    return Event(row["pid"], row["args"]["step"], row["name"], LANES[row["tid"]], start / 1e9, stop / 1e9)


def is_action(name: str) -> bool:
    """Whether an event is of an action, and not a wait, an instant or another span."""
    return name[:1].isupper() and " " not in name


def merged_waits(events: Sequence[Event]) -> list[Event]:
    """The waits among the events; those that overlap or touch are merged."""
    joined: list[Event] = []
    for event in sorted((e for e in events if e.name == WAIT_SPAN), key=lambda e: e.start):
        if joined and event.start <= joined[-1].stop:
            joined[-1] = joined[-1]._replace(stop=max(joined[-1].stop, event.stop))
        else:
            joined.append(event)
    return joined


def clock_offset_bounds(mine: list[int], theirs: list[int]) -> tuple[int, int]:
    """The bounds of how far another host's clock is ahead of this one's, in nanoseconds.

    Both hosts read their clocks in rounds: no host begins round i + 1 before every host has begun round i.
    """
    pairs = list(itertools.pairwise(zip(mine, theirs, strict=True)))
    lower = max(before[1] - after[0] for before, after in pairs)
    upper = min(after[1] - before[0] for before, after in pairs)
    return lower, upper


# ---- Rank events: what one rank recorded in one step, and how long it was busy --------------------------------------

COLLECTIVE_LANES: tuple[str, ...] = (REDUCE_LANE, GATHER_LANE)
HOLDING_VERBS = (Verb.FORWARD, Verb.BACKWARD)


class Interval(NamedTuple):
    start: float
    stop: float


class RankEvents:
    """What one rank recorded in one step."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.by_name = {event.name: event for event in events}
        self.waits = merged_waits(list(events))
        self.actions = [event for event in events if is_action(event.name)]
        self.updates = [event for event in self.actions if event.name[0] == Verb.UPDATE]

    @cached_property
    def in_order(self) -> list[Event]:
        """The actions of the compute lane that run inside no other, in the order in which they ended."""
        own = sorted((each for each in self.actions if each.lane == COMPUTE_LANE), key=lambda each: each.stop)
        holding = [each for each in own if each.name[0] in HOLDING_VERBS]
        return [each for each in own if not any(_is_inside(each, other) for other in holding)]

    @property
    def first(self) -> float:
        """When the first action began."""
        return min(event.start for event in self.actions)

    @property
    def start(self) -> float:
        """When the step began."""
        return self.by_name[STEP_SPAN].start if STEP_SPAN in self.by_name else self.first

    def interval_of(self, name: str) -> Interval:
        """An action of the process itself, from the end of the one before it."""
        event = self.by_name[name]
        before = [each.stop for each in self.in_order if each.stop <= event.start] if event in self.in_order else []
        return Interval(max(before, default=event.start), event.stop)

    def nested_updates(self, name: str, within: Interval) -> Iterator[Event]:
        """The updates that ran inside an action, because they are fused into it."""
        if name[0] in HOLDING_VERBS:
            yield from (each for each in self.updates if within.start <= each.start and each.stop <= within.stop)

    def busy_seconds(self, within: Interval, moments: Iterable[float] = (), updates: Iterable[Event] = ()) -> float:
        """Seconds of an interval, less waits and `updates`. A wait ends at the last of the `moments` in it, if any."""
        seconds = within.stop - within.start - self._waited(within, moments)
        return seconds - sum(each.seconds - self._waited(Interval(each.start, each.stop), moments) for each in updates)

    def _waited(self, within: Interval, moments: Iterable[float]) -> float:
        total = 0.0
        for wait in self.waits:
            start, stop = max(wait.start, within.start), min(wait.stop, within.stop)
            if start < stop:
                total += max((each for each in moments if start <= each <= stop), default=stop) - start
        return total


def _is_inside(event: Event, other: Event) -> bool:
    return event is not other and other.start <= event.start and event.stop <= other.stop
