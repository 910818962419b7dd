"""Batch normalization over ranks: statistics of what all ranks have, and their gradient.

N samples of all ranks · C channels · n elements of a channel, on this rank or on all
moments   of a channel: n, the mean, and the sum of squared differences from the mean
place     where ranks exchange a row: a norm of the model, and forward, backward or the end of one of them
Law: outputs, gradients and running statistics are those of one device that has all ranks' inputs. All ranks have the
same running statistics, bit for bit. A rank without samples adds nothing, and takes part in every exchange.

Two passes over the values of a rank, first for its mean (torch's own kernel); then the moments of the ranks are merged
in float64, all at once, by the updating formula of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances" (1979). Sums of squares, whose difference cancels in float32, are never formed.
The gradient: Ioffe and Szegedy, "Batch Normalization" (2015), §3, where the sums over a batch are sums over ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.comm.channel import Channel
from fourfold.plan.batch_norm import HEADER_LENGTH
from fourfold.words.errors import DivergenceError, Problem

FORWARD, BACKWARD, FORWARD_END, BACKWARD_END, NUM_KINDS = range(5)
END_NAMES = {FORWARD_END: "the end of forward", BACKWARD_END: "the end of backward"}


class Moments(NamedTuple):
    """The number of values n, the mean [C] and the sum of squared differences from it [C], in float64."""

    num_values: float
    mean: Tensor
    squares: Tensor

    @property
    def variance(self) -> Tensor:
        return self.squares / self.num_values


class StatisticsExchange:
    """What the ranks tell each other in a pass over the model: rows, each with its place in front."""

    def __init__(self, rows: Channel, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._names: Sequence[str] = ()
        self.has_samples = True
        """Whether this rank has samples in this pass: else it adds nothing."""
        self.count = 0.0
        """How many values each channel of the last norm had, on all ranks."""

    def begin(self, names: Sequence[str]) -> None:
        """Begin a pass. `names`: of the model's norms; the same on every rank."""
        self._names = names

    def end(self, kind: int) -> None:
        """End a pass on all ranks: raises DivergenceError if a rank normalizes once more."""
        self.all_gather(kind, 0, 0.0, ())

    def all_gather(self, kind: int, norm: int, count: float, values: Sequence[Tensor]) -> list[tuple[float, Tensor]]:
        """By rank: its count, and its values in float64, concatenated. Raises DivergenceError. Waits."""
        header = torch.tensor([float(kind + NUM_KINDS * norm), count], dtype=torch.float64, device=self._device)
        rows = self._rows.all_gather_rows(torch.cat([header, *(value.double().reshape(-1) for value in values)]))
        headers = torch.stack([row[:HEADER_LENGTH] for row in rows]).tolist()
        places = [int(place) for place, _ in headers]
        if len(set(places)) > 1:
            raise DivergenceError(self._problem(places), where="the batch normalization of the ranks")
        return [(count, row[HEADER_LENGTH:]) for (_, count), row in zip(headers, rows, strict=True)]

    def _problem(self, places: Sequence[int]) -> Problem:
        first = next(index for index, place in enumerate(places) if place != places[0])
        shown = (f"rank {self._rows.ranks[index]} is at {self._format_place(places[index])}" for index in (first, 0))
        need = "the same batch normalizations, in the same order, on every rank"
        return Problem(", ".join(shown), need, "a forward that takes the same path on every rank, or frozen statistics")

    def _format_place(self, place: int) -> str:
        norm, kind = divmod(place, NUM_KINDS)
        return END_NAMES.get(kind) or f"the {'forward' if kind == FORWARD else 'backward'} of {self._names[norm]}"


class NormCall(NamedTuple):
    """One call of batch normalization in training mode. `norm` is its number among the model's norms."""

    exchange: StatisticsExchange
    norm: int
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    eps: float


def sync_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: NormCall) -> Tensor:
    """x [n, C, …] on each rank -> the same shape, normalized by the statistics of all ranks. Updates the running ones.

    Raises ValueError, on every rank, for one value per channel on all of them together, as torch does.
    """
    # An operation on the parameters themselves: where weights rest split, it brings them together.
    views = [None if p is None else p.view_as(p) for p in (weight, bias)]
    y, _, _ = _SyncBatchNorm.apply(x, *views, call)  # type: ignore[misc]
    return y


