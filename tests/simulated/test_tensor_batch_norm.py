"""Laws of batch_norm = "sync" with the tensor axis: statistics of all samples, on each tensor rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.words.errors import TaskError
from tests import cases
from tests.cases import Case
from tests.norm_cases import buffers

TOLERANCE = 1e-9
CASE = Case(batch_sizes=(6, 7, 4), optimizer="SGD")
RULES = {"up": "column", "down": "row"}


class Normed(nn.Module):
    """Norms of whole features, and one of split features, between column and row."""

    def __init__(self, *, affine: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 12), nn.BatchNorm1d(12)
        self.up, self.inner, self.down = nn.Linear(12, 24), make_norm(24, affine), nn.Linear(24, 12)
        self.other, self.head = nn.BatchNorm1d(12, momentum=None), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        x = x + self.down(torch.tanh(self.inner(self.up(x))))
        return self.head(torch.tanh(self.other(x)))


def make_norm(num_features: int, affine: bool) -> nn.Module:
    return nn.BatchNorm1d(num_features, affine=affine, track_running_stats=affine)


def seeded(make: Any) -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return make().double()


def make_step(comm: Any, model: nn.Module, **fields: Any) -> TrainStep:
    plan = Plan(**{"batch_norm": "sync", "tp": 2, "bucket_bytes": 2000} | fields)
    loss, optimizer = cases.loss(CASE), cases.optimizer(CASE)
    return TrainStep(model, loss, optimizer, plan=plan, communicator=comm, tensor=RULES, drift_check=1)


@pytest.mark.parametrize("fields", [
    {"tp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 4, "zero": 1, "update": "in_forward"},
    {"dp": 3, "tp": 2, "zero": 3, "update": "in_backward"},
    {"dp": 6},  # ranks with a single sample, and then with none
], ids=str)  # fmt: skip
def test_statistics_of_all_samples_train_as_on_one_device(fields):
    expected_model = seeded(Normed)
    expected = oracle.train(expected_model, cases.loss(CASE), cases.optimizer(CASE), cases.batches(CASE))

    def body(comm):
        step = make_step(comm, seeded(Normed), **fields)
        return cases.train_step(CASE, step), buffers(step.model)

    ranks = threads.run(fields.get("dp", 1) * fields.get("tp", 2), body)
    for got, found in ranks:
        assert oracle.deviation(got, expected) <= TOLERANCE
        for name, buffer in buffers(expected_model).items():
            assert torch.equal(found[name], ranks[0][1][name]), name
            torch.testing.assert_close(found[name], buffer, rtol=TOLERANCE, atol=TOLERANCE)


class OverHeads(Normed):
    """A norm whose channels are the features of a head: the values of a channel are on all tensor ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_norm(6, False)

    def forward(self, x: Tensor) -> Tensor:
        split = torch.tanh(self.up(torch.tanh(self.norm(self.first(x)))))
        split = self.inner(split.unflatten(1, (-1, 6)).transpose(1, 2)).transpose(1, 2).flatten(1)
        return self.head(self.down(split))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Normed(affine=True), r"inner \(BatchNorm1d\) gets split features, \[2, 12\] of \[2, 24\], and fails"),
    (OverHeads, r"inner \(BatchNorm1d\) gets \[2, 6, 2\] of \[2, 6, 4\] +need all values of a channel on one tensor"),
], ids=["weights", "positions"])  # fmt: skip
def test_norms_that_cannot_be_right_on_split_features_are_rejected_by_name(make, message):
    def body(comm):
        step = make_step(comm, seeded(make), dp=2)
        with pytest.raises(TaskError, match=message):
            step(cases.local_batch(cases.batches(CASE)[0], 2, step.dp_index))

    threads.run(4, body)
