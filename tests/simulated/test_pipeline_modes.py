"""A pipeline with the other settings of a plan trains as one device does, or as the same plan without stages."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fourfold.checkpoint.checkpoints import Checkpoints
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from fourfold.words.errors import DivergenceError, TaskError
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(8, 1, 5), length=8, microbatches=2)  # in the second step, a data rank has none
PIPELINE: dict[str, Any] = {"pp": 2, "dp": 2, "microbatches": 2, "bucket_bytes": 8000}
INTERLEAVED: dict[str, Any] = {**PIPELINE, "schedule": "interleaved", "interleave": 2}


def make_model() -> torch.nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return lm.task(width=16, layers=4, heads=4, length=8, warmup=0).model().double()


@functools.cache
def one_device(case: Case) -> TrainingResult:
    return oracle.train(make_model(), cases.loss(case), cases.optimizer(case), cases.batches(case), clip=case.clip)


def trained(
    plan: Plan, case: Case = CASE, *, hosts: int = 1, make: Callable[[], torch.nn.Module] = make_model
) -> list[TrainingResult]:
    """The training of every rank."""

    def body(comm: Any) -> TrainingResult:
        options: dict[str, Any] = {"clip": case.clip, "tensor": lm.TENSOR_RULES if plan.tp > 1 else {}}
        optimizer = cases.optimizer(case)
        step = TrainStep(make(), cases.loss(case), optimizer, plan=plan, communicator=comm, drift_check=1, **options)
        return cases.train_step(case, step)

    return threads.run(plan.mesh.size, body, hosts=hosts)


@pytest.mark.parametrize(("zero", "update", "hosts"), [
    (2, "after", 1), (3, "after", 4), (1, "in_backward", 1), (3, "in_backward", 4), (0, "in_forward", 1),
    (3, "in_forward", 4),
])  # fmt: skip
def test_interleaved_stages_train_as_one_device_with_every_zero_and_update(zero, update, hosts):
    for got in trained(Plan(**INTERLEAVED, zero=zero, update=update), hosts=hosts):
        assert oracle.deviation(got, one_device(CASE)) <= TOLERANCE


def half_frozen(frozen: int) -> torch.nn.Module:
    """Four layers in two stages: all weights of one stage are frozen."""
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))).double()
    model[2 * frozen : 2 * frozen + 2].requires_grad_(False)
    return model


@pytest.mark.covering
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize(("fields", "hosts"), [
    ({"zero": 0}, 4), ({"zero": 1}, 1), ({"zero": 1}, 4), ({"zero": 2, "update": "in_backward"}, 4), ({"zero": 3}, 1),
    ({"zero": 3}, 4), ({"zero": 1, "update": "in_forward"}, 1), ({"zero": 3, "update": "in_forward"}, 4),
    ({"zero": 1, "optimizer": "LAMB"}, 1), ({"zero": 3, "optimizer": "LAMB"}, 4),
], ids=str)  # fmt: skip
def test_a_stage_whose_weights_are_all_frozen_trains_as_one_device(frozen, fields, hosts, tmp_path):
    others = {name: value for name, value in fields.items() if name != "optimizer"}
    clip = None if fields.get("update") == "in_backward" else 0.05
    case = Case(batch_sizes=(8, 1, 5), clip=clip, optimizer=fields.get("optimizer", Case().optimizer))
    build = cases.loss(case), cases.optimizer(case)
    expected = oracle.train(half_frozen(frozen), *build, cases.batches(case), clip=case.clip)

    def body(comm: Any) -> TrainingResult:
        plan = Plan(pp=2, dp=2, microbatches=2, **others)
        step, other = (
            TrainStep(half_frozen(frozen), *build, plan=plan, communicator=comm, clip=case.clip) for _ in range(2)
        )
        result = cases.train_step(case, step)
        Checkpoints(tmp_path, step).save(wait=True)
        assert Checkpoints(tmp_path, other).load() is not None
        assert oracle.deviation(oracle.snapshot(other, [], []), oracle.snapshot(step, [], [])) == 0
        return result

    trained = {name for name, p in half_frozen(frozen).named_parameters() if p.requires_grad}
    for got in threads.run(4, body, hosts=hosts):
        assert trained <= got.weights.keys()
        weights = {name: expected.weights[name] for name in got.weights}  # without frozen ones of the other stage
        assert oracle.deviation(got, expected._replace(weights=weights)) <= TOLERANCE


WRITTEN = """
0: F0.0 F0.1 F2.0 F2.1 I2.0 I2.1 I0.0 W0.0 I0.1 W0.1 W2.0 W2.1
1: F1.0 F1.1 F3.0 F3.1 I3.0 I3.1 I1.0 W1.0 I1.1 W1.1 W3.0 W3.1
"""


@pytest.mark.parametrize(("zero", "update"), [(0, "after"), (1, "in_backward"), (1, "in_forward")])
def test_a_written_program_may_complete_the_first_stage_before_a_later_one(zero, update):
    plan = Plan(**{**INTERLEAVED, "schedule": "written"}, program=WRITTEN, zero=zero, update=update)
    for got in trained(plan):
        assert oracle.deviation(got, one_device(CASE)) <= TOLERANCE


FORWARD_BEFORE_BACKWARD = """
0: F0.0 F2.0 F0.1 F2.1 B2.0 B2.1 B0.0 B0.1
1: F1.0 F3.0 B3.0 F1.1 F3.1 B3.1 B1.0 B1.1
"""
"""Rank 1 sends a gradient back while rank 0 waits for activations from it: two edges between the same two ranks."""


@pytest.mark.parametrize("hosts", [1, 2], ids=["shared memory", "process groups"])
def test_both_edges_between_two_ranks_carry_their_own_messages(hosts):
    plan = Plan(pp=2, interleave=2, microbatches=2, schedule="written", program=FORWARD_BEFORE_BACKWARD)
    for got in trained(plan, hosts=hosts):
        assert oracle.deviation(got, one_device(CASE)) <= TOLERANCE


@pytest.mark.parametrize(("optimizer", "fields"), [("LARS", PIPELINE), ("LAMB", {**INTERLEAVED, "zero": 2})])
def test_layerwise_updates_are_those_of_one_device(optimizer, fields):
    case = dataclasses.replace(CASE, optimizer=optimizer)
    for got in trained(Plan(**fields), case):
        assert oracle.deviation(got, one_device(case)) <= TOLERANCE


OF_ITS_OWN: dict[str, Any] = {"dp": 2, "microbatches": 2, "bucket_bytes": 1}
"""Each parameter has a bucket of its own, which is the same whatever stages there are."""


@pytest.mark.parametrize("fields", [
    {"codec": "topk", "codec_density": 0.3}, {"codec": "topk", "codec_density": 0.3, "zero": 2},
    {"codec": "powersgd", "zero": 1}, {"codec": "int8"}, {"codec": "dct", "codec_density": 0.3},
    {"precision": "fp16"}, {"precision": "fp16", "zero": 1, "tp": 2},
    {"sync": "local", "local_steps": 3, "outer_lr": 0.7}, {"sync": "local", "local_steps": 3, "tp": 2},
    {"sync": "local", "local_steps": 3, "update": "in_backward", "schedule": "interleaved", "interleave": 2},
], ids=lambda fields: "-".join(map(str, fields.values())))  # fmt: skip
def test_a_pipeline_trains_as_the_same_plan_without_stages(fields):
    case = dataclasses.replace(CASE, clip=None if fields.get("update") == "in_backward" else 0.05)
    without = {name: value for name, value in fields.items() if name not in ("schedule", "interleave")}
    expected, *_ = trained(Plan(**OF_ITS_OWN, **without), case)
    for got in trained(Plan(**OF_ITS_OWN, **fields, pp=2), case):
        assert oracle.deviation(got, expected) <= TOLERANCE


class Block(torch.nn.Module):
    """A block with weights that are used for an even number of samples only, or never."""

    def __init__(self, *, is_ever_used: bool) -> None:
        super().__init__()
        self.inner, self.spare = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.is_ever_used = is_ever_used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x).tanh()
        return self.spare(x) if self.is_ever_used and len(x) % 2 == 0 else x


def make_moody_model() -> torch.nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        blocks = [Block(is_ever_used=index != 1) for index in range(4)]
        return torch.nn.Sequential(*blocks, torch.nn.Linear(16, 10)).double()


@pytest.mark.parametrize("fields", [
    {"zero": 0}, {"zero": 2}, {"zero": 3, "update": "in_forward"}, {"schedule": "interleaved", "interleave": 2},
], ids=lambda fields: "-".join(map(str, fields.values())))  # fmt: skip
def test_a_weight_without_a_gradient_on_any_data_rank_keeps_its_value(fields):
    case = Case(batch_sizes=(10, 7, 9), loss="pair")
    plan = {**OF_ITS_OWN, "unused": "allow", "zero": fields.get("zero", 0)}
    before = {name: weight for name, weight in make_moody_model().state_dict().items() if name.startswith("1.spare")}
    expected, *_ = trained(Plan(**plan), case, make=make_moody_model)
    for got in trained(Plan(**{**plan, **fields}, pp=2), case, make=make_moody_model):
        assert oracle.deviation(got, expected) <= TOLERANCE
        assert all(torch.equal(got.weights[name], weight) for name, weight in before.items())


class Steep(torch.nn.Module):
    """A block whose gradients are larger than those of others, by a factor that the samples have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(15, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x[:, 1:])
        return y + x[:, :1] * (y - y.detach())


