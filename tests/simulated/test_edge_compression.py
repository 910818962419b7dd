"""Compressed edges: training is that of one process in which the outputs of stages are rounded or masked alike."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.rules.edges import EdgeSpec, edge_bytes
from fourfold.comm.edges import HEADER_WORDS, TensorSpec, encode
from fourfold.comm.tensor_group import CALL_ROW
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

# Of one size: gradients that are rounded are those of the loss divided by the first batch's count, until the update.
CASE = Case(model="lm", batch_sizes=(4, 4), length=8, clip=0.05, microbatches=2)
WIDTH = 16
COMPARED = 8 * CALL_ROW  # bytes by which stages compare their batches and calls
EDGES = {"bf16": EdgeSpec("bf16"), "int8": EdgeSpec("int8"), "dct": EdgeSpec("dct", 0.25)}


class Emulated(torch.autograd.Function):
    """What an edge does to activations, and to their gradients; written apart from the formats."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: EdgeSpec) -> Tensor:
        ctx.spec, ctx.keep = spec, keep_of(x, spec.density) if spec.kind == "dct" else None
        return x * ctx.keep if ctx.keep is not None else rounded(x, spec.kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient * ctx.keep if ctx.keep is not None else rounded(gradient, ctx.spec.kind), None


def keep_of(x: Tensor, density: float) -> Tensor:
    """Alg. 2: tau = sort(|x|)[⌊d·η⌋] of each row, keep = |x| ≥ tau; no zeros."""
    magnitudes, columns = x.abs(), x.shape[-1]
    threshold = magnitudes.sort(dim=-1).values[..., int(columns * (1 - density) + 1e-9)].unsqueeze(-1)
    return (magnitudes >= threshold) & (x != 0)


def rounded(x: Tensor, kind: str) -> Tensor:
    if kind == "bf16":
        return x.bfloat16().to(x.dtype)
    scale = (x.abs().max(-1, keepdim=True).values / 127).float().to(x.dtype)
    return torch.where(scale > 0, (x / scale).round() * scale, 0.0)


def make_model() -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return lm.task(width=WIDTH, layers=4, heads=4, length=8, warmup=0).model().double()


def emulate(boundaries: tuple[int, ...], spec: EdgeSpec) -> nn.Module:
    model: Any = make_model()
    for block in boundaries:
        model.blocks[block].register_forward_hook(lambda module, args, output: Emulated.apply(output, spec))
    return model


def batches() -> list[Any]:
    return cases.batches(CASE)


@functools.cache
def one_process(boundaries: tuple[int, ...], kind: str) -> tuple[TrainingResult, float]:
    """The training, and the loss of a batch after it, in an evaluation."""
    model = emulate(boundaries, EDGES[kind])
    result = oracle.train(model, cases.loss(CASE), cases.optimizer(CASE), batches(), clip=CASE.clip)
    inputs, targets = batches()[0]
    with torch.no_grad():
        return result, cases.loss(CASE)(model.eval()(**inputs), targets).mean().item()


def run(fields: dict[str, Any], kind: str, hosts: int = 1) -> list[tuple[TrainingResult, float]]:
    spec = EDGES[kind]
    density: dict[str, Any] = {"edge_density": spec.density} if kind == "dct" else {}
    plan = Plan(**fields, edge=kind, **density, microbatches=2, bucket_bytes=20_000)

    def body(comm: Any) -> tuple[TrainingResult, float]:
        options: dict[str, Any] = {"clip": CASE.clip, "tensor": lm.TENSOR_RULES if plan.tp > 1 else {}}
        optimizer = cases.optimizer(CASE)
        step = TrainStep(make_model(), cases.loss(CASE), optimizer, plan=plan, communicator=comm, **options)
        result = cases.train_step(CASE, step)
        return result, step.evaluate(cases.local_batch(batches()[0], plan.dp, step.dp_index)).loss

    return threads.run(plan.mesh.size, body, hosts=hosts)


MESHES: list[tuple[dict[str, Any], tuple[int, ...], int]] = [
    ({"pp": 2}, (1,), 2),
    ({"pp": 2, "dp": 2, "zero": 3, "schedule": "gpipe"}, (1,), 1),
    ({"pp": 2, "schedule": "interleaved", "interleave": 2}, (0, 1, 2), 1),
    ({"pp": 2, "schedule": "zero-bubble", "tp": 2}, (1,), 1),
    ({"pp": 2, "cp": 2}, (1,), 2),
]


@pytest.mark.covering
@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize(("fields", "boundaries", "hosts"), MESHES, ids=lambda each: str(each).replace("'", ""))
def test_training_and_evaluation_are_those_of_one_process_that_rounds_alike(fields, boundaries, hosts, kind):
    expected, evaluated = one_process(boundaries, kind)
    for got, loss in run(fields, kind, hosts):
        assert oracle.deviation(got, expected) <= TOLERANCE
        assert abs(loss - evaluated) <= TOLERANCE


def sent_bytes(fields: dict[str, Any], model: nn.Module, batch: Any) -> list[float]:
    """By rank: what it has sent in a step between processes."""

    def body(comm: Any) -> float:
        plan = Plan(pp=2, transport="gloo", microbatches=2, **fields)
        with cases.SEED_LOCK:
            own = copy.deepcopy(model)
        step = TrainStep(own, cases.loss(CASE), cases.optimizer(CASE), plan=plan, communicator=comm)
        step(batch)  # whose first message has metadata
        return step(batch).sent_bytes

    return threads.run(2, body, hosts=2)


@pytest.mark.parametrize("kind", ["none", *EDGES])
def test_bytes_on_the_wire_are_those_of_the_formula(kind):
    spec = EDGES.get(kind, EdgeSpec())
    fields: dict[str, Any] = (
        {} if kind == "none" else {"edge": kind} | ({"edge_density": spec.density} if kind == "dct" else {})
    )
    first, second = sent_bytes(fields, make_model(), batches()[0])
    tokens = CASE.batch_sizes[0] * CASE.length
    expected = edge_bytes(spec, tokens // 2, WIDTH, 8)  # of a microbatch, in float64
    metadata = TensorSpec((0,), torch.uint8, False)  # shapes, which are as in the message before
    header = encode([TensorSpec((2, CASE.length, WIDTH), torch.float64, True), metadata])
    shapes = 0 if kind == "none" else 8 * len(header)
    assert first == COMPARED + 2 * (8 * HEADER_WORDS + shapes + expected.forward)
    assert second == COMPARED + 2 * (8 * HEADER_WORDS + expected.backward)


@pytest.mark.parametrize("precision", ["keep", "bf16"])
def test_with_two_byte_precision_activations_cross_stages_in_two_bytes(precision):
    """Only the last stage widens its outputs."""
    first, second = sent_bytes({"precision": precision}, make_model().float(), batches()[0])
    elements = CASE.batch_sizes[0] * CASE.length * WIDTH
    element_bytes = 2 if precision == "bf16" else 4
    assert first == second == COMPARED + 2 * 8 * HEADER_WORDS + elements * element_bytes


def test_the_last_stage_widens_its_outputs():
    def body(comm: Any) -> torch.dtype:
        step = TrainStep(
            make_model().float(), cases.loss(CASE), cases.optimizer(CASE),
            plan=Plan(pp=2, microbatches=2, precision="bf16"), communicator=comm,
        )  # fmt: skip
        step(batches()[0])
        with step.inference() as model:
            return model(**batches()[0][0]).dtype

    assert threads.run(2, body) == [torch.float32] * 2


def test_outputs_are_masked_as_in_training():
    """What inference computes is what the emulation computes without training."""
    spec, inputs = EDGES["dct"], batches()[0][0]

    def body(comm: Any) -> Tensor:
        plan = Plan(pp=2, edge="dct", edge_density=spec.density)
        step = TrainStep(make_model(), cases.loss(CASE), cases.optimizer(CASE), plan=plan, communicator=comm)
        step.evaluate(batches()[0])
        with step.inference() as model:
            return model(**inputs)

    with torch.no_grad():
        expected, plain = emulate((1,), spec).eval()(**inputs), make_model().eval()(**inputs)
    for got in threads.run(2, body):
        assert torch.allclose(got, expected, rtol=0, atol=TOLERANCE)
        assert not torch.allclose(got, plain, rtol=0, atol=1e-3)
