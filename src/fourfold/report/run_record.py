"""Run record: a run, as read from its folder.

fault    a line of faults.jsonl (`trainer/fault_log.py`), of this version or a later one
segment  from the start, or from a checkpoint, to the checkpoint from which the next segment resumed
Law: a log whose last line is incomplete is read up to there; a missing file is an error, never a guess. What exists and
its size come from the disk, pauses and failures from the log. An unknown kind of fault is shown like any other; a line
that cannot be read is counted, and hides no other. Segments tile the run's steps: those after the last checkpoint of a
segment were repeated, and count once.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec

from fourfold.checkpoint.store import CheckpointStore
from fourfold.plan.decode import DecodeError, check_not_pipe, from_json, read_bounded, read_toml
from fourfold.planner.predict.prediction import RecordedPrediction, decode_prediction, is_of_plan
from fourfold.trace.trace_file import Trace, decode_trace
from fourfold.trace.utilization import Window
from fourfold.trainer.fault_log import FAULTS_FILE, Fault
from fourfold.words.errors import FourfoldError, Problem
from fourfold.words.measures import AVERAGED_STEPS, recent_rate, waiting_fraction
from fourfold.words.run_files import ARGUMENTS_KEY, LOG_FILE, PLAN_FILE, PREDICTION_FILE, SETTINGS_FILE

REQUIRED_FILES = (SETTINGS_FILE, PLAN_FILE, LOG_FILE)
ENVIRONMENT_KEYS = ("transport", "versions", "machine", "cores")


class ReportError(FourfoldError):
    """A run that cannot be read."""


# ---- checkpoints and faults ------------------------------------------------------------------------------------------


FAILED_WARNING = re.compile(r"the checkpoint of step ([0-9]{1,15}) could not be written: ([^;]*)")
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,15})")
KEPT, BEST, DAMAGED, NOT_WRITTEN = "kept", "kept, the best", "damaged, set aside", "not written"


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is on the disk, or that was lost. None means unknown."""

    step: int
    num_bytes: int | None
    pause_seconds: float | None
    status: str
    text: str = ""


class CheckpointHistory(NamedTuple):
    """The pause of every save that was begun, by step; and the checkpoints kept, damaged or not written, by step."""

    pauses: Mapping[int, float]
    checkpoints: Sequence[SavedCheckpoint] = ()

    @property
    def written_steps(self) -> set[int]:
        """The steps of the successful saves, according to the log."""
        return {*self.pauses} - {each.step for each in self.checkpoints if each.status == NOT_WRITTEN}

    @property
    def on_disk(self) -> list[SavedCheckpoint]:
        return [each for each in self.checkpoints if each.status in (KEPT, BEST)]


def read_checkpoints(run_dir: Path, lines: Iterable[Mapping[str, Any]]) -> CheckpointHistory:
    """The checkpoints, from the run's folder and the lines of its log. Raises OSError."""
    pauses: dict[int, float] = {}
    found: list[SavedCheckpoint] = []
    for line in lines:
        if "pause_seconds" in line:
            pauses[line["step"]] = line["pause_seconds"]
        elif "damaged" in line and (name := CHECKPOINT_NAME.fullmatch(line["checkpoint"])):
            texts = [text.rpartition(f"{line['checkpoint']}/")[2] for text in line["damaged"]]
            found.append(SavedCheckpoint(int(name[1]), None, None, DAMAGED, "; ".join(texts)))
        elif "warning" in line and (failed := FAILED_WARNING.match(line["warning"])):
            found.append(SavedCheckpoint(int(failed[1]), None, pauses.get(int(failed[1])), NOT_WRITTEN, failed[2]))
    store = CheckpointStore(run_dir)
    best = store.best_step()
    for step in store.steps():
        num_bytes = sum(path.stat().st_size for path in store.step_dir(step).iterdir() if path.is_file())
        found.append(SavedCheckpoint(step, num_bytes, pauses.get(step), BEST if step == best else KEPT))
    return CheckpointHistory(pauses, sorted(found, key=lambda each: each.step))


class Faults(NamedTuple):
    """A run's faults in the order of the file, and the number of lines that could not be read."""

    faults: Sequence[Fault] = ()
    num_unreadable: int = 0

    def count(self, kind: str) -> int:
        return sum(fault.kind == kind for fault in self.faults)


def read_faults(folder: Path) -> Faults:
    """The faults of the run in this folder; none if it has no such file. Raises OSError."""
    path = folder / FAULTS_FILE
    if not path.exists():
        return Faults()
    check_not_pipe(path)
    known, num_unreadable = [], 0
    for line in path.read_bytes().splitlines():
        try:
            known.append(from_json(line, Fault))
        except DecodeError:
            num_unreadable += bool(line.strip())
    return Faults(known, num_unreadable)


# ---- segments, memory and data ---------------------------------------------------------------------------------------


@dataclass
class Segment:
    """Steps `first_step` to `last_step`. `num_units`: what throughput counts."""

    first_step: int
    last_step: int
    seconds: float = 0.0
    num_units: float = 0.0


