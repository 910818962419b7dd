"""The oracle of local SGD: all workers in one process, in plain torch, with a torch optimizer as outer optimizer."""

import copy

import torch

from fourfold.model.loss_sum import sum_loss
from fourfold.model.model_call import call_model
from fourfold.testing.oracle import TrainingResult
from tests.cases import Case, batches, local_batch, loss, model, optimizer


def train(case: Case, size: int) -> TrainingResult:
    """The result of local SGD after the weights are averaged."""
    shared_model = model(case.model)
    momentum = {"momentum": case.outer_momentum, "nesterov": True} if case.outer_momentum else {}
    outer = torch.optim.SGD(shared_model.parameters(), lr=case.outer_lr, **momentum)
    workers = [copy.deepcopy(shared_model) for _ in range(size)]
    inner = [optimizer(case)(worker.parameters()) for worker in workers]
    counts, losses, norms = [0.0] * size, [], []
    for step, batch in enumerate(batches(case), 1):
        results = [
            _worker_step(case, w, i, local_batch(batch, size, k))
            for k, (w, i) in enumerate(zip(workers, inner, strict=True))
        ]
        counts = [total + count for total, (_, count, _) in zip(counts, results, strict=True)]
        losses.append(sum(total for total, _, _ in results) / sum(count for _, count, _ in results))
        if case.clip is not None:
            norms.append((sum(norm**2 for _, _, norm in results) / size) ** 0.5)
        if step % case.local_steps == 0:
            for reference, *of_workers in zip(
                shared_model.parameters(), *(w.parameters() for w in workers), strict=True
            ):
                mean = sum(p.detach() * (count / sum(counts)) for p, count in zip(of_workers, counts, strict=True))
                reference.grad = reference.detach() - mean if reference.requires_grad else None
            outer.step()
            for worker in workers:
                worker.load_state_dict(shared_model.state_dict())
            counts = [0.0] * size
    return TrainingResult(losses, norms, {name: p.detach().clone() for name, p in shared_model.named_parameters()})


def _worker_step(
    case: Case, worker: torch.nn.Module, inner: torch.optim.Optimizer, batch
) -> tuple[float, float, float]:
    """One step of a worker; returns the sum and count of its loss, and its gradient norm."""
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
