"""Descent: the gradients applied by a plan that compresses or rounds them in transit.

descent  plain gradient descent in float64, whose change of the weights is what was applied
Law: with what error feedback holds back, it is one device's gradient at the same weights; without error feedback it
differs by what the rounding does to one device.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fourfold.analysis.comparison import FACTOR, GRADIENT, LOSS, TOLERANCE, Comparison, VerifyResult
from fourfold.analysis.one_device import OneDevice, buffers_by_kind, mesh_state
from fourfold.analysis.trial import Batches, Training, loss_tensor, run_on_mesh
from fourfold.parts.codec.residual import RESIDUAL_KEY
from fourfold.plan.plan import Plan
from fourfold.plan.sample_order import shard_range
from fourfold.step.batch import num_samples, slice_samples

DESCENT_RATE = 2.0**-10  # small enough to train on, and a power of two: the difference of weights is divided by it


def compare_descent(training: Training, batches: Batches, result: VerifyResult) -> bool:
    """Compare what each step applies with the gradient at the weights before it. Returns whether this is rank 0."""
    plan, training = training.plan, training.by_descent(DESCENT_RATE)
    cast = training.cast
    result.bound = _descent_bound(plan, cast)
    result.notes.append(
        f"by plain gradient descent at rate {DESCENT_RATE:.0e}: for the optimizer, verify with {_uncompressed(plan)}"
    )
    comparison = Comparison(result, compute_eps=0.0 if cast is None else torch.finfo(cast).eps)
    step = training.on_mesh()
    one, parts = (training.on_one_device(), training.on_one_device()) if step.rank == 0 else (None, None)
    before, first_count = step.state_dict(), 0.0
    for number, (local, whole) in enumerate(batches(step.optimizer, False), 1):
        loss = run_on_mesh(training, step, local)
        after = step.state_dict()
        state = mesh_state(step, after)
        if one is not None and parts is not None:
            one.load_weights(before["model"])
            want = {LOSS: loss_tensor(one.backward([whole])), GRADIENT: one.gradients(), **buffers_by_kind(one.model)}
            first_count = first_count or float(one.count)
            applied = _applied(before, after, one, factor=first_count / float(one.count))
            got = {LOSS: loss_tensor(loss), GRADIENT: applied, **state}
            rounded = None
            if cast is not None:
                parts.load_weights(before["model"])
                errors = _rounding_errors(parts, one.count, _pieces(whole, plan), cast)
                rounded = {**want, GRADIENT: {name: grad + errors[name] for name, grad in one.gradients().items()}}
            comparison.add(number, got, want, rounded)
        before = after
    result.randomness += [] if one is None else one.randomness
    return one is not None


def _uncompressed(plan: Plan) -> str:
    return 'codec = "none"' if plan.codec != "none" else 'reduce_dtype = "keep"'


def _descent_bound(plan: Plan, cast: torch.dtype | None) -> str:
    if cast is None:
        return (
            f"{TOLERANCE:.0e} · max(1, |b|), in float64: what the ranks apply, and what error feedback holds back, add "
            "up to the gradient of one device at the same weights"
        )
    name = str(cast).removeprefix("torch.")
    parts = plan.dp * plan.microbatches
    return (
        f"{FACTOR:.0f} times what {name} does to one device, by tensor: the root mean square of the difference between "
        f"a sum in {name} of the gradients of {parts} parts of the batch, and their sum in float64"
    )


def _applied(
    before: Mapping[str, Any], after: Mapping[str, Any], one: OneDevice, *, factor: float
) -> dict[str, Tensor]:
    """The gradient that a step has applied, and the change of what error feedback holds back, by name.

    factor: the first step's count of the loss, by which what is held back was divided, over this step's
    """
    found = {}
    for name in one.gradients():
        applied = (before["model"][name] - after["model"][name]) / DESCENT_RATE
        held = after["codec"].get(name, {}).get(RESIDUAL_KEY)
        if held is not None:
            earlier = before["codec"].get(name, {}).get(RESIDUAL_KEY, torch.zeros_like(held))
            applied = applied + ((held - earlier).sum(0) * factor).view(applied.shape)
        found[name] = applied
    return found


def _pieces(whole: Any, plan: Plan) -> Iterator[Any]:
    """The parts of a global batch whose gradients are summed."""
    for rank in range(plan.dp):
        own = slice_samples(whole, *shard_range(0, num_samples(whole), plan.dp, rank))
        for index in range(plan.microbatches):
            yield slice_samples(own, *shard_range(0, num_samples(own), plan.microbatches, index))


def _rounding_errors(one: OneDevice, count: Any, pieces: Iterator[Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """What is lost where the gradients of the pieces are rounded and summed in a dtype."""
    exact = {name: torch.zeros_like(grad) for name, grad in one.gradients().items()}
    sums = {name: total.to(dtype) for name, total in exact.items()}
    for piece in pieces:
        if num_samples(piece):
            one.optimizer.zero_grad()
            with one.computing():
                (one.loss_sum(piece).total / count).backward()
            for name, gradient in one.gradients().items():
                exact[name] += gradient
                sums[name] += gradient.to(dtype)
    return {name: sums[name].to(total.dtype) - total for name, total in exact.items()}