def make_blocks() -> torch.nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        blocks = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(3)]
        return torch.nn.Sequential(Steep(), *blocks, torch.nn.Linear(16, 10)).double()


SAMPLES = Case(batch_sizes=(8, 8, 8), loss="values")
FEATURES, LABELS = cases.batches(SAMPLES)[0]


def weights_after(plan: Plan, batches: list[torch.Tensor], **options: Any) -> list[tuple[list[Any], list[Any]]]:
    """By rank: the metrics of all steps, and the weights before the first and after each of them.

    `batches` are features; all have the same labels.
    """

    def body(comm: Any) -> tuple[list[Any], list[Any]]:
        optimizer = cases.optimizer(SAMPLES)
        step = TrainStep(
            make_blocks(), cases.loss(SAMPLES), optimizer, plan=plan, communicator=comm, same_batches="allow", **options
        )
        metrics, weights = [], [{name: weight.clone() for name, weight in step.named_weights()}]
        for features in batches:
            metrics.append(step(cases.local_batch((features, LABELS), plan.dp, step.dp_index)))
            step.flush()
            weights.append({name: weight.clone() for name, weight in step.named_weights()})
        return metrics, weights

    return threads.run(plan.mesh.size, body)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_an_overflow_on_the_first_stage_is_one_on_all_stages_and_changes_no_weight():
    plan = Plan(pp=2, dp=2, microbatches=2, precision="fp16", update="in_forward")
    steep = FEATURES.clone()
    steep[:, 0] = 60_000.0  # only the first block's weights have gradients that fp16 cannot hold
    batches = [FEATURES, steep, FEATURES]
    for metrics, weights in weights_after(plan, batches):
        assert [each.overflowed for each in metrics] == [False, True, False]
        assert [each.loss_scale for each in metrics] == [65536.0, 65536.0, 32768.0]
        assert [same(*pair) for pair in itertools.pairwise(weights)] == [False, True, False]


