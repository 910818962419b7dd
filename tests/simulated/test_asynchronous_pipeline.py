"""PipeDream and PipeDream-2BW: batches that use weights which miss updates, as one process emulates it."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.axes.pipeline.rules.schedules import num_stashed, staleness
from fourfold.axes.pipeline.work.weight_versions import WeightVersions
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.verification.command import check_verifiable
from fourfold.words.errors import PlanError
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

LAYERS = 4
CASE = Case(model="lm", batch_sizes=(4, 3, 5, 4, 4, 2, 4, 4), length=8)
DRAINED_AFTER = {3}  # and after the first step, which always is


def make_model() -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return lm.task(width=16, layers=LAYERS, heads=2, length=16, warmup=0).model().double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def make_step(comm: Any, plan: Plan, model: nn.Module | None = None, **options: Any) -> TrainStep:
    rules = lm.TENSOR_RULES if plan.tp > 1 else {}
    model = make_model() if model is None else model
    return TrainStep(model, cases.loss(CASE), make_optimizer, plan=plan, communicator=comm, tensor=rules, **options)


def emulate(plan: Plan) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses of one process that computes each batch with the versions of its stages."""

    def stage_of(name: str) -> int:
        if name.startswith("blocks."):
            return int(name.split(".")[1]) * plan.pp // LAYERS
        return 0 if name.startswith("embedding") else plan.pp - 1

    model, loss_function = make_model(), cases.loss(CASE)
    params = dict(model.named_parameters())
    optimizer = make_optimizer(params.values())
    history: list[dict[str, torch.Tensor]] = []
    losses, drained = [], 0
    for number, (inputs, targets) in enumerate(cases.batches(CASE)):
        history.append({name: p.detach().clone() for name, p in params.items()})
        newest = {name: p.data for name, p in params.items()}
        for name, p in params.items():
            missed = staleness(plan.schedule, plan.pipeline_spec, stage_of(name))
            p.data = history[max(drained, number - missed)][name]
        optimizer.zero_grad()
        loss = loss_function(model(**inputs), targets).mean()
        loss.backward()
        losses.append(loss.item())
        for name, p in params.items():
            p.data = newest[name]
        optimizer.step()
        if number in DRAINED_AFTER or number == 0:
            drained = number + 1
    return {name: p.detach() for name, p in params.items()}, losses


@pytest.mark.parametrize(("fields", "hosts"), [
    ({"pp": 2, "schedule": "pipedream"}, 1),
    ({"pp": 4, "schedule": "pipedream"}, 1),
    ({"pp": 2, "schedule": "pipedream", "dp": 2}, 4),
    ({"pp": 2, "schedule": "2bw", "microbatches": 2}, 2),
    ({"pp": 4, "schedule": "2bw", "microbatches": 4}, 1),
    ({"pp": 2, "schedule": "2bw", "microbatches": 3, "dp": 2}, 1),
    ({"pp": 2, "schedule": "2bw", "microbatches": 2, "tp": 2}, 1),
    ({"pp": 2, "schedule": "2bw", "microbatches": 2, "cp": 2}, 1),
])  # fmt: skip
def test_an_asynchronous_schedule_trains_as_its_emulation(fields, hosts):
    plan = Plan(bucket_bytes=4_000, **fields)
    weights, losses = emulate(plan)
    synchronous, _ = emulate(Plan(pp=plan.pp))
    assert max((weights[name] - synchronous[name]).abs().max() for name in weights) > 1e-4  # it is another training

    def body(comm: Any) -> Any:
        step, reported = make_step(comm, plan), []
        for number, batch in enumerate(cases.batches(CASE)):
            reported.append(step(cases.local_batch(batch, plan.dp, step.dp_index)).loss)
            if number in DRAINED_AFTER:
                step.flush()
        last = step.evaluate(cases.local_batch(cases.batches(CASE)[0], plan.dp, step.dp_index)).loss
        return step.state_dict()["model"], reported, last

    lag = plan.pp - 1 if plan.schedule == "pipedream" else 1
    trained = make_model()
    trained.load_state_dict(weights)
    inputs, targets = cases.batches(CASE)[0]
    with torch.no_grad():
        expected_last = cases.loss(CASE)(trained(**inputs), targets).mean().item()
    for state, reported, last in threads.run(plan.mesh.size, body, hosts=hosts):
        for name, weight in weights.items():
            torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-9)
        for number, loss in enumerate(reported):
            # Of the batch that ended: between drains, `lag` batches ago.
            first = 4 if number > 3 else 1
            ended = number if number == 0 else max(number - lag, first - 1)
            if ended >= first or number == 0:
                assert loss == pytest.approx(losses[ended], abs=1e-9)
        assert last == pytest.approx(expected_last, abs=1e-9)