class _SyncBatchNorm(torch.autograd.Function):
    """-> (y, mean [C], variance [C]); only y has a gradient."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: NormCall) -> tuple[Tensor, ...]:
        exchange, dtype = call.exchange, _statistics_dtype(x)
        local = local_moments(x, has_samples=exchange.has_samples)
        rows = exchange.all_gather(FORWARD, call.norm, local.num_values, local[1:])
        moments = merge([Moments(count, *values.chunk(2)) for count, values in rows])
        exchange.count = moments.num_values
        if moments.num_values == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
        mean, variance = torch.zeros_like(moments.mean), torch.ones_like(moments.mean)
        if moments.num_values:
            mean, variance = moments.mean, moments.variance
            _update_running(call, moments)
        mean, variance = mean.to(dtype), variance.to(dtype)
        return _normalize(x, mean, variance, weight, bias, call.eps), mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, call = inputs
        _, mean, variance = output
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        ctx.count, ctx.has_samples = max(call.exchange.count, 1.0), call.exchange.has_samples

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad: Tensor | None = grad_outputs[0]
        if grad is None:  # the loss does not depend on y
            return None, None, None, None
        grads = _differentiable_grads if torch.is_grad_enabled() else _grads
        grad_x, grad_weight, grad_bias = grads(ctx, grad, *ctx.saved_tensors)
        _, weight_needed, bias_needed, _ = ctx.needs_input_grad
        return grad_x, grad_weight if weight_needed else None, grad_bias if bias_needed else None, None


def _grads(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of x, weight and bias; those of weight and bias are this rank's parts."""
    dtype, eps, grad_x = mean.dtype, ctx.call.eps, None
    dot, total = _grad_sums(grad, x, mean, variance, eps)
    if ctx.needs_input_grad[0]:
        mean_dot, mean_grad = (_sum_over_ranks(ctx, torch.cat([dot, total]).double()) / ctx.count).chunk(2)
        scale = torch.rsqrt(variance.double() + eps)
        scale = scale if weight is None else scale * weight.double()
        grad_x = _affine(grad.to(dtype), scale.to(dtype), (-scale * mean_grad).to(dtype))
        grad_x.sub_(_normalize(x.to(dtype), mean, variance, (scale * mean_dot).to(dtype), None, eps))
        grad_x = grad_x.to(x.dtype)
    return grad_x, dot if weight is None else dot.to(weight.dtype), total.to(ctx.bias_dtype)


def _differentiable_grads(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, as a function of x, weight and grad that can be differentiated: mean and variance are of x."""
    wide, wide_grad, dims = x.to(mean.dtype), grad.to(mean.dtype), [0, *range(2, x.dim())]

    def over_ranks(values: Tensor) -> Tensor:
        return _SumOverRanks.apply(values.sum(dims), ctx).view(shape)  # type: ignore[no-any-return]

    shape = [1, -1, *[1] * (x.dim() - 2)]
    centered = wide - over_ranks(wide) / ctx.count
    inverse = torch.rsqrt(over_ranks(centered.square()) / ctx.count + ctx.call.eps)
    normalized = centered * inverse
    weighted = wide_grad * normalized
    grad_x = wide_grad - over_ranks(wide_grad) / ctx.count - normalized * over_ranks(weighted) / ctx.count
    scale = inverse if weight is None else inverse * weight.to(mean.dtype).view(shape)
    dot = weighted.sum(dims)
    grad_bias = wide_grad.sum(dims).to(ctx.bias_dtype)
    return (scale * grad_x).to(x.dtype), dot if weight is None else dot.to(weight.dtype), grad_bias


def _sum_over_ranks(ctx: Any, values: Tensor) -> Tensor:
    """The sum of the ranks' values [n]; a rank without samples adds zeros, whatever its values are."""
    added = values if ctx.has_samples else torch.zeros_like(values)
    rows = ctx.call.exchange.all_gather(BACKWARD, ctx.call.norm, 0.0, [added])
    return torch.stack([row for _, row in rows]).sum(0).to(values.dtype)


class _SumOverRanks(torch.autograd.Function):
    """Its own transpose: what one rank adds, every rank's loss depends on."""

    @staticmethod
    def forward(values: Tensor, ctx_of_norm: Any) -> Tensor:
        return _sum_over_ranks(ctx_of_norm, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.of_norm = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, None]:
        return _SumOverRanks.apply(grad_outputs[0], ctx.of_norm), None


# ---- moments --------------------------------------------------------------------------------------------


def local_moments(x: Tensor, *, has_samples: bool = True) -> Moments:
    """The moments of this rank's values; none if it has no samples."""
    num_channels, dtype = x.shape[1], _statistics_dtype(x)
    zeros = torch.zeros(num_channels, dtype=dtype, device=x.device)
    if not has_samples or not x.numel():
        return Moments(0.0, zeros.double(), zeros.double())
    # Statistics in float32 of two-byte values need running statistics in float32.
    mean, variance = torch.batch_norm_update_stats(x, zeros.clone(), torch.ones_like(zeros), 0.0)
    count = x.numel() // num_channels
    return Moments(float(count), mean.double(), variance.double() * count)


def merge(parts: Sequence[Moments]) -> Moments:
    """The moments of all parts together."""
    counts = torch.tensor([part.num_values for part in parts], dtype=torch.float64, device=parts[0].mean.device)
    means, squares = torch.stack([part.mean for part in parts]), torch.stack([part.squares for part in parts])
    total = sum(part.num_values for part in parts)
    mean = (counts[:, None] * means).sum(0) / max(total, 1.0)
    return Moments(total, mean, (squares + counts[:, None] * (means - mean).square()).sum(0))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _update_running(call: NormCall, moments: Moments) -> None:
    unbiased = moments.squares / (moments.num_values - 1)
    for running, new in ((call.running_mean, moments.mean), (call.running_var, unbiased)):
        if running is not None:
            running.copy_((1 - call.momentum) * running.double() + call.momentum * new)


# ---- kernels --------------------------------------------------------------------------------------------


def _normalize(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias, in one pass."""
    if not x.numel():
        return torch.empty_like(x)
    weight, bias = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x · weight + bias, in one pass."""
    return _normalize(x, torch.zeros_like(weight), torch.ones_like(weight), weight, bias, 0.0)


def _grad_sums(grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """This rank's sums of grad · normalized x and of grad, by channel."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    sums = [False, True, True]  # the kernel's own gradient of x is slower on CPUs than all of the rest
    _, dot, total = torch.ops.aten.native_batch_norm_backward(
        grad, x, None, mean, variance, None, None, False, eps, sums
    )
    return dot, total