@pytest.mark.parametrize("fields", [{"update": "after"}, {"update": "in_backward", **INTERLEAVED}, {"zero": 3}])
def test_a_bad_step_is_skipped_by_all_stages(fields):
    plan = Plan(**{**PIPELINE, **fields})
    bad = FEATURES.clone()
    bad[3] = float("nan")
    alone, *_ = weights_after(Plan(), [FEATURES, FEATURES])
    for metrics, weights in weights_after(plan, [FEATURES, bad, FEATURES], skip_nan=1):
        assert [each.skipped is not None for each in metrics] == [False, True, False]
        assert same(weights[1], weights[2])
        for name, weight in alone[1][-1].items():
            torch.testing.assert_close(weights[-1][name], weight, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("hosts", [1, 4])
def test_stages_with_different_batches_refuse_them_and_stages_in_different_calls_too(hosts):
    batch = FEATURES, LABELS

    def body(comm: Any) -> None:
        optimizer, plan = cases.optimizer(SAMPLES), Plan(pp=2, tp=1, dp=2, microbatches=2)
        step = TrainStep(make_blocks(), cases.loss(SAMPLES), optimizer, plan=plan, communicator=comm)
        step(cases.local_batch(batch, 2, step.dp_index))
        before = {name: weight.clone() for name, weight in step.model.named_parameters()}
        other = FEATURES + (comm.rank == 3), LABELS
        with pytest.raises(TaskError, match="which differ only on pp" if step.dp_index else "differ only"):
            step.evaluate(cases.local_batch(other, 2, step.dp_index))
        with pytest.raises(DivergenceError, match=r"is at evaluate\(\)"):
            (step.evaluate if comm.rank < 2 else step)(cases.local_batch(batch, 2, step.dp_index))
        assert all(torch.equal(weight, before[name]) for name, weight in step.model.named_parameters())

    threads.run(4, body, hosts=hosts)


def make_normed_model() -> torch.nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        norms = [torch.nn.BatchNorm1d(16), torch.nn.BatchNorm1d(16, momentum=None), torch.nn.BatchNorm1d(16)]
        blocks = [torch.nn.Sequential(torch.nn.Linear(16, 16), norm, torch.nn.Tanh()) for norm in norms]
        return torch.nn.Sequential(torch.nn.Linear(16, 16), *blocks, torch.nn.Linear(16, 10)).double()


@pytest.mark.parametrize("fields", [{"zero": 0}, {"zero": 3, "update": "in_forward"}])
def test_batch_norms_have_the_statistics_of_all_samples_of_their_stage(fields):
    case = Case(batch_sizes=(6, 7, 4), optimizer="SGD")
    plan = Plan(pp=2, dp=3, batch_norm="sync", bucket_bytes=2000, **fields)
    frozen = "2.1"

    def freeze(model: torch.nn.Module) -> torch.nn.Module:
        model.get_submodule(frozen).eval()
        return model

    def train(step: TrainStep) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = []
        for number, batch in enumerate(cases.batches(case)):
            if number == 2:
                freeze(step.model)
            losses.append(step(cases.local_batch(batch, step.plan.dp, step.dp_index)).loss)
        step.flush()
        step.model.eval()
        features, labels = cases.batches(case)[0]
        # In an evaluation a data rank may have no samples.
        losses.append(step.evaluate(cases.local_batch((features[:2], labels[:2]), step.plan.dp, step.dp_index)).loss)
        return losses, step.state_dict()["model"]

    def body(plan: Plan) -> list[Any]:
        def run(comm: Any) -> Any:
            optimizer = cases.optimizer(case)
            return train(TrainStep(make_normed_model(), cases.loss(case), optimizer, plan=plan, communicator=comm))

        return threads.run(plan.mesh.size, run)

    ((losses, state),) = body(Plan(batch_norm="sync"))
    for other_losses, other in body(plan):
        assert other_losses == pytest.approx(losses, rel=TOLERANCE)
        assert other.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(other[name], value, rtol=TOLERANCE, atol=TOLERANCE)


LENGTHS = (8, 5, 7)


@functools.cache
def texts() -> list[Any]:
    """Batches of texts of different lengths, which two tensor ranks cannot always divide."""
    return [cases.batches(dataclasses.replace(CASE, length=length))[0] for length in LENGTHS]


@pytest.mark.parametrize("fields", [
    {"tp": 2}, {"tp": 2, "dp": 2, "schedule": "interleaved", "interleave": 2, "zero": 3}, {"tp": 2, "cp": 2},
])  # fmt: skip
def test_a_split_residual_crosses_stages_in_parts(fields):
    plan = Plan(pp=2, microbatches=2, sequence_parallel=True, **fields)

    def body(comm: Any) -> tuple[TrainingResult, set[int]]:
        step = TrainStep(
            make_model(), cases.loss(CASE), cases.optimizer(CASE), plan=plan, communicator=comm, tensor=lm.TENSOR_RULES
        )
        lengths, edge = set(), step._assembly.parts.edges.to_next
        if edge is not None:
            send = edge.send
            edge.send = lambda tensors: (lengths.update(each.shape[-2] for each in tensors[:-1]), send(tensors))[1]
        losses = [step(cases.local_batch(batch, plan.dp, step.dp_index)).loss for batch in texts()]
        return oracle.snapshot(step, losses, []), lengths

    expected = oracle.train(make_model(), cases.loss(CASE), cases.optimizer(CASE), texts())
    for got, lengths in threads.run(plan.mesh.size, body):
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert oracle.deviation(got._replace(grad_norms=[]), expected._replace(grad_norms=[])) <= TOLERANCE
        assert max(lengths, default=0) <= -(-max(LENGTHS) // plan.tp)
