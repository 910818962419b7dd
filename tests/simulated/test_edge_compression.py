"""Compressed edges: training is that of one process in which the outputs of stages are rounded or masked alike."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.plan.pipeline.edges import EdgeSpec
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from tests import cases
from tests.cases import Case

# Of one size: gradients that are rounded are those of the loss divided by the first batch's count, until the update.
CASE = Case(model="lm", batch_sizes=(4, 4), length=8, clip=0.05, microbatches=2)
WIDTH = 16
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
    density = {"edge_density": spec.density} if kind == "dct" else {}
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
    ({"pp": 2, "sp": 2}, (1,), 2),
]


@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize(("fields", "boundaries", "hosts"), MESHES, ids=lambda each: str(each).replace("'", ""))
def test_training_and_evaluation_are_those_of_one_process_that_rounds_alike(fields, boundaries, hosts, kind):
    expected, evaluated = one_process(boundaries, kind)
    for got, loss in run(fields, kind, hosts):
        assert oracle.deviation(got, expected) <= TOLERANCE
        assert abs(loss - evaluated) <= TOLERANCE
