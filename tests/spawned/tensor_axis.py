"""What the ranks of a spawned world do with the tensor axis. Results are JSON."""

from typing import Any

from fourfold.axes.tensor.work.layers import local_part
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import parallelize
from fourfold.tasks import lm
from fourfold.testing import oracle
from fourfold.words.errors import DivergenceError
from tests import cases
from tests.cases import Case
from tests.spawned.rank_functions import fake_hosts

CASE = Case(model="lm", clip=0.5, batch_sizes=(6, 5))


def deviations(plans: list[dict[str, Any]], host: str | None = None) -> list[float]:
    """The deviation of a training by each plan from that of one device, on this rank."""
    expected = cases.train_oracle(CASE)
    return [_deviation(Plan(**fields, bucket_bytes=4000), expected, host) for fields in plans]


def _deviation(plan: Plan, expected: oracle.TrainingResult, host: str | None) -> float:
    with fake_hosts(host):
        step = parallelize(
            cases.model("lm"), cases.loss(CASE), cases.optimizer(CASE), plan, clip=CASE.clip, tensor=lm.TENSOR_RULES
        )
    trained = cases.train_step(CASE, step)
    assert any(shard.local_shape != shard.shape for shard in step.tensor_shards.values())
    for name, shard in step.tensor_shards.items():  # what a rank computes with is its part of the whole
        weight = dict(step.model.named_parameters())[name]
        if plan.zero < 3:
            assert (weight - local_part(trained.weights[name], shard)).abs().max() == 0.0
    return oracle.deviation(trained, expected)


def divergences(transport: str) -> list[str]:
    """The messages of both ranks: one evaluates where the other trains, and one takes its state where it trains."""
    step = parallelize(
        cases.model("mlp"),
        cases.loss(Case()),
        cases.optimizer(Case()),
        Plan(tp=2, transport=transport),
        tensor=cases.TENSOR_RULES["mlp"],
    )
    batch, messages = cases.batches(Case())[0], []
    step(batch)
    for call in (lambda: step.evaluate(batch), step.state_dict):
        try:
            call() if step.rank else step(batch)
        except DivergenceError as error:
            messages.append(str(error))
    return messages
