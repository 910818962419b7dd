"""Cross entropy of classes, with one copy of the logits kept for backward.

kept        the probabilities, in the logits' dtype; backward needs no more, and makes the gradient in their place
wide        float64 for float64 logits, else float32: what probabilities, sums and losses are computed in
surprisal   -log of the target's probability
block       rows that fit into a processor's cache: all operations on them are done before the next rows are read
Law: losses and gradients are those of `torch.nn.functional.cross_entropy(reduction="none")`. Where the classes are
split over ranks, each rank has the gradient of its own logits, and needs no other rank's.

N rows · V classes
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fourfold.comm.tensor_group import TensorGroup
from fourfold.torch_kit.torch_private import are_transforms_active, is_graph_kept
from fourfold.words.errors import Problem, TaskError

IGNORE_INDEX = -100  # torch's default
# In elements. On other devices blocks only bound the memory of wide copies: each operation starts a kernel.
CPU_BLOCK, DEVICE_BLOCK = 1 << 18, 1 << 25
# Probabilities are kept times this: those below 6e-8 would be 0 in float16, and 16384 is well below its largest number.
FLOAT16_SCALE = 2.0**14


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORE_INDEX, label_smoothing: float = 0.0
) -> Tensor:
    """The cross entropy of every target, in nats, without reduction; 0 where the target is `ignore_index`.

    logits           [..., V], of any floating-point dtype: the classes are the last dim
    targets          [...], integers from 0 to V - 1, or `ignore_index`
    label_smoothing  the part of each target that is spread over all classes, from 0 to 1 (arXiv 1512.00567)
    Returns losses [...] in float32, or in float64 for float64 logits: sums over a batch overflow half precision.

    As `torch.nn.functional.cross_entropy(reduction="none")`, with less memory: one tensor of the logits' size and dtype
    is kept for backward, which turns it into their gradient. It can be differentiated once. Raises TaskError for
    shapes or dtypes that do not fit, and on a CPU for targets that are not classes.
    """
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if torch.compiler.is_compiling():  # the compiler makes one kernel of torch's operations
        return _by_torch(logits, targets, **options)
    if has_torch_function((logits, targets)):  # modes and tensor classes see it as they see torch's losses
        return handle_torch_function(cross_entropy, (logits, targets), logits, targets, **options)
    vocabulary = Vocabulary(None, 0, logits.shape[-1] if logits.dim() else 0)
    _check_arguments(logits, targets, vocabulary, label_smoothing)
    if are_transforms_active():
        return _by_torch(logits, targets, **options)
    return _compute(logits, targets, vocabulary, **options)


class Vocabulary(NamedTuple):
    """Which classes the logits of this rank are of."""

    group: TensorGroup | None
    """The ranks that hold those of all classes between them; None: this one holds all."""
    start: int
    """The first class here."""
    num_classes: int
    """Of all ranks."""


def split_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`cross_entropy` of logits whose classes are split over ranks; the losses are the same on all. Collective.

    logits   [..., classes of this rank], which may be none
    targets  [...], the same on all ranks: numbers of classes of the whole vocabulary
    The ranks exchange three numbers per target, and with label smoothing a fourth.
    """
    if vocabulary.group is not None:
        vocabulary.group.meet("the cross entropy of logits that are split by vocabulary")
    _check_arguments(logits, targets, vocabulary, label_smoothing)
    return _compute(logits, targets, vocabulary, ignore_index=ignore_index, label_smoothing=label_smoothing)


def _compute(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, *, ignore_index: int, label_smoothing: float
) -> Tensor:
    flat_N = targets.reshape(-1).long()
    is_ignored_N = flat_N == ignore_index
    _check_targets(flat_N, is_ignored_N, vocabulary.num_classes)
    classes = Classes(flat_N.masked_fill(is_ignored_N, 0), is_ignored_N)
    logits_NV = logits.reshape(len(flat_N), logits.shape[-1])
    # `[:0].clone()` leads to the logits in the graph, and keeps none of their memory.
    losses_N = _CrossEntropy.apply(logits_NV, logits_NV[:0].clone(), classes, label_smoothing, vocabulary)
    return losses_N.view(targets.shape)


