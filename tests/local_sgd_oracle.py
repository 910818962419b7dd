"""The oracle of local steps: all workers in one process, in plain torch, and an outer optimizer of torch's own."""

import copy

import torch

from fourfold.step.loss_sum import sum_loss
from fourfold.step.model_call import call_model
from fourfold.testing.oracle import TrainingResult
from tests.cases import Case, batches, local_batch, loss, model, optimizer


def train(case: Case, size: int) -> TrainingResult:
    """What a training with local steps must leave after a meeting."""
    together = model(case.model)
    momentum = {"momentum": case.outer_momentum, "nesterov": True} if case.outer_momentum else {}
    outer = torch.optim.SGD(together.parameters(), lr=case.outer_lr, **momentum)
    workers = [copy.deepcopy(together) for _ in range(size)]
    inner = [optimizer(case)(worker.parameters()) for worker in workers]
    counts, losses, norms = [0.0] * size, [], []
    for number, batch in enumerate(batches(case), 1):
        told = [
            _worker_step(case, w, i, local_batch(batch, size, k))
            for k, (w, i) in enumerate(zip(workers, inner, strict=True))
        ]
        counts = [count + here for count, (_, here, _) in zip(counts, told, strict=True)]
        losses.append(sum(total for total, _, _ in told) / sum(here for _, here, _ in told))
        if case.clip is not None:
            norms.append((sum(norm**2 for _, _, norm in told) / size) ** 0.5)
        if number % case.local_steps == 0:
            for anchor, *theirs in zip(together.parameters(), *(w.parameters() for w in workers), strict=True):
                mean = sum(p.detach() * (count / sum(counts)) for p, count in zip(theirs, counts, strict=True))
                anchor.grad = anchor.detach() - mean if anchor.requires_grad else None
            outer.step()
            for worker in workers:
                worker.load_state_dict(together.state_dict())
            counts = [0.0] * size
    return TrainingResult(losses, norms, {name: p.detach().clone() for name, p in together.named_parameters()})


def _worker_step(
    case: Case, worker: torch.nn.Module, inner: torch.optim.Optimizer, batch
) -> tuple[float, float, float]:
    """One step of a worker: its loss as a sum and a count, and the norm of its gradient."""
    trained = [p for p in worker.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p)
    inputs, targets = batch
    total = count = 0.0
    if len(targets):
        value = sum_loss(loss(case)(call_model(worker, inputs), targets), len(targets))
        total, count = value.total.item(), float(value.count)
        if count:
            (value.total / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, case.clip).item() if case.clip is not None else 0.0
    inner.step()
    return total, count, norm
