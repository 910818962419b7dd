"""The oracle of mixed precision: ranks with rounded copies, in one process, in plain torch; and what is compared."""

from typing import Any

import torch
from torch import nn

from fourfold.plan.order import share
from fourfold.run.build import TrainStep, parallelize
from fourfold.testing import threads
from fourfold.testing.oracle import Trained
from tests import training
from tests.training import Case, batches, local

CASE = Case(precision="bf16", batch_sizes=(12, 12, 12, 12), bucket_bytes=1000, optimizer="SGD")
# torch's fused kernels round the last elements of a tensor otherwise than the others: which those are depends on where
# a parameter lies.
HOW = {"foreach": True}
LAYER_WISE = ("LARS", "LAMB")  # which have no such kernels
# Where weights rest split, and are gathered: not among the threads of one host, unless they meet in a group.
LEVELS: dict[int, dict[str, Any]] = {
    zero: {"zero": zero, "transport": "gloo" if zero == 3 else "by-host"} for zero in range(4)
}
NUMBERS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _optimizer(case: Case) -> Any:
    return training.optimizer(case, **({} if case.optimizer in LAYER_WISE else HOW))


def by_hand(case: Case, size: int = 1) -> Trained:
    """What `size` ranks ought to do, in one process: rounded copies compute, torch.optim updates float32 weights."""
    masters, working = training.model(case.model).float(), training.model(case.model).to(NUMBERS[case.precision])
    optimizer, loss = _optimizer(case)(masters.parameters()), training.loss(case)
    losses, norms = [], []
    for batch in batches(case):
        with torch.no_grad():
            for low, high in zip(working.parameters(), masters.parameters(), strict=True):
                low.copy_(high)
        total, slots = 0.0, []
        for rank in range(size):
            inputs, targets = local(batch, size, rank)
            slots.append([])
            for part in range(case.microbatches):
                some = slice(*share(0, len(targets), case.microbatches, part))
                values = loss(working(inputs[some].to(NUMBERS[case.precision])).float(), targets[some])
                (values.sum() / len(batch[1])).backward()
                total += values.sum().item()
                slots[-1].append([p.grad for p in working.parameters()])
                working.zero_grad()
        sums = [summed(case, [[each[n] for each in mine] for mine in slots]) for n in range(len(slots[0][0]))]
        for high, gradient in zip(masters.parameters(), sums, strict=True):
            high.grad = gradient
        if case.clip is not None:
            norms.append(nn.utils.clip_grad_norm_(masters.parameters(), case.clip).item())
        optimizer.step()
        losses.append(total / len(batch[1]))
    return Trained(losses, norms, {name: p.detach().clone() for name, p in masters.named_parameters()})


def summed(case, slots):
    """The gradient of a parameter from those of each rank and microbatch: in slots and in rank order."""
    if slots[0][0] is None:
        return None
    number = NUMBERS[case.precision if case.reduce == "keep" else case.reduce]
    if case.zero >= 2 and len(slots) > 1:  # a round of sums after each backward
        return add([add([mine[part].to(number) for mine in slots]) for part in range(case.microbatches)]).float()
    return add([add([part.to(number) for part in mine]) for mine in slots]).float()


def add(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def make(case: Case, size: int, ranks: Any = None) -> Any:
    """The case's step, of a model in float32: on the ranks given (threads), or on those of the environment."""
    model, loss, optimizer = training.model(case.model).float(), training.loss(case), _optimizer(case)
    if ranks is None:
        return parallelize(model, loss, optimizer, case.plan(size), clip=case.clip)
    return TrainStep(model, loss, optimizer, plan=case.plan(size), ranks=ranks, clip=case.clip)


def own(step, batch):
    inputs, targets = local(batch, step.plan.dp, step.data_index)
    return inputs.double() if step.model.head.weight.dtype == torch.float64 else inputs.float(), targets


def go(step, case, first=0):
    metrics = [step(own(step, batch)) for batch in batches(case)[first:]]
    norms = [m.grad_norm for m in metrics if m.grad_norm is not None]
    return Trained([m.loss for m in metrics], norms, step.state_dict()["model"])


def run(case, size):
    return threads.run(size, lambda ranks: go(make(case, size, ranks), case))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
