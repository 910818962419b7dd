"""The recipes with more ranks than tests start as processes train as one device, on threads."""

import pytest

from fourfold.comm.communicator import Communicator
from fourfold.plan.plan import Plan
from fourfold.plan.recipes import SHIPPED_PLANS
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from tests import cases, mesh_law
from tests.cases import Case
from tests.spawned.test_recipes import MAX_PROCESSES

pytestmark = pytest.mark.usefixtures("without_dry_run")

LARGE = [name for name in SHIPPED_PLANS.names() if Plan.recipe(name).mesh.size > MAX_PROCESSES]


def test_megatron_and_four_d_are_large():
    assert LARGE == ["four-d", "megatron"]


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_trains_as_one_device(name: str):
    plan = Plan.recipe(name)
    layers = plan.pp * plan.interleave

    def train(comm: Communicator) -> TrainingResult:
        step = TrainStep(
            mesh_law.make_model("lm", layers),
            mesh_law.LOSSES["lm"],
            cases.optimizer(Case(optimizer="AdamW")),
            plan=plan,
            communicator=comm,
            clip=mesh_law.CLIP,
            tensor=lm.TENSOR_RULES,
        )
        metrics = [step(cases.local_batch(batch, plan.dp, step.dp_index)) for batch in mesh_law.batches("lm")]
        return oracle.snapshot(step, [m.loss for m in metrics], [m.grad_norm for m in metrics])

    expected = mesh_law.train_oracle("lm", layers, "AdamW", mesh_law.CLIP)
    for got in threads.run(plan.mesh.size, train):
        assert oracle.deviation(got, expected) <= TOLERANCE
