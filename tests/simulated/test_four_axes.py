"""The law of the mesh: every pp × dp × sp × tp of eight ranks with a pipeline trains as one device."""

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

SIZE = 8
CASE = Case(model="lm", batch_sizes=(8, 9), length=8, clip=0.05, microbatches=2)
SIZES = (1, 2, 4, 8)
MESHES = [
    (pp, dp, sp, tp) for pp in SIZES[1:] for dp in SIZES for sp in SIZES for tp in SIZES if pp * dp * sp * tp == SIZE
]


def make_model() -> torch.nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return lm.task(width=16, layers=8, heads=4, length=8, warmup=0).model().double()


@functools.cache
def one_device() -> TrainingResult:
    return oracle.train(make_model(), cases.loss(CASE), cases.optimizer(CASE), cases.batches(CASE), clip=CASE.clip)


def test_ten_of_the_twenty_meshes_have_a_pipeline():
    assert len(MESHES) == 10


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_mesh_of_eight_ranks_trains_as_one_device(mesh):
    pp, dp, sp, tp = mesh

    def body(comm: Any) -> TrainingResult:
        zero = 1 if dp > 1 else 0
        plan = Plan(pp=pp, dp=dp, sp=sp, tp=tp, zero=zero, microbatches=CASE.microbatches, bucket_bytes=20_000)
        options: dict[str, Any] = {"clip": CASE.clip, "tensor": lm.TENSOR_RULES if tp > 1 else {}, "drift_check": 1}
        optimizer = cases.optimizer(CASE)
        return cases.train_step(
            CASE, TrainStep(make_model(), cases.loss(CASE), optimizer, plan=plan, communicator=comm, **options)
        )

    expected = one_device()
    for got in threads.run(SIZE, body):
        assert oracle.deviation(got, expected) <= TOLERANCE
