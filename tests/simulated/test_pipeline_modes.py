"""A pipeline with the other settings of a plan trains as one device does, or as the same plan without stages."""

import functools
from typing import Any

import pytest
import torch

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from tests import cases
from tests.cases import Case

CASE = Case(model="lm", batch_sizes=(8, 5), length=8, microbatches=2)
PIPELINE: dict[str, Any] = {"pp": 2, "dp": 2, "microbatches": 2, "bucket_bytes": 8000}
INTERLEAVED: dict[str, Any] = {**PIPELINE, "schedule": "interleaved", "interleave": 2}


def make_model() -> torch.nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return lm.task(width=16, layers=4, heads=4, length=8, warmup=0).model().double()


@functools.cache
def one_device(case: Case) -> TrainingResult:
    return oracle.train(make_model(), cases.loss(case), cases.optimizer(case), cases.batches(case), clip=case.clip)


def trained(plan: Plan, case: Case = CASE, *, hosts: int = 1) -> list[TrainingResult]:
    """The training of every rank."""

    def body(comm: Any) -> TrainingResult:
        options: dict[str, Any] = {"clip": case.clip, "tensor": lm.TENSOR_RULES if plan.tp > 1 else {}}
        optimizer = cases.optimizer(case)
        step = TrainStep(
            make_model(), cases.loss(case), optimizer, plan=plan, communicator=comm, drift_check=1, **options
        )
        return cases.train_step(case, step)

    return threads.run(plan.mesh.size, body, hosts=hosts)


@pytest.mark.parametrize(("zero", "update", "hosts"), [
    (2, "after", 1), (3, "after", 4), (1, "in_backward", 1), (3, "in_backward", 4), (0, "in_forward", 1),
    (3, "in_forward", 4),
])  # fmt: skip
def test_interleaved_stages_train_as_one_device_with_every_zero_and_update(zero, update, hosts):
    for got in trained(Plan(**INTERLEAVED, zero=zero, update=update), hosts=hosts):
        assert oracle.deviation(got, one_device(CASE)) <= TOLERANCE
