"""Weights that the first and the last stage of a pipeline use together: an embedding and a head."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.axes.pipeline.rules.edges import add_sends
from fourfold.axes.pipeline.rules.schedules import compute_actions
from fourfold.axes.pipeline.rules.ties import add_ties
from fourfold.plan.plan import Plan
from fourfold.plan.simulate import makespan, simulate
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import PlanError
from fourfold.words.mesh import Mesh
from fourfold.words.program import Verb
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(4, 3, 5), length=8, clip=0.05, microbatches=2)


class Tied(nn.Module):
    """The language model with one weight for embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        with cases.SEED_LOCK:
            torch.manual_seed(7)
            made: Any = lm.task(width=16, layers=4, heads=2, length=16, warmup=0).model().double()
        made.head.weight = made.embedding.weight
        self.lm = made

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.lm(tokens, positions)


def make_step(comm: Any, model: nn.Module, **fields: Any) -> TrainStep:
    plan = Plan(bucket_bytes=4_000, **{"microbatches": CASE.microbatches, **fields})
    rules = {f"lm.{name}": rule for name, rule in lm.TENSOR_RULES.items()} if plan.tp > 1 else {}
    options: dict[str, Any] = {"plan": plan, "communicator": comm, "tensor": rules, "drift_check": 1}
    clip = None if plan.update == "in_backward" else CASE.clip
    return TrainStep(model, cases.loss(CASE), cases.optimizer(CASE), clip=clip, **options)


@pytest.mark.parametrize(("fields", "hosts"), [
    ({"pp": 2}, 1),
    ({"pp": 4}, 1),
    ({"pp": 2, "dp": 2, "zero": 1}, 1),
    ({"pp": 2, "dp": 2, "zero": 3}, 4),
    ({"pp": 2, "tp": 2}, 1),
    ({"pp": 2, "cp": 2}, 2),
    ({"pp": 2, "dp": 2, "zero": 1, "update": "in_backward"}, 1),
    ({"pp": 2, "schedule": "interleaved", "interleave": 2}, 1),
    ({"pp": 2, "dp": 2, "schedule": "interleaved", "interleave": 2, "zero": 3, "update": "in_backward"}, 4),
])  # fmt: skip
def test_a_tied_weight_is_trained_as_on_one_device(fields, hosts):
    case = dataclasses.replace(CASE, clip=None if fields.get("update") == "in_backward" else CASE.clip)
    batches = cases.batches(CASE)
    expected = oracle.train(Tied(), cases.loss(CASE), cases.optimizer(CASE), batches, clip=case.clip)

    def body(comm):
        step = make_step(comm, Tied(), **fields)
        got = cases.train_step(CASE, step)
        state = step.state_dict()["model"]
        loss = step.evaluate(cases.local_batch(batches[0], step.plan.dp, step.dp_index)).loss
        return got, state, loss

    size = fields.get("dp", 1) * fields.get("cp", 1) * fields.get("tp", 1) * fields["pp"]
    for got, state, loss in threads.run(size, body, hosts=hosts):
        assert oracle.deviation(got, expected) <= TOLERANCE
        assert torch.equal(state["lm.head.weight"], state["lm.embedding.weight"])
        trained = Tied()
        trained.load_state_dict(state)
        with torch.no_grad():
            outputs = trained(**batches[0][0])
        assert loss == pytest.approx(cases.loss(CASE)(outputs, batches[0][1]).mean().item(), rel=TOLERANCE)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 4), (4, 8)])
def test_a_program_with_ties_ends_and_has_each_message_once(schedule, pp, microbatches):
    interleave = 2 if schedule == "interleaved" else 1
    lists = compute_actions(schedule, pp=pp, microbatches=microbatches, interleave=interleave)
    program = dict(enumerate(add_ties(add_sends(lists, pp * interleave))))
    times = simulate(program, lambda _, action: 1.0, mesh=Mesh(pp=pp))
    at = {place: {timed.action.verb: timed for timed in actions} for place, actions in times.items()}
    last = pp - 1
    for verb in (Verb.TIE, Verb.TIE_GRADIENT):
        holders = [place for place, actions in program.items() if any(a.verb == verb for a in actions)]
        assert holders == [0, last]
    assert at[last][Verb.TIE].start >= at[0][Verb.TIE].end
    assert at[0][Verb.TIE_GRADIENT].start >= at[last][Verb.TIE_GRADIENT].end
    assert at[last][Verb.TIE_GRADIENT].start >= at[last][Verb.BACKWARD].end
    assert at[0][Verb.BACKWARD].start >= at[0][Verb.TIE_GRADIENT].end


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (2, 32), (4, 4), (4, 8)])
def test_ties_make_no_stage_wait(schedule, pp, microbatches):
    # The last stage has all its gradients long before the first stage begins its last backward.
    interleave = 2 if schedule == "interleaved" else 1
    computes = compute_actions(schedule, pp=pp, microbatches=microbatches, interleave=interleave)
    lists = add_sends(computes, pp * interleave)
    costs = {Verb.FORWARD: 1.0, Verb.BACKWARD: 2.0, Verb.BACKWARD_INPUT: 1.0, Verb.BACKWARD_WEIGHT: 1.0}
    with_ties, without = (
        makespan(simulate(dict(enumerate(each)), lambda _, action: costs.get(action.verb, 0.0), mesh=Mesh(pp=pp)))
        for each in (add_ties(lists), lists)
    )
    assert with_ties == without


@pytest.mark.parametrize(("fields", "message"), [
    ({"update": "in_forward"}, r'update = "in_forward" and lm\.embedding\.weight, which two stages use'),
])  # fmt: skip
def test_what_does_not_go_with_a_tied_weight_is_refused(fields, message):
    def body(comm):
        with pytest.raises(PlanError, match=message):
            make_step(comm, Tied(), pp=2, **fields)

    threads.run(2 * fields.get("dp", 1), body)


def test_a_weight_that_blocks_of_two_stages_share_is_refused():
    def body(comm):
        model: Any = Tied()
        model.lm.blocks[2].mlp.down.weight = model.lm.blocks[1].mlp.down.weight
        with pytest.raises(PlanError, match=r"one weight, lm\.blocks\.1\.mlp\.down\.weight and lm\.blocks\.2"):
            make_step(comm, model, pp=4)

    threads.run(4, body)


def test_a_checkpoint_of_a_pipeline_has_both_names_of_a_tied_weight(tmp_path):
    batches = cases.batches(CASE)

    def save(comm):
        step = make_step(comm, Tied(), pp=2)
        step(batches[0])
        ff.Checkpoints(tmp_path, step).save()
        return [step(batch).loss for batch in batches[1:]]

    def resume(comm, **fields):
        step = make_step(comm, Tied(), **fields)
        assert ff.Checkpoints(tmp_path, step).load()
        return [step(batch).loss for batch in batches[1:]]

    losses = threads.run(2, save)[0]
    assert threads.run(1, resume)[0] == pytest.approx(losses, rel=TOLERANCE)
    assert threads.run(2, lambda comm: resume(comm, pp=2))[0] == pytest.approx(losses, rel=TOLERANCE)


def test_local_steps_train_a_tied_weight_as_without_stages():
    def trained(**fields: Any) -> list[oracle.TrainingResult]:
        def body(comm: Any) -> oracle.TrainingResult:
            return cases.train_step(CASE, make_step(comm, Tied(), dp=2, sync="local", local_steps=3, **fields))

        return threads.run(2 * fields.get("pp", 1), body)

    expected, *_ = trained()
    assert all(oracle.deviation(got, expected) <= TOLERANCE for got in trained(pp=2))