def test_a_checkpoint_in_the_middle_continues_as_without_it():
    plan = Plan(pp=2, schedule="2bw", microbatches=2)
    batches = cases.batches(CASE)

    def body(comm: Any) -> Any:
        step = make_step(comm, plan)
        for batch in batches[:4]:
            step(cases.local_batch(batch, 1, 0))
        state = step.state_dict()  # drains
        resumed = make_step(comm, plan)
        resumed.load_state_dict(state)
        for batch in batches[4:]:
            step(cases.local_batch(batch, 1, 0))
            resumed(cases.local_batch(batch, 1, 0))
        return step.state_dict()["model"], resumed.state_dict()["model"]

    for one, other in threads.run(2, body):
        for name, weight in one.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bucket_bytes", [None, 4_000])  # of the run before: None: the same buckets, else others
@pytest.mark.parametrize(("pp", "schedule", "microbatches"), [(2, "2bw", 2), (4, "2bw", 4), (4, "pipedream", 1)])
def test_the_first_steps_after_a_resume_report_the_loss_of_their_first_batch(pp, schedule, microbatches, bucket_bytes):
    plan = Plan(pp=pp, schedule=schedule, microbatches=microbatches)
    before = dataclasses.replace(plan, bucket_bytes=bucket_bytes or plan.bucket_bytes)
    lag = pp - 1 if schedule == "pipedream" else 1
    batches = [cases.local_batch(batch, 1, 0) for batch in cases.batches(CASE)[: lag + 2]]

    def body(comm: Any) -> Any:
        step = make_step(comm, before)
        step(batches[0])
        resumed = make_step(comm, plan)
        resumed.load_state_dict(step.state_dict())  # drains
        expected = resumed.evaluate(batches[1])
        return (expected.loss, expected.samples), [resumed(batch) for batch in batches[1:]]

    for expected, reported in threads.run(plan.mesh.size, body):
        for metrics in reported:
            assert (metrics.loss, metrics.samples) == pytest.approx(expected, abs=1e-9)


def test_versions_are_freed_and_as_many_as_the_schedule_says():
    parameter = nn.Parameter(torch.zeros(4))
    for schedule, stage in (("pipedream", 0), ("pipedream", 1), ("2bw", 0)):
        spec = Plan(pp=3, schedule=schedule, microbatches=3 if schedule == "2bw" else 1).pipeline_spec
        versions = WeightVersions([parameter], staleness(schedule, spec, stage))
        missed, most = staleness(schedule, spec, stage), 0
        for batch in range(8):
            with versions.using(versions.version_of(batch)):
                assert parameter.shape == (4,)
            if batch >= missed:
                with versions.in_update(), torch.no_grad():
                    parameter.add_(1)
                versions.end_update(versions.version_of(batch - missed + 1))
            most = max(most, versions.num_bytes // parameter.nbytes)
        assert most == num_stashed(schedule, spec, stage)
        versions.restart()
        assert versions.num_bytes == 0


def test_what_an_asynchronous_schedule_cannot_do_is_said_at_once():
    def problems(call: Any) -> str:
        with pytest.raises(PlanError) as caught:
            call()
        return str(caught.value)

    plan = Plan(pp=2, dp=2, schedule="2bw", microbatches=1, zero=2, update="in_backward", codec="topk", interleave=2)
    text = problems(lambda: threads.run(4, lambda comm: make_step(comm, plan, clip=1.0)))
    for part in (
        "microbatches = 1",
        "zero = 2",
        'update = "in_backward"',
        'codec = "topk"',
        "clip = 1",
        "interleave = 2",
    ):
        assert part in text
    plan = Plan(pp=2, schedule="pipedream")
    assert "skip_nan = 3" in problems(lambda: threads.run(2, lambda comm: make_step(comm, plan, skip_nan=3)))
    tied: Any = make_model()
    tied.head.weight = tied.embedding.weight
    assert "which two stages use" in problems(lambda: threads.run(2, lambda comm: make_step(comm, plan, tied)))
    assert "trains differently" in problems(lambda: check_verifiable(plan))


def test_with_bf16_the_updates_of_stages_are_no_edits_of_the_user():
    plan = Plan(pp=2, schedule="pipedream", precision="bf16")
    _, losses = emulate(plan)

    def body(comm: Any) -> list[float]:
        step = make_step(comm, plan)
        return [step(cases.local_batch(batch, 1, 0)).loss for batch in cases.batches(CASE)[:4]]

    for reported in threads.run(2, body):
        assert reported[2:] == pytest.approx(losses[1:3], abs=0.05)
