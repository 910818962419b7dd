"""Connections that skip blocks over a boundary: outputs of earlier modules travel with the activations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import TaskError
from tests import cases
from tests.cases import Case

CASE = Case(batch_sizes=(8, 5, 6), microbatches=4, clip=0.05)
DEPTH = 6


class Net(nn.Module):
    """Blocks whose outputs come back: each of the last half adds what its mirror image in the first half returned.

    scale   of what comes back
    steals  the last block uses a weight of the first one
    early   the head is defined in front of the blocks
    """

    def __init__(self, *, scale: float = 0.5, steals: bool = False, early: bool = False) -> None:
        super().__init__()
        self.entry, head = nn.Linear(16, 16), nn.Linear(16, 10)
        if early:
            self.head = head
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(DEPTH)])
        self.head = head
        self.scale, self.steals = scale, steals

    def forward(self, x: Tensor) -> Tensor:
        entered = x = self.entry(x)
        kept = []
        for index, block in enumerate(self.blocks):
            if index >= DEPTH // 2:
                x = x + self.scale * kept.pop()
            x = torch.tanh(block(x))
            if index < DEPTH // 2:
                kept.append(x)
        if self.steals:
            first: Any = self.blocks[0]
            x = x * first.bias
        return self.head(x + self.scale * entered)


def make_net(**options: Any) -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return Net(**options).double()


def make_step(comm: Any, plan: Plan, **options: Any) -> TrainStep:
    optimizer = cases.optimizer(CASE)
    return TrainStep(
        make_net(**options), cases.loss(CASE), optimizer, plan=plan, communicator=comm, clip=CASE.clip, drift_check=1
    )


@pytest.mark.parametrize("fields", [
    {"pp": 2, "dp": 2, "zero": 1}, {"pp": 3}, {"pp": 6, "schedule": "gpipe"}, {"pp": 2, "schedule": "zero-bubble"},
    {"pp": 3, "schedule": "interleaved", "interleave": 2, "microbatches": 3},
], ids=str)  # fmt: skip
def test_skip_connections_train_as_on_one_device(fields):
    plan = Plan(**{"microbatches": CASE.microbatches, "bucket_bytes": 4000, **fields})
    expected = oracle.train(make_net(), cases.loss(CASE), cases.optimizer(CASE), cases.batches(CASE), clip=CASE.clip)

    def body(comm: Any) -> Any:
        step = make_step(comm, plan)
        result = cases.train_step(CASE, step)
        batch = cases.local_batch(cases.batches(CASE)[0], plan.dp, step.dp_index)
        return result, step.evaluate(batch).loss

    results = threads.run(plan.mesh.size, body)
    for got, _ in results:
        assert oracle.deviation(got, expected) <= TOLERANCE
    assert len({round(loss, 9) for _, loss in results}) == 1


@pytest.mark.parametrize("scale", [0.5, 1e-7])
def test_a_message_has_what_later_stages_need_and_nothing_else(scale):
    plan = Plan(pp=3, microbatches=2, stages="2,2,2")

    def body(comm: Any) -> set[int]:
        step = make_step(comm, plan, scale=scale)
        numbers, edge = set(), step._assembly.parts.edges.to_next
        if edge is not None:
            send = edge.send
            edge.send = lambda tensors: (numbers.add(len(tensors) - 1), send(tensors))[1]  # the last one is metadata
        step(cases.batches(CASE)[0])
        return numbers

    # The last stage adds what the entry, block 0 and block 1 have returned. Behind block 1, two of these travel beside
    # its own output; behind block 3, all three do.
    assert threads.run(3, body) == [{3}, {4}, set()]


@pytest.mark.parametrize(("options", "got"), [
    ({"steals": True}, r"stage 1 \(blocks\.3 to blocks\.5\) needs weight blocks\.0\.bias"),
    ({"early": True}, r"head, which has weights and is defined in front of the blocks, called behind blocks\.2"),
])  # fmt: skip
def test_what_cannot_travel_is_refused(options, got):
    def body(comm: Any) -> None:
        step = make_step(comm, Plan(pp=2, microbatches=2, stages="3,3"), **options)
        with pytest.raises(TaskError, match=got):
            step(cases.batches(CASE)[0])

    threads.run(2, body)
