"""Laws of lowering that only a step can prove: what is decided without torch is what a step does."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.model.weights import model_specs, update_spec
from fourfold.plan.lowering import Blueprint, lower
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.threads import ThreadCommunicator
from fourfold.words.errors import TrainingError
from fourfold.words.layout import SPLIT
from fourfold.words.program import Verb

pytestmark = pytest.mark.usefixtures("without_dry_run")

OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def model() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())])


def blueprint(plan: Plan, hosts: int) -> Blueprint:
    module = model()
    optimizer = OPTIMIZER(module.parameters())
    topology = Topology.regular(hosts=hosts, ranks_per_host=plan.dp // hosts)
    return lower(plan, model_specs(module, optimizer), topology, update_spec(module, optimizer))


def train(plan: Plan, comm: ThreadCommunicator) -> tuple[TrainStep, float]:
    """A step, and the bytes that this rank sends in the third call."""
    options: dict[str, Any] = {"plan": plan, "communicator": comm, "clip": None, "same_batches": "allow"}
    step = TrainStep(model(), lambda outputs, targets: (outputs - targets).square().sum(-1), OPTIMIZER, **options)
    sent = [step((torch.randn(4, 64), torch.zeros(4, 64))).sent_bytes for _ in range(3)]
    return step, sent[-1]


def test_the_specs_of_a_model_say_what_its_optimizer_is() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = ff.optim.LAMB([
        {"params": list(module[0].parameters())}, {"params": list(module[1].parameters())}
    ], lr=0.1)  # fmt: skip
    specs = model_specs(module, optimizer)
    assert [(spec.name, spec.shape, spec.param_group) for spec in specs] == [
        ("0.weight", (4, 4), 0), ("0.bias", (4,), 0), ("1.weight", (4,), 1), ("1.bias", (4,), 1),
    ]  # fmt: skip
    update = update_spec(module, optimizer, clip=2.0, counts_states=True)
    assert (update.clip, update.optimizer, update.is_layerwise, update.num_states) == (2.0, "LAMB", True, (2, 2))
    assert update.full_precision_params == {"1.weight", "1.bias"}
    assert not update_spec(module, torch.optim.SGD(module.parameters(), lr=0.1)).is_layerwise


def is_placeholder(parameter: nn.Parameter) -> bool:
    """Whether a weight cannot be used between steps, because it rests split."""
    try:
        parameter.sum()
    except TrainingError:
        return True
    return False


@pytest.mark.covering
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize(("hosts", "fields"), [
    (1, {"zero": 0}), (1, {"zero": 2, "microbatches": 2}), (2, {"zero": 0}), (2, {"zero": 1}),
    (2, {"zero": 1, "shard": 2}), (2, {"codec": "bf16", "zero": 1}), (2, {"codec": "int8"}), (2, {"codec": "powersgd"}),
])  # fmt: skip
def test_a_rank_sends_as_many_bytes_as_its_blueprint_says(hosts: int, fields: dict[str, Any], transport: str) -> None:
    plan = Plan(dp=4, bucket_bytes=2**14, transport=transport, **fields)
    expected = blueprint(plan, hosts).sent_bytes
    # The formula has no padding, which is 2 % of these small buckets.
    for sent in threads.run(4, lambda comm: train(plan, comm)[1], hosts=hosts):
        assert sent == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("hosts", "transport", "shard"), [(1, "auto", None), (1, "gloo", None), (2, "auto", 2),
                                                           (2, "auto", None)])  # fmt: skip
def test_weights_are_unsharded_where_the_blueprint_says_so(hosts: int, transport: str, shard: int | None) -> None:
    plan = Plan(dp=4, zero=3, shard=shard, bucket_bytes=2**14, transport=transport)
    expected = blueprint(plan, hosts)

    def body(comm: ThreadCommunicator) -> tuple[Any, bool]:
        step, _ = train(plan, comm)
        return step.buckets, is_placeholder(next(step.model.parameters()))

    for buckets, has_placeholders in threads.run(4, body, hosts=hosts):
        (group,) = expected.groups
        assert tuple(buckets) == group.buckets
        assert has_placeholders == (group.resting_layouts.weight == SPLIT)
        assert has_placeholders == any(action.verb == Verb.UNSHARD for action in expected.programs().step[0])