def read_segments(lines: Iterable[Mapping[str, Any]]) -> list[Segment]:
    """The segments in the lines of a log, at least one."""
    segments = [Segment(1, 0)]
    for line in lines:
        now = segments[-1]
        if "resumed" in line:
            segments.append(Segment(line["resumed"] + 1, line["resumed"]))
        elif "step" in line and "loss" in line:
            now.last_step, now.seconds = line["step"], line["elapsed_seconds"]
            now.num_units += line["units"]
        elif "finished" in line:
            now.seconds = line["seconds"]
    return segments


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank; see `trainer/memory_log.py`."""

    kept_bytes: float
    peak_bytes: float | None = None
    before_bytes: float | None = None
    device_bytes: float | None = None


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement of all ranks after a step. `predicted`: bytes of a rank by kind, None if it is not known."""

    step: int
    ranks: Sequence[RankMemory]
    predicted: dict[str, float] | None = None

    @property
    def largest_peak_bytes(self) -> float | None:
        """The peak of the rank that needs most: on its GPU, or else in the host's memory."""
        on_device = [rank.device_bytes for rank in self.ranks if rank.device_bytes is not None]
        resident = [rank.peak_bytes for rank in self.ranks if rank.peak_bytes is not None]
        return max(on_device or resident, default=None)


class DataRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of a run; see `trainer/meters.py`. `rank`: the one that waited most, for `rank_seconds`."""

    first_epoch: int
    last_epoch: int
    first_step: int
    last_step: int
    num_steps: int
    num_samples: int
    compute_seconds: float
    running_seconds: float
    rank: int
    host: str
    rank_seconds: float
    bytes_read: int | None = None
    utilization: float | None = None

    @property
    def window(self) -> Window:
        return Window(self.num_steps, self.num_samples, self.compute_seconds, self.running_seconds, self.bytes_read)


def _read_data_records(lines: Iterable[Mapping[str, Any]]) -> list[DataRecord]:
    """The segments in the lines of a log, without those that a resumed run has repeated."""
    records: list[DataRecord] = []
    for line in lines:
        if "resumed" in line:
            records = [each for each in records if each.last_step <= line["resumed"]]
        elif "data" in line:
            records.append(msgspec.convert(line["data"], DataRecord))
    return records


# ---- the log ---------------------------------------------------------------------------------------------------------


class LogLine(TypedDict, total=False):
    """The fields that lines of a log may have, and their types."""

    step: int
    loss: float | None
    samples: float
    tokens: float | None
    units: float
    seconds: float
    waiting_seconds: float
    skipped: bool
    sent_bytes: float
    elapsed_seconds: float
    pause_seconds: float
    checkpoint: str
    damaged: list[str]
    warning: str
    valid: dict[str, float | None]
    resumed: int
    finished: int
    unit: str
    rate: float | None
    lr: float | None
    grad_norm: float | None
    memory: MemoryRecord
    data_seconds: float | None
    data: DataRecord


NEEDS = {
    "loss": ("samples", "units", "unit", "elapsed_seconds", "seconds", "waiting_seconds"),
    "finished": ("seconds",),
    "damaged": ("checkpoint",),
    "pause_seconds": ("step",),
}


def read_line(line: bytes) -> dict[str, Any]:
    """The fields of a line of a log. Raises DecodeError. Fields that a later version has added are not required."""
    fields = from_json(line, dict[str, Any])
    try:
        msgspec.convert(fields, LogLine)
    except msgspec.ValidationError as error:
        raise DecodeError(str(error)) from None
    is_step = "step" in fields and "loss" in fields
    names = ["loss"] if is_step else [name for name in NEEDS if name in fields and name != "loss"]
    if missing := [need for name in names for need in NEEDS[name] if need not in fields]:
        raise DecodeError(f"no {', '.join(missing)}")
    return fields


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log. Raises ReportError for a line that is none, unless it is the last and unfinished."""
    raw = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(raw, 1):
        if not line:
            continue
        try:
            found.append(read_line(line))
        except DecodeError:
            if number == len(raw):  # no end of line: the run was killed while it wrote
                break
            raise ReportError(Problem(f"{path}, line {number}: {line[:40]!r}", "a line of a run's log")) from None
    return found


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """One run.

    steps          the lines of the log for steps, in order
    evaluations    the evaluations, as (step, metrics)
    finish_line    the last line of a complete run
    resumed_steps  the steps from which it resumed
    segments       the run between its start, its resumptions and its end
    memory         the last measurement of what the ranks hold in memory
    data           how long the ranks waited for data, segment by segment
    prediction     what a step was predicted to take, if it is of this plan
    """

    name: str
    path: Path
    settings: Mapping[str, Any]
    plan: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[tuple[int, Mapping[str, float | None]]]
    finish_line: Mapping[str, Any] | None
    trace: Trace | None
    faults: Faults
    checkpoints: CheckpointHistory
    resumed_steps: Sequence[int]
    segments: Sequence[Segment]
    memory: MemoryRecord | None = None
    data: Sequence[DataRecord] = ()
    prediction: RecordedPrediction | None = None

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """What the run was made of, by section: the task's arguments, settings, plan, environment."""
        arguments = self.settings.get(ARGUMENTS_KEY)
        arguments = arguments if isinstance(arguments, dict) else {}
        apart = {*ENVIRONMENT_KEYS, ARGUMENTS_KEY}
        environment: dict[str, Any] = {}
        for name in ENVIRONMENT_KEYS:
            value = self.settings.get(name)
            environment |= value if isinstance(value, dict) else {name: value} if value is not None else {}
        return {
            "task": arguments,
            "settings": {name: value for name, value in self.settings.items() if name not in apart},
            "plan": {name: value for name, value in self.plan.items() if name != "version"},
            "environment": environment,
        }

    @property
    def last_step(self) -> int:
        """The last step that it has reached, or that it was set to reach."""
        steps_setting = self.settings.get("steps")
        return max(steps_setting if isinstance(steps_setting, int) else 0, self.steps[-1]["step"] if self.steps else 0)

    @property
    def unit(self) -> str:
        return (self.steps[-1] if self.steps else self.settings).get("unit", "samples")

    @property
    def total_seconds(self) -> float:
        """The run's time, over all segments."""
        return sum(segment.seconds for segment in self.segments)

    @property
    def steps_since_start(self) -> Sequence[Mapping[str, Any]]:
        """The steps of the last segment."""
        return self.steps[bisect_left(self.steps, self.segments[-1].first_step, key=lambda line: line["step"]) :]

    @property
    def training_losses(self) -> list[float]:
        """By step, of those that were not skipped. JSON has null for NaN."""
        losses = (line["loss"] for line in self.steps if not line.get("skipped"))
        return [math.nan if loss is None else loss for loss in losses]

    @property
    def recent_units_per_second(self) -> float:
        """Of the last steps."""
        steps = self.steps_since_start[-AVERAGED_STEPS - 1 :]
        return recent_rate([line["units"] for line in steps], [line["elapsed_seconds"] for line in steps])

    @property
    def units_per_second(self) -> float:
        return sum(line["units"] for line in self.steps) / max(self.total_seconds, 1e-9)

    @property
    def mean_sent_bytes(self) -> float:
        """The mean bytes per step that rank 0 has sent."""
        return sum(line.get("sent_bytes", 0.0) for line in self.steps) / max(len(self.steps), 1)

    def waiting_fraction(self, *, is_recent: bool = False) -> float:
        """Rank 0's, of all steps or of the last ones."""
        steps = self.steps_since_start[-AVERAGED_STEPS:] if is_recent else self.steps
        return waiting_fraction([(line["waiting_seconds"], line["seconds"]) for line in steps])


