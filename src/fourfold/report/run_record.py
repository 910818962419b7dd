"""Run record: a run, as read from its folder.

Law: a log whose last line is incomplete is read up to there; a missing file is an error, never a guess.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from fourfold.plan.decode import DecodeError, from_json, read_bounded, read_toml
from fourfold.planner.predict.comparison import is_of_plan
from fourfold.planner.predict.prediction import RecordedPrediction, decode_prediction
from fourfold.report import cards
from fourfold.trace.trace_file import Trace, decode_trace
from fourfold.trainer.settings import recorded_settings
from fourfold.words.errors import FourfoldError, Problem, closest_match
from fourfold.words.measures import num_units, waiting_fraction
from fourfold.words.run_files import (
    ARGUMENTS_KEY,
    LOG_FILE,
    PLAN_FILE,
    PREDICTION_FILE,
    SETTINGS_FILE,
)

REQUIRED_FILES = (SETTINGS_FILE, PLAN_FILE, LOG_FILE)
ENVIRONMENT_KEYS = ("transport", "versions", "machine", "cores")
RUN_KEYS = ("task", "rates", "callbacks", "unit", *recorded_settings())


class LogLine(TypedDict, total=False):
    """The fields that lines of a log may have, and their types."""

    step: int
    loss: float | None
    samples: float
    tokens: float | None
    seconds: float
    waiting_seconds: float
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
    memory: cards.MemoryRecord
    data_seconds: float | None
    data: cards.DataRecord


class ReportError(FourfoldError):
    """A run that cannot be read."""


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
    faults: cards.Faults
    checkpoints: cards.CheckpointHistory
    resumed_steps: Sequence[int]
    segments: Sequence[cards.Segment]
    memory: cards.MemoryRecord | None = None
    data: Sequence[cards.DataRecord] = ()
    prediction: RecordedPrediction | None = None

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """What the run was made of, by section: the task's arguments, settings, plan, environment."""
        arguments = self.settings.get(ARGUMENTS_KEY)
        arguments = arguments if isinstance(arguments, dict) else {}
        # Older runs have the arguments that were given among the settings too.
        apart = {*ENVIRONMENT_KEYS, ARGUMENTS_KEY, *(name for name in arguments if name not in RUN_KEYS)}
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
        given = (self.finish_line or self.settings).get("unit")
        return given or ("tokens" if self.steps and self.steps[0].get("tokens") else "samples")

    def step_samples(self, index: int) -> float:
        return self.steps[index]["samples"] if self.steps else 0

    def step_units(self, index: int) -> float:
        """What the throughput counts of a step."""
        return num_units(self.unit, self.steps[index].get("tokens"), self.step_samples(index)) if self.steps else 0

    @property
    def total_seconds(self) -> float:
        """The run's time, over all segments."""
        return sum(segment.seconds for segment in self.segments)

    @property
    def units_per_second(self) -> float:
        """Tokens or samples per second."""
        total = sum(self.step_units(index) for index in range(len(self.steps)))
        return total / max(self.total_seconds, 1e-9)

    @property
    def mean_sent_bytes(self) -> float:
        """The mean bytes per step that rank 0 has sent; 0 for a run of an older version, which did not log them."""
        return sum(line.get("sent_bytes", 0.0) for line in self.steps) / max(len(self.steps), 1)

    def waiting_fraction(self, *, last: int = 0) -> float:
        """Rank 0's, of all steps or of the last ones."""
        return waiting_fraction([(line["waiting_seconds"], line["seconds"]) for line in self.steps[-last:]])


def find_run(word: str, *, parent: Path) -> Path:
    """The folder of the run that the user named by its path or its name. Raises ReportError."""
    for path in (Path(word), parent / word):
        with contextlib.suppress(OSError):  # a name that is too long for a file system
            if path.is_dir():
                return path
    runs = sorted(path.name for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    close = closest_match(Path(word).name, runs) or (runs[-1] if runs else "")
    attempt = f"fourfold report {close}" if close else "fourfold train"
    raise ReportError(Problem(f"no run {word}", "the folder of a run, or its name", attempt), where="fourfold report")


def read_run(path: Path) -> RunRecord:
    """The run in a folder. Raises ReportError with all files that are missing or cannot be read."""
    missing = [name for name in REQUIRED_FILES if not (path / name).is_file()]
    if missing:
        problems = [
            Problem(f"no {path / name}", "a file that fourfold train writes", "another run") for name in missing
        ]
        raise ReportError(problems, where="fourfold report")
    settings, plan = read_description(path)
    trace = path / "trace.json"
    read_trace = decode_trace(trace.read_bytes(), where=str(trace)) if trace.is_file() else None
    record = make_record(path, settings, plan, read_log(path / LOG_FILE), trace=read_trace)
    return replace(record, prediction=_read_prediction(path / PREDICTION_FILE, plan))


def _read_prediction(path: Path, plan: Mapping[str, Any]) -> RecordedPrediction | None:
    """The prediction in a run's folder; None if there is none, or it is of a plan that the run had before."""
    if not path.is_file():
        return None
    recorded = decode_prediction(path.read_bytes(), where=str(path))
    return recorded if is_of_plan(recorded.prediction, plan) else None


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
        faults=cards.read_faults(path),
        checkpoints=cards.read_checkpoints(path, lines),
        resumed_steps=[line["resumed"] for line in lines if "resumed" in line],
        segments=cards.read_segments(lines),
        memory=None if memory is None else msgspec.convert(memory, cards.MemoryRecord),
        data=cards.read_data_records(lines),
    )


def _missing_fields(fields: Mapping[str, Any]) -> list[str]:
    """The fields that a line of a log lacks. Fields that a later version has added are not required."""
    if "step" in fields and "loss" in fields:
        needed: tuple[str, ...] = ("samples", "seconds", "waiting_seconds")
    else:
        needs = {"finished": "seconds", "damaged": "checkpoint", "pause_seconds": "step"}
        needed = tuple(need for name, need in needs.items() if name in fields)
    return [name for name in needed if name not in fields]


def read_line(line: bytes) -> dict[str, Any]:
    """The fields of a line of a log. Raises DecodeError."""
    fields = from_json(line, dict[str, Any])
    try:
        msgspec.convert(fields, LogLine)
    except msgspec.ValidationError as error:
        raise DecodeError(str(error)) from None
    if missing := _missing_fields(fields):
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
