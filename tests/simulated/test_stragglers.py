"""Laws of straggler detection in real steps. Ranks are threads."""

import itertools
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from fourfold.comm import meter, polling
from fourfold.plan.plan import Plan
from fourfold.step import executor
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.trainer.meters import DATA, SEGMENT_STEPS, WINDOW_STEPS, StragglerDetector
from fourfold.words.mesh import Mesh
from fourfold.words.noop import noop
from fourfold.words.program import Action, Verb

SECONDS = 0.02
BATCH = (torch.ones(2, 4), torch.zeros(2))


class Slow(nn.Module):
    """A layer whose forward is slow on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.rank = nn.Linear(4, 4), rank

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            threading.Event().wait(SECONDS)
        return self.layer(inputs)


class MemoryLog:
    """A log in memory."""

    def __init__(self) -> None:
        self.notes, self.lines = [], []

    def write_record(self, record) -> None:
        self.lines.append(record)

    def log_message(self, text: str) -> None:
        self.notes.append(text)


def body(comm) -> tuple[MemoryLog, int]:
    def loss(outputs, targets):
        return outputs.sum(1)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    options = {"plan": Plan(dp=comm.size), "clip": None, "same_batches": "allow"}  # no step compares batches
    step = TrainStep(Slow(comm.rank), loss, sgd, communicator=comm, **options)
    world = step._calls.world
    log, gathered, exchange = MemoryLog(), [], world.all_gather_json
    detector = StragglerDetector(step, cast(Any, log))
    world.all_gather_json = lambda value: gathered.append(value) or exchange(value)
    for number in range(1, 2 * WINDOW_STEPS + 1):
        step(BATCH)
        detector.step_done(number, 0.0)
    return log, len(gathered)


def test_a_straggler_is_reported_once_with_the_phase_it_is_slow_in():
    for log, _ in threads.run(3, body):
        (note,) = log.notes
        assert note.startswith("rank 1 on ")
        assert note.endswith(f" ms (steps 1 to {WINDOW_STEPS})")
        (line,) = log.lines
        assert line["late"]["place"] == "forward"
        assert line["late"]["place_seconds"] >= SECONDS
        # The others wait for it in every step, and are not busy meanwhile.
        assert line["late"]["others_seconds"] < line["late"]["seconds"] / 1.5


def test_straggler_detection_communicates_once_per_window():
    # The other exchanges are those of the first step: its checks (four), its weights, the nominal count and the
    # launch order.
    for _, exchanges in threads.run(2, body):
        assert exchanges == 2 + 7


def test_busy_seconds_have_no_part_in_which_this_thread_waited_or_others_had_the_processor(monkeypatch):
    """A delay in a wait is part of the wait: a rank that waits on a busy machine does not look faster than it is."""
    now = delay = 0.0

    def run(seconds: float, delayed: float) -> bool:
        nonlocal now, delay
        now, delay = now + seconds + delayed, delay + delayed
        return True

    def forward(*_: Any) -> None:
        run(0.020, delayed=0.007)
        polls = itertools.count()
        polling.wait_until(lambda: next(polls) >= polling.NUM_SPINS and run(0.010, delayed=0.030), noop, own)
        with own.counted():
            run(0.010, delayed=0.030)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    for module in (executor, meter):
        monkeypatch.setattr(module, "processor_delay_seconds", lambda: delay)
    own, done = meter.CommMeter(), SimpleNamespace(finish=noop)
    step: Any = SimpleNamespace(parts=SimpleNamespace(meter=own, senders=[done]), done_early=())
    verbs: Any = {Verb.FORWARD: forward, Verb.UPDATE: lambda *_: run(0.004, delayed=0.009)}
    busy = executor._walk([Action(Verb.FORWARD, 0, 0), Action(Verb.UPDATE, 0, 0)], step, verbs)
    assert busy == pytest.approx({"forward": 0.020, "update": 0.004})
    assert own.waiting_seconds == pytest.approx(0.080)


@pytest.mark.parametrize(("num_slow", "num_notes"), [(SEGMENT_STEPS, 0), (WINDOW_STEPS, 1)])
def test_the_detector_judges_each_segment_of_its_window(num_slow, num_notes):
    def exchange(own: Any) -> list[Any]:
        return [own, ["b", [{DATA: 0.0, "forward": 0.01}] * len(own[1])]]

    log = MemoryLog()
    step: Any = SimpleNamespace(plan=SimpleNamespace(mesh=Mesh(dp=2)), all_gather_json=exchange)
    detector = StragglerDetector(step, cast(Any, log))
    for number in range(1, WINDOW_STEPS + 1):
        step.busy_seconds = {"forward": 0.1 if number <= num_slow else 0.01}
        detector.step_done(number, 0.0)
    assert len(log.notes) == num_notes
