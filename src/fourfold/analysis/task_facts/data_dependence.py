"""Data dependence: steps whose operations depend on values, such as those that leave early or choose experts.

bounds  the least and the most operations of a forward of one sample, among the first samples of the task's data
Law: what depends on the data has no facts, and is refused with its bounds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.analysis.task_facts.operations import KernelRecorder, MetaCalls
from fourfold.analysis.task_facts.segments import SegmentTracker
from fourfold.feed.sample_rng import fetch_one
from fourfold.step.batch import unpack_batch
from fourfold.step.model_call import call_model
from fourfold.words.errors import Problem, TaskError
from fourfold.words.task import Source
from fourfold.words.units import format_si

NUM_SAMPLES = 8
NEED = "a model and a loss whose operations do not depend on the values of the data"


class StepNeedsValues(TaskError):
    """A step that cannot run without values."""


class Bounds(NamedTuple):
    """Operations of a forward of one sample."""

    least: float
    most: float


def forward_bounds(make_model: Callable[[], torch.nn.Module], source: Source) -> Bounds:
    """What forwards of the first samples compute. The model is made, with its weights."""
    model = make_model()
    counts = [_num_operations(model, source, number) for number in range(min(NUM_SAMPLES, len(source)))]
    return Bounds(min(counts), max(counts))


def _num_operations(model: torch.nn.Module, source: Source, number: int) -> float:
    inputs: Any = unpack_batch(fetch_one(source, number))[0]
    recorder = KernelRecorder(SegmentTracker([]), model.parameters(), MetaCalls())
    with torch.no_grad(), recorder:
        call_model(model, inputs)
    return sum(kernel.flops for _, kernel in recorder.kernels)


def with_bounds(error: StepNeedsValues, bounds: Bounds) -> TaskError:
    """The error that says what forwards compute in its place."""
    least, most = map(format_si, bounds)
    span = least if least == most else f"{least} to {most}"
    got = f"{error.problems[0].got}; {span} operations in a forward of a sample, by the first {NUM_SAMPLES}"
    return TaskError(Problem(got, NEED, "fourfold train: only running it shows what it costs"), where=error.where)
