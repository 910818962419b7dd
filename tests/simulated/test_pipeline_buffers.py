"""Laws of what a pipeline receives: as many buffers as the schedule has in flight, used again and again."""

import itertools
from typing import Any

import pytest
import torch

from fourfold.axes.pipeline.rules.in_flight import Peak, peak_in_flight
from fourfold.comm.edges import ProcessGroupReceiver, SharedMemorySender
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.torch_kit.memory import BufferPool
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(8, 8, 8), length=8, microbatches=8)
SCHEDULES = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "zero-bubble", "max_in_flight": 5},
]


def run(fields: dict[str, Any], hosts: int, body: Any) -> list[tuple[Any, Peak]]:
    """What `body` says of each rank's edges after three steps, and what the schedule has in flight there."""
    plan = Plan(pp=3, microbatches=8, **fields)

    def on_rank(comm: Any) -> Any:
        with cases.SEED_LOCK:
            torch.manual_seed(7)
            model = lm.task(width=16, layers=3, heads=2, length=16, warmup=0).model()
        step = TrainStep(model, cases.loss(CASE), cases.optimizer(CASE), plan=plan, communicator=comm)
        for batch in cases.batches(CASE):
            step(batch)
        return body(step._assembly.pipeline.edges)

    return list(zip(threads.run(3, on_rank, hosts=hosts), map(peak_in_flight, plan.compute_lists), strict=True))


@pytest.mark.parametrize("fields", SCHEDULES, ids=lambda fields: fields["schedule"])
def test_over_a_network_a_stage_has_a_buffer_for_each_microbatch_in_flight(fields):
    def body(edges: Any) -> tuple[int, int] | None:
        receiver = edges.from_previous
        if receiver is None:
            return None
        assert isinstance(receiver, ProcessGroupReceiver)
        assert isinstance(receiver.buffers, BufferPool)  # which `memory` counts
        return receiver.buffers.peak_in_use, receiver.buffers.num_in_use

    first, *others = run(fields, 3, body)
    assert first[0] is None
    # What a stage has received is needed until its gradient is there, which is before W. One more has the shapes that
    # the first message describes.
    expected = {"gpipe": [8, 8], "1f1b": [2, 1], "zero-bubble": [3, 1]}[fields["schedule"]]
    assert [buffers for buffers, _ in others] == [(count + 1, 0) for count in expected]
    if fields["schedule"] != "zero-bubble":
        assert [peak.microbatches for _, peak in others] == expected


def test_on_a_host_a_sender_writes_as_many_slots_as_1f1b_has_microbatches_in_flight():
    def body(edges: Any) -> int:
        sender = edges.to_next
        assert sender is None or isinstance(sender, SharedMemorySender)
        return 0 if sender is None else sum(map(bool, sender._num_written))

    stages = run({"schedule": "1f1b"}, 1, body)
    assert stages[-1][0] == 0
    # At least what the next stage holds at a time; how many more depends on how far ahead of it the sender is.
    for (slots, peak), (_, of_next) in itertools.pairwise(stages):
        assert of_next.microbatches <= slots <= peak.microbatches
