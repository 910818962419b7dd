"""What the ranks of a spawned world do about recompute with dropout. Results are JSON."""

import functools
from typing import Any

import torch
from torch import Tensor

import fourfold as ff
from tests import cases
from tests.spawned.tensor_dropout import RULES, SEED, make_net, sdpa, token_batches, token_loss


def same_trainings(runs: list[dict[str, Any]]) -> list[dict[str, bool]]:
    """By run, for each way to recompute: whether losses, norms and weights of this rank are those without, by bits."""
    return [_same_training(**fields) for fields in runs]


def _same_training(**fields: Any) -> dict[str, bool]:
    kept = _train("none", **fields)
    return {each: _train(each, **fields) == kept for each in ("selective", "full")}


def _train(recompute: str, **fields: Any) -> tuple[list[float], list[float | None], dict[str, Any]]:
    torch.manual_seed(1)
    plan = ff.Plan(recompute=recompute, **fields)
    net, optimizer = make_net(sdpa), functools.partial(torch.optim.SGD, lr=0.1)
    step = ff.parallelize(net, token_loss, optimizer, plan, clip=1e9, seed=SEED, tensor=RULES if plan.tp > 1 else {})
    torch.manual_seed(2 + step.dp_index)
    metrics = [step(cases.local_batch(batch, plan.dp, step.dp_index)) for batch in token_batches()]
    weights: dict[str, Tensor] = dict(step.named_weights())
    return (
        [each.loss for each in metrics],
        [each.grad_norm for each in metrics],
        {n: w.tolist() for n, w in weights.items()},
    )
