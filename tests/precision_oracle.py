"""The oracle of mixed precision: ranks with rounded weights, in one process, in plain torch; the step under test."""

from typing import Any

import torch
from torch import nn

from fourfold.orders.sample_order import shard_range
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TrainingResult
from tests import cases
from tests.cases import Case, batches, local_batch

CASE = Case(precision="bf16", batch_sizes=(12, 12, 12, 12), bucket_bytes=1000, optimizer="SGD")
# torch's fused kernels round the last elements of a tensor differently, and which elements are last depends on how
# parameters are laid out in memory.
OPTIMIZER_OPTIONS = {"foreach": True}
LAYER_WISE = ("LARS", "LAMB")  # these have no such kernels
# Threads on one host share weights; only over gloo are weights sharded.
ZERO_FIELDS: dict[int, dict[str, Any]] = {
    zero: {"zero": zero, "transport": "gloo" if zero == 3 else "auto"} for zero in range(4)
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _optimizer(case: Case) -> Any:
    return cases.optimizer(case, **({} if case.optimizer in LAYER_WISE else OPTIMIZER_OPTIONS))


def train_oracle(case: Case, size: int = 1) -> TrainingResult:
    """The expected training of `size` ranks: rounded weights compute, torch.optim updates float32 master weights."""
    masters, working = cases.model(case.model).float(), cases.model(case.model).to(DTYPES[case.precision])
    optimizer, loss = _optimizer(case)(masters.parameters()), cases.loss(case)
    losses, norms = [], []
    for batch in batches(case):
        with torch.no_grad():
            for low, high in zip(working.parameters(), masters.parameters(), strict=True):
                low.copy_(high)
        total, slots = 0.0, []
        for rank in range(size):
            inputs, targets = local_batch(batch, size, rank)
            slots.append([])
            for part in range(case.microbatches):
                span = slice(*shard_range(0, len(targets), case.microbatches, part))
                values = loss(working(inputs[span].to(DTYPES[case.precision])).float(), targets[span])
                (values.sum() / len(batch[1])).backward()
                total += values.sum().item()
                slots[-1].append([p.grad for p in working.parameters()])
                working.zero_grad()
        sums = [
            sum_gradients(case, [[each[n] for each in of_rank] for of_rank in slots]) for n in range(len(slots[0][0]))
        ]
        for high, gradient in zip(masters.parameters(), sums, strict=True):
            high.grad = gradient
        if case.clip is not None:
            norms.append(nn.utils.clip_grad_norm_(masters.parameters(), case.clip).item())
        optimizer.step()
        losses.append(total / len(batch[1]))
    return TrainingResult(losses, norms, {name: p.detach().clone() for name, p in masters.named_parameters()})


def sum_gradients(case, slots):
    """The gradient of a parameter, summed as transports do: over microbatches in the slot, then in rank order."""
    if slots[0][0] is None:
        return None
    dtype = DTYPES[case.precision if case.reduce_dtype == "keep" else case.reduce_dtype]
    if case.zero >= 2 and len(slots) > 1:  # reduced after each backward
        return add_in_order(
            [add_in_order([of_rank[part].to(dtype) for of_rank in slots]) for part in range(case.microbatches)]
        ).float()
    return add_in_order([add_in_order([part.to(dtype) for part in of_rank]) for of_rank in slots]).float()


def add_in_order(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def make_step(case: Case, size: int, comm: Any = None) -> Any:
    """The case's step, of a model in float32: over `comm` (ranks are threads), or over the ranks of the environment."""
    model, loss, optimizer = cases.model(case.model).float(), cases.loss(case), _optimizer(case)
    if comm is None:
        return parallelize(model, loss, optimizer, case.plan(size), clip=case.clip)
    return TrainStep(model, loss, optimizer, plan=case.plan(size), communicator=comm, clip=case.clip)


def batch_of_rank(step, batch):
    inputs, targets = local_batch(batch, step.plan.dp, step.dp_index)
    return inputs.double() if step.model.head.weight.dtype == torch.float64 else inputs.float(), targets


def train_steps(step, case, first=0):
    metrics = [step(batch_of_rank(step, batch)) for batch in batches(case)[first:]]
    norms = [m.grad_norm for m in metrics if m.grad_norm is not None]
    return TrainingResult([m.loss for m in metrics], norms, step.state_dict()["model"])


def train_on_threads(case, size):
    return threads.run(size, lambda comm: train_steps(make_step(case, size, comm), case))


def equal_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
