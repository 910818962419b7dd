"""The oracle: the same training in one process, in plain torch. Slow and obvious, and every mesh must equal it.

So are the codec runs of all ranks in one process, one message after the other, without a network.

Law: |a − b| ≤ 1e-9 · max(1, |b|) in float64. What a transport makes of a bucket's messages is what `simulate_reduce`
makes of them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.comm.codec.protocol import Codec, Message
from fourfold.model.loss_sum import sum_loss
from fourfold.model.model_call import call_model
from fourfold.plan.codec import Combine
from fourfold.step.train_step import TrainStep

# ---- a training ------------------------------------------------------------------------------------------------------


TOLERANCE = 1e-9


class TrainingResult(NamedTuple):
    """The result of a training: a loss per step, with clipping a gradient norm per step, and the weights by name."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


def train(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batches: Sequence[Any],
    *,
    clip: float | None = None,
) -> TrainingResult:
    """One update per global batch: the mean over all its elements, clipped by the global norm."""
    model.train()
    update = optimizer(model.parameters())
    losses, norms = [], []
    for inputs, targets in batches:
        samples = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
        value = sum_loss(loss(call_model(model, inputs), targets), samples)
        mean = value.total / value.count
        update.zero_grad()
        mean.backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        update.step()
        losses.append(mean.item())
    return TrainingResult(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def deviation(got: TrainingResult, oracle: TrainingResult) -> float:
    """The largest |a − b| / max(1, |b|) over all numbers; infinite if something is missing or not finite."""
    if got.weights.keys() != oracle.weights.keys() or len(got.losses) != len(oracle.losses):
        return float("inf")
    pairs: list[tuple[Any, Any]] = [(got.losses, oracle.losses), (got.grad_norms, oracle.grad_norms)]
    pairs += [(got.weights[name], weight) for name, weight in oracle.weights.items()]
    return max(_relative_error(a, b) for a, b in pairs)


def _relative_error(a: Any, b: Any) -> float:
    a, b = (torch.as_tensor(value).cpu() for value in (a, b))
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    error = ((a - b).abs() / b.abs().clamp(min=1.0)).max().item()
    return error if math.isfinite(error) else float("inf")


def snapshot(step: TrainStep, losses: Sequence[float], grad_norms: Sequence[float | None]) -> TrainingResult:
    """The result of a training with Fourfold, in the oracle's form. Collective."""
    held, trained = dict(step.model.named_parameters()), dict(step.named_weights())
    frozen_shards = [n for n, shard in step.tensor_shards.items() if not shard.is_whole and n in held.keys() - trained]
    weights: dict[str, Tensor] = {**held, **trained}
    if frozen_shards:  # their whole tensors are in the state only
        whole = step.state_dict()["model"]
        weights |= {name: whole[name] for name in frozen_shards}
    norms = [norm for norm in grad_norms if norm is not None]
    return TrainingResult(list(losses), norms, {name: p.detach().clone() for name, p in weights.items()})


# ---- codecs ----------------------------------------------------------------------------------------------------------


def simulate_reduce(codecs: Sequence[Codec], flats: Sequence[Tensor]) -> list[Message]:
    """Reduce the ranks' addends [length] of one bucket in place, adding in rank order; returns rank 0's messages."""
    runs = [codec.reduce(flat) for codec, flat in zip(codecs, flats, strict=True)]
    messages = [next(run) for run in runs]
    sent = []
    while True:
        first = messages[0]
        assert all((each.combine, len(each.payload)) == (first.combine, len(first.payload)) for each in messages)
        sent.append(Message(first.payload.clone(), first.combine))
        payloads = [each.payload.clone() for each in messages]
        if first.combine is Combine.SUM:
            for payload in payloads[1:]:
                payloads[0] += payload
            payloads = payloads[:1]
        messages = []
        for run in runs:
            try:
                messages.append(run.send(payloads))
            except StopIteration:
                continue
        if not messages:
            return sent