def read_run(path: Path) -> RunRecord:
    """The run in a folder. Raises ReportError with all files that are missing or cannot be read."""
    missing = [path / name for name in REQUIRED_FILES if not (path / name).is_file()]
    if missing:
        problems = [Problem(f"no {each}", "a file that fourfold train writes", "another run") for each in missing]
        raise ReportError(problems, where="fourfold report")
    settings, plan = read_description(path)
    trace, recorded = path / "trace.json", path / PREDICTION_FILE
    read_trace = decode_trace(trace.read_bytes(), where=str(trace)) if trace.is_file() else None
    record = make_record(path, settings, plan, read_log(path / LOG_FILE), trace=read_trace)
    if not recorded.is_file():
        return record
    prediction = decode_prediction(recorded.read_bytes(), where=str(recorded))
    # It may be of a plan that the run had before.
    return replace(record, prediction=prediction) if is_of_plan(prediction.prediction, plan) else record


def read_description(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the plan of the run in a folder. Raises ReportError if they cannot be read, and OSError."""
    try:
        settings = from_json(read_bounded(path / SETTINGS_FILE), dict[str, Any])
        # The identity repeats the other settings.
        settings.pop("identity", None)
        return settings, read_toml(path / PLAN_FILE)
    except DecodeError as error:
        problem = Problem(f"{path}: {error}", "the settings and the plan as they were written")
        raise ReportError(problem, where="fourfold report") from None


def make_record(
    path: Path,
    settings: Mapping[str, Any],
    plan: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    *,
    trace: Trace | None = None,
) -> RunRecord:
    """The run in a folder, of which these are the settings, the plan and the lines of the log. Raises OSError."""
    steps = {line["step"]: line for line in lines if "step" in line and "loss" in line}
    memory = next((line["memory"] for line in reversed(lines) if "memory" in line), None)
    return RunRecord(
        name=path.resolve().name,
        path=path,
        settings=settings,
        plan=plan,
        steps=[steps[number] for number in sorted(steps)],
        evaluations=[(line["step"], line["valid"]) for line in lines if "step" in line and "valid" in line],
        finish_line=next((line for line in reversed(lines) if "finished" in line), None),
        trace=trace,
        faults=read_faults(path),
        checkpoints=read_checkpoints(path, lines),
        resumed_steps=[line["resumed"] for line in lines if "resumed" in line],
        segments=read_segments(lines),
        memory=None if memory is None else msgspec.convert(memory, MemoryRecord),
        data=_read_data_records(lines),
    )