class Classes(NamedTuple):
    """The targets, [N]."""

    indices: Tensor
    """0 where the target is ignored."""
    is_ignored: Tensor


def _by_torch(logits: Tensor, targets: Tensor, *, ignore_index: int, label_smoothing: float) -> Tensor:
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(_wide(logits.dtype)),
        targets.reshape(-1).long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    return losses.view(targets.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_arguments(logits: Tensor, targets: Tensor, vocabulary: Vocabulary, label_smoothing: float) -> None:
    """Raise TaskError for shapes and dtypes that do not fit."""
    shape, problems = (*logits.shape[:-1], vocabulary.num_classes) if logits.dim() else (), list[Problem]()
    if not logits.is_floating_point():
        problems.append(Problem(f"logits of {logits.dtype}", "floating-point numbers"))
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        attempt = "torch.nn.functional.cross_entropy for targets that are probabilities"
        problems.append(Problem(f"targets of {targets.dtype}", "integers, the numbers of classes", attempt))
    if not shape or shape[-1] == 0 or shape[:-1] != targets.shape:
        got = f"logits {list(shape)} and targets {list(targets.shape)}"
        attempt = "" if len(shape) < 2 or len(shape) != targets.dim() + 1 else "logits.movedim(1, -1)"
        problems.append(Problem(got, "logits [..., V], with one class or more, and targets [...]", attempt))
    if not 0 <= label_smoothing <= 1:
        problems.append(Problem(f"label_smoothing = {label_smoothing}", "a fraction from 0 to 1"))
    if problems:
        raise TaskError(problems, where="the arguments of cross_entropy()")


def _check_targets(flat_N: Tensor, is_ignored_N: Tensor, num_classes: int) -> None:
    """Raise TaskError for a target that is no class; on other devices, where reading waits, they assert it."""
    if flat_N.device.type != "cpu":
        flat_N.new_zeros(1).expand(num_classes)[flat_N.masked_fill(is_ignored_N, 0)]
        return
    is_wrong_N = ((flat_N < 0) | (flat_N >= num_classes)) & ~is_ignored_N
    if is_wrong_N.any():
        wrong = flat_N[is_wrong_N]
        values = f"{wrong.min()}" if wrong.min() == wrong.max() else f"{wrong.min()} to {wrong.max()}"
        got = f"{len(wrong)} of {len(flat_N)} targets that are not classes: {values}"
        attempt = "ignore_index=… for targets that do not count"
        raise TaskError(Problem(got, f"0 to {num_classes - 1}", attempt), where="the targets of cross_entropy()")


class _CrossEntropy(torch.autograd.Function):
    """Logits [N, V] -> losses [N]."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, origin_0V: Tensor, classes: Classes, smoothing: float, vocabulary: Vocabulary
    ) -> Tensor:
        kept_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        rows = _softmax(logits_NV, kept_NV, needs_sums=smoothing > 0)
        place = _Place.of(classes.indices, logits_NV, vocabulary.start)
        target_N = place.read(logits_NV).to(rows.maxima.dtype)
        local = _Sums(rows.maxima, -rows.peaks.log(), target_N, rows.sums if smoothing else None)
        whole, share_N = local, torch.ones_like(rows.maxima)
        if vocabulary.group is not None:
            whole, share_N = _exchange(local, rows.peaks, vocabulary.group)
            _clear_empty_rows(kept_NV, rows.maxima)
        losses_N = surprisal_N = whole.maxima - whole.targets + whole.log_powers
        if whole.logits is not None:
            everywhere_N = whole.maxima - whole.logits / vocabulary.num_classes + whole.log_powers
            losses_N = torch.lerp(surprisal_N, everywhere_N, smoothing)
        ctx.save_for_backward(
            kept_NV, surprisal_N, share_N, place.columns, place.is_here, classes.is_ignored, origin_0V
        )
        ctx.smoothing, ctx.num_classes = smoothing, vocabulary.num_classes
        return losses_N.masked_fill(classes.is_ignored, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        kept_NV, surprisal_N, share_N, columns_N, is_here_N, is_ignored_N, origin_0V = ctx.saved_tensors
        with torch.no_grad():
            if is_graph_kept():  # there may be another backward
                kept_NV = kept_NV.clone()
            grad_N = grads[0].masked_fill(is_ignored_N, 0)
            smoothed_N = grad_N * (ctx.smoothing / ctx.num_classes)
            # Not from the kept numbers: of a probability near 1, half precision has not enough digits for p - 1.
            at_target_N = grad_N * (torch.expm1(-surprisal_N) + ctx.smoothing) - smoothed_N
            _make_gradient(kept_NV, grad_N * share_N, smoothed_N if ctx.smoothing else None)
            grad_NV = _Place(columns_N, is_here_N).write(kept_NV, at_target_N)
        if torch.is_grad_enabled():
            grad_NV = _Once.apply(grad_NV, grads[0], origin_0V)
        return grad_NV, None, None, None, None


class _Sums(NamedTuple):
    """Of each row, [N], wide: over the classes of this rank, or of all."""

    maxima: Tensor
    log_powers: Tensor
    """log(sum(exp(logit - maximum)))."""
    targets: Tensor
    """The target's logit; 0 where it is not here."""
    logits: Tensor | None
    """The sum of the logits; None: it is not needed."""


def _exchange(local: _Sums, peaks_N: Tensor, group: TensorGroup) -> tuple[_Sums, Tensor]:
    """The sums over all classes, and the part of all probabilities that this rank's classes have. Collective."""
    maxima_N = group.all_reduce_max(local.maxima.clone())
    # A rank without a finite logit in a row has no part of it.
    powers_N = ((local.maxima - maxima_N).exp() / peaks_N).masked_fill(local.maxima == -torch.inf, 0)
    addends = [powers_N, local.targets] + ([] if local.logits is None else [local.logits])
    powers, targets, *logits = group.all_reduce(torch.stack(addends))
    return _Sums(maxima_N, powers.log(), targets, logits[0] if logits else None), powers_N / powers


def _clear_empty_rows(kept_NV: Tensor | None, maxima_N: Tensor) -> None:
    """Of rows without a finite logit here, the softmax is NaN; other ranks may have finite ones."""
    is_empty_N = maxima_N == -torch.inf
    if kept_NV is not None and (kept_NV.device.type != "cpu" or bool(is_empty_N.any())):
        kept_NV.masked_fill_(is_empty_N[:, None], 0)


class _Place(NamedTuple):
    """Where the targets' logits are, [N]."""

    columns: Tensor
    """0 where the target is not here."""
    is_here: Tensor

    @classmethod
    def of(cls, indices_N: Tensor, logits_NV: Tensor, start: int) -> Self:
        is_here_N = (indices_N >= start) & (indices_N < start + logits_NV.shape[1])
        return cls((indices_N - start).masked_fill(~is_here_N, 0), is_here_N)

    def read(self, logits_NV: Tensor) -> Tensor:
        """The targets' logits; 0 where they are not here."""
        if not logits_NV.shape[1]:
            return logits_NV.new_zeros(len(logits_NV))
        return logits_NV.gather(1, self.columns[:, None])[:, 0].masked_fill(~self.is_here, 0)

    def write(self, grad_NV: Tensor, values_N: Tensor) -> Tensor:
        """Set the elements of the targets that are here."""
        if not grad_NV.shape[1]:
            return grad_NV
        # Not `scatter_`: in half precision it copies the whole tensor on a CPU.
        elements = torch.arange(len(grad_NV), device=grad_NV.device), self.columns
        grad_NV[elements] = values_N.to(grad_NV.dtype).where(self.is_here, grad_NV[elements])
        return grad_NV


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated, though it depends on `origins`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *origins: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        got, attempt = "a second derivative of cross_entropy()", "torch.nn.functional.cross_entropy"
        raise TaskError(Problem(got, "a loss that can be differentiated twice", attempt))


def _make_gradient(kept_NV: Tensor, factor_N: Tensor, smoothed_N: Tensor | None) -> None:
    """Turn kept probabilities into the gradient of the logits, but for those of the targets."""
    factor_N = factor_N / _scale(kept_NV.dtype)
    blocks = list(_blocks(kept_NV))
    scratch_NV = None if kept_NV.dtype == factor_N.dtype else _scratch(kept_NV, blocks)
    for rows in blocks:
        block_NV = kept_NV[rows]
        grad_NV = block_NV if scratch_NV is None else scratch_NV[: len(block_NV)].copy_(block_NV)
        grad_NV.mul_(factor_N[rows, None])
        if smoothed_N is not None:
            grad_NV.sub_(smoothed_N[rows, None])
        if scratch_NV is not None:
            block_NV.copy_(grad_NV)


class _Rows(NamedTuple):
    """Of each row of the logits, [N], wide."""

    maxima: Tensor
    """The largest logit."""
    peaks: Tensor
    """The largest probability: log(sum(exp(logits))) = maximum - log(peak)."""
    sums: Tensor
    """The sum of the logits, where it is needed; else 0."""


def _softmax(logits_NV: Tensor, kept_NV: Tensor | None, *, needs_sums: bool) -> _Rows:
    """Write the probabilities, times the scale of their dtype, into `kept_NV`, if it is given."""
    dtype = _wide(logits_NV.dtype)
    found = _Rows(*logits_NV.new_zeros((3, len(logits_NV)), dtype=dtype))
    if not logits_NV.shape[1]:
        return found._replace(maxima=found.maxima.fill_(-torch.inf), peaks=found.peaks.fill_(1))
    blocks = list(_blocks(logits_NV))
    wide_NV = None if logits_NV.dtype == dtype else _scratch(logits_NV, blocks)
    scratch_NV = _scratch(logits_NV, blocks) if kept_NV is None or wide_NV is not None else None
    for rows in blocks:
        num_rows = rows.stop - rows.start
        block_NV = logits_NV[rows] if wide_NV is None else wide_NV[:num_rows].copy_(logits_NV[rows])
        out_NV = cast(Tensor, kept_NV)[rows] if scratch_NV is None else scratch_NV[:num_rows]
        torch.softmax(block_NV, -1, out=out_NV)
        torch.amax(block_NV, -1, out=found.maxima[rows])
        torch.amax(out_NV, -1, out=found.peaks[rows])
        if needs_sums:
            torch.sum(block_NV, -1, out=found.sums[rows])
        if kept_NV is not None and scratch_NV is not None:
            scale = _scale(kept_NV.dtype)
            kept_NV[rows] = out_NV if scale == 1 else out_NV.mul_(scale)
    return found


def _scratch(like_NV: Tensor, blocks: Sequence[slice]) -> Tensor:
    """Room for a block, wide. Made once: new memory for every block costs more than the work on it."""
    num_rows = blocks[0].stop if blocks else 0
    return like_NV.new_empty((num_rows, like_NV.shape[1]), dtype=_wide(like_NV.dtype))


def _scale(dtype: torch.dtype) -> float:
    return FLOAT16_SCALE if dtype == torch.float16 else 1.0


def _blocks(tensor_NV: Tensor) -> Iterator[slice]:
    num_elements = CPU_BLOCK if tensor_NV.device.type == "cpu" else DEVICE_BLOCK
    num_rows, size = len(tensor_NV), max(1, num_elements // max(1, tensor_NV.shape[1]))
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))
