"""Laws of straggler detection in real steps. Ranks are threads."""

import threading

import torch
from torch import nn

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.trainer.stragglers import WINDOW_STEPS, StragglerDetector

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
    detector = StragglerDetector(step, log)
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
    # The other exchanges are those of the first step: its dry run (three), its weights, the nominal count and the
    # launch order.
    for _, exchanges in threads.run(2, body):
        assert exchanges == 2 + 6
