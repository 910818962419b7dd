"""Split region: the layers between a tensor that all tensor ranks hold and the sum of what they make of it.

enter    the whole tensor, at the entry of a region: its gradients on the ranks are addends, and are summed in backward
leave    the ranks' partial outputs, at the end of a region: they are summed in forward
partial  a weight that all ranks hold and that works on split activations: its gradients are addends too
column   output features are split; in backward the gradient of the input is summed while that of the weight is computed
row      input features are split; in forward the product is computed where the other ranks read it, and summed; where
         sums travel, chunk by chunk
tokens   the second-last dim of a tensor; a rank's are one range of it, the last ranks' are fewer, or none
rows     the part of a tensor that has this rank's tokens, with sequence parallelism (`rules/sequence_parallel.py`)
whole    the tensor with all tokens
Law: outside of regions all ranks compute the same, bit for bit; a tensor is entered once, however many layers use it.
Values and gradients of a layer are those of `F.linear`, with the sums of the region.
Law: collectives are padded to equal ranges, so ranks call the same; what they return is not padded.

R rows · N out features · F in features, of which the split ones are those here

Sources: Megatron-LM (arXiv 1909.08053), where `enter` is f and `leave` is g; the overlap in backward is that of its
`LinearWithGradAccumulationAndAsyncCommunication`; its sequence parallelism (Korthikanti et al., arXiv 2205.05198),
where `SplitTokens` and `EnterTokens` end in g-bar, and a whole input of column layers is gathered again in backward.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from fourfold.comm.tensor_group import TensorGroup
from fourfold.plan.param_spec import TensorShard
from fourfold.torch_kit.deferred_grads import deferral_of
from fourfold.torch_kit.mixed_precision import autocast_device
from fourfold.torch_kit.recompute import is_keeping, kept
from fourfold.torch_kit.torch_private import Node, is_in_backward, version_of, writable_result
from fourfold.words.errors import Problem, TaskError

# ---- token collectives ---------------------------------------------------------------------------------------------


class TokenCount:
    """How many tokens the whole hidden tensor has in the forward, or the backward, that runs now; None: in neither.

    Rows do not tell it. Backward sets it too: the second forward of a checkpoint asks for it.
    """

    def __init__(self) -> None:
        self.value: int | None = None

    def end(self) -> None:
        """The end of a forward."""
        self.value = None

    def resume(self, rows: Tensor, group: TensorGroup) -> None:
        """Where a checkpoint runs the end of a forward for the second time: the ranks count their rows. Collective.

        A reentrant one does so before anything of this forward's graph has run, and other forwards may have had
        other lengths.
        """
        if self.value is None and is_in_backward():
            own = torch.tensor([rows.shape[-2]], device=rows.device)
            self.value = int(group.all_gather(own, 0).sum())


def token_range(length: int, group: TensorGroup) -> tuple[int, int]:
    """The tokens [start, stop) of this rank."""
    ((start, stop, _, _),) = TensorShard.even((length,), 0, group.index, group.size).pieces
    return start, stop


def own_rows(whole: Tensor, group: TensorGroup) -> Tensor:
    """This rank's tokens: a copy, so that the whole tensor can be freed."""
    start, stop = token_range(whole.shape[-2], group)
    return whole[..., start:stop, :].clone(memory_format=torch.contiguous_format)


def gather_rows(rows: Tensor, length: int, group: TensorGroup) -> Tensor:
    """All `length` tokens, of the ranks' rows."""
    padded = _pad_tokens(rows.detach(), -(-length // group.size))
    whole = group.all_gather(padded, padded.ndim - 2)
    return whole[..., :length, :].contiguous()


def add_rows(addend: Tensor, group: TensorGroup) -> Tensor:
    """This rank's tokens of the sum of the ranks' tensors."""
    start, stop = token_range(addend.shape[-2], group)
    padded = _pad_tokens(addend.detach(), -(-addend.shape[-2] // group.size) * group.size)
    total = group.reduce_scatter(padded, padded.ndim - 2)
    return total[..., : stop - start, :].contiguous()


def _pad_tokens(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[-2]
    return F.pad(tensor, (0, 0, 0, missing)) if missing else tensor


class SplitTokens(torch.autograd.Function):
    """Whole tensor -> rows. The ranks' gradients are parts of the gradient: they are gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, count: TokenCount, group: TensorGroup) -> Tensor:
        count.value = ctx.length = whole.shape[-2]
        ctx.count, ctx.group = count, group
        return own_rows(whole, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.count.value = None
        return gather_rows(grads[0], ctx.length, ctx.group), None, None


class GatherTokens(torch.autograd.Function):
    """Rows -> whole tensor, for what all ranks compute alike: each has the whole gradient, and takes its tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: TokenCount, group: TensorGroup) -> Tensor:
        assert count.value is not None
        ctx.count, ctx.group, ctx.length = count, group, count.value
        return gather_rows(rows, count.value, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.count.value = ctx.length
        return own_rows(grads[0], ctx.group), None, None


class GatheredTokens:
    """A whole tensor that is not kept for backward: there it is gathered again, once for all layers that read it."""

    def __init__(self, length: int, group: TensorGroup) -> None:
        self._length, self._group = length, group
        self._whole: Tensor | None = None

    def gather_again(self, rows: Tensor) -> Tensor:
        """The whole tensor, of its rows."""
        if self._whole is None:
            self._whole = gather_rows(rows, self._length, self._group)
        return self._whole

    def free(self) -> None:
        """Forget it: no layer reads it any more."""
        self._whole = None


class EnterTokens(torch.autograd.Function):
    """Rows -> the whole tensor for split layers: their gradients are addends, of which each rank takes its tokens.

    whole  of the same rows, without a graph
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, whole: Tensor, source: GatheredTokens, count: TokenCount, group: Any) -> Tensor:
        ctx.source, ctx.count, ctx.group, ctx.length = source, count, group, whole.shape[-2]
        return whole.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        ctx.count.value = ctx.length
        ctx.source.free()
        return add_rows(grads[0], ctx.group), None, None, None, None


class LeaveTokens(torch.autograd.Function):
    """Partial whole tensor -> rows of the sum over ranks. The ranks' gradients are parts of the sum's."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, count: TokenCount, group: TensorGroup) -> Tensor:
        ctx.count, ctx.group, ctx.length = count, group, addend.shape[-2]
        (rows,) = kept(lambda: (add_rows(addend, group),))
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.count.value = ctx.length
        return gather_rows(grads[0], ctx.length, ctx.group), None, None


class LinearOfTokens(torch.autograd.Function):
    """`F.linear` of a whole input that keeps its rows only.

    rows    of the input, without a graph
    source  gathers the input again
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, source: GatheredTokens
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.source, ctx.autocast = source, _autocast_options(input)
        return writable_result(F.linear(input, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        needs_input, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad, grad_NF = grads[0], grads[0].flatten(0, -2)
        grad_weight = None
        with torch.autocast(**ctx.autocast):
            if needs_weight:
                grad_weight = grad_NF.t() @ ctx.source.gather_again(rows).flatten(0, -2)
            grad_input = grad @ weight if needs_input else None
        return grad_input, None, grad_weight, grad_NF.sum(0) if needs_bias else None, None


# ---- products ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class InputUses:
    """How split layers use a tensor that is entered.

    count      how often they do
    is_summed  whether the gradient that flows back now has been summed by the layer
    """

    count: int = 0
    is_summed: bool = False


class ColumnProduct(torch.autograd.Function):
    """`F.linear` of a tensor that is entered. The only layer that uses it sums its gradient."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, uses: InputUses, group: TensorGroup
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.uses, ctx.group, ctx.autocast = uses, group, _autocast_options(input)
        ctx.deferral = deferral_of(weight, input)
        return writable_result(F.linear(input, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        input, weight = ctx.saved_tensors  # a checkpoint computes them again here, with sums of its own
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad, finish, grad_input = grads[0], None, None
        with torch.autocast(**ctx.autocast):
            if needs_input:
                grad_input = grad @ weight
                if ctx.uses.count == 1:
                    finish, ctx.uses.is_summed = ctx.group.all_reduce_async(grad_input), True
            grad_weight = _weight_gradient(ctx, grad, input) if needs_weight else None
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return finish() if finish else grad_input, grad_weight, grad_bias, None, None


class RowProduct(torch.autograd.Function):
    """input [..., F], weight [N, F] -> [..., N] on all ranks."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, group: TensorGroup) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.is_region_end = True  # see `split_region.origins`
        ctx.autocast, ctx.deferral = _autocast_options(input), deferral_of(weight, input)
        casts = ctx.autocast["enabled"] or input.dtype != weight.dtype or input.ndim < 2
        (total,) = kept(lambda: (_summed_product(input, weight, group, casts=casts),))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        (input, weight), grad = ctx.saved_tensors, grads[0]
        needs_input, needs_weight, _ = ctx.needs_input_grad
        with torch.autocast(**ctx.autocast):
            grad_weight = _weight_gradient(ctx, grad, input) if needs_weight else None
            return grad @ weight if needs_input else None, grad_weight, None


def _weight_gradient(ctx: Any, grad: Tensor, input: Tensor) -> Tensor | None:
    """None if it is deferred."""
    if ctx.deferral and ctx.deferral.takes(grad, input):
        return None
    return grad.flatten(0, -2).t() @ input.flatten(0, -2)


def _summed_product(input: Tensor, weight: Tensor, group: TensorGroup, *, casts: bool) -> Tensor:
    """The sum of the ranks' `F.linear`. `casts`: it casts, or raises its own error."""
    if casts:
        return group.all_reduce(F.linear(input, weight))
    product = group.buffer((*input.shape[:-1], weight.shape[0]), input.dtype)
    input_RF, product_RN = input.flatten(0, -2), product.view(-1, weight.shape[0])
    num_chunks = group.num_chunks(product.nbytes)
    if num_chunks == 1:
        torch.mm(input_RF, weight.t(), out=product_RN)
        return group.all_reduce(product)
    _add_by_chunks(input_RF, weight, product_RN, group, num_chunks)
    return product


def _add_by_chunks(input_RF: Tensor, weight_NF: Tensor, out_RN: Tensor, group: TensorGroup, num_chunks: int) -> None:
    """The ranks' sum of the products. The sum of a chunk of rows travels while the next chunk is computed."""
    finish = None
    for input, out in zip(input_RF.chunk(num_chunks), out_RN.chunk(num_chunks), strict=True):
        torch.mm(input, weight_NF.t(), out=out)
        if finish:
            finish()
        finish = group.all_reduce_async(out)
    if finish:
        finish()


def _autocast_options(input: Tensor) -> dict[str, Any]:
    """The autocast of forward, for backward."""
    device = autocast_device(input)
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return {"device_type": device, "enabled": enabled, "dtype": dtype}


# ---- split region --------------------------------------------------------------------------------------------------


class Entered(NamedTuple):
    """What a tensor was entered as.

    version  of the tensor then
    tensor   the same values, with gradients that are summed
    uses     by split layers; None: no gradients are summed here
    rows     of a tensor that was gathered: what it was gathered from, without a graph, and what gathers it again
    """

    version: int
    tensor: Tensor
    uses: InputUses | None = None
    rows: Tensor | None = None
    source: GatheredTokens | None = None


class SplitRegion:
    """The regions of one rank's model."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self._entered = WeakTensorKeyDictionary()
        """By tensor: what it was entered as. This holds no reference to the tensor."""
        self._count = TokenCount()

    @contextlib.contextmanager
    def with_group(self, group: TensorGroup) -> Iterator[None]:
        """Within, another group of the same ranks does the sums."""
        before, self.group = self.group, group
        try:
            yield
        finally:
            self.group = before

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitRegion":
        return self  # a copied model computes with the same ranks

    def enter(self, tensor: Tensor) -> Tensor:
        """The same values; in backward the ranks' gradients of it are summed, once for all layers that use it."""
        entered = self._enter(tensor)
        if entered.uses is not None:
            entered.uses.count += 1
        return entered.tensor

    def _enter(self, tensor: Tensor) -> Entered:
        if not torch.is_grad_enabled():
            return Entered(0, tensor)
        known: Entered | None = self._entered.get(tensor)
        if known is not None and known.version == version_of(tensor):  # else it has been changed in place since
            return known
        if not tensor.requires_grad:
            return Entered(0, tensor)
        uses = InputUses()
        entered = Entered(version_of(tensor), _SumGrad.apply(tensor, self.group, uses), uses)
        self._entered[tensor] = entered
        return entered

    def linear(self, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` of a tensor that is entered. Of one that was gathered, backward keeps this rank's rows only."""
        entered = self._enter(tensor)
        if entered.uses is not None:
            entered.uses.count += 1
            return ColumnProduct.apply(entered.tensor, weight, bias, entered.uses, self.group)
        if entered.source is None:
            return F.linear(entered.tensor, weight, bias)
        return LinearOfTokens.apply(entered.tensor, entered.rows, weight, bias, entered.source)

    def row_product(self, tensor: Tensor, weight: Tensor) -> Tensor:
        """The sum of the ranks' `F.linear`, on all of them."""
        return RowProduct.apply(tensor, weight, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on all of them; `partial` may be overwritten."""
        return _Sum.apply(partial, self.group)

    def split_tokens(self, whole: Tensor, *, where: str) -> Tensor:
        """This rank's rows of a tensor that all ranks hold: where a pass through the blocks begins.

        Raises TaskError if it has no tokens. `where`: the module that begins.
        """
        _check_dims(whole, where)
        return SplitTokens.apply(whole, self._count, self.group)

    def gather_tokens(self, rows: Tensor, *, where: str) -> Tensor:
        """The whole tensor, on all ranks. Split layers enter it as it is. `where`: the module that needs it.

        Raises TaskError if these are no rows of the tensor that was split.
        """
        count, group = self._count, self.group
        _check_dims(rows, where)
        count.resume(rows, group)
        _check_rows(rows, count.value, group, where)
        whole = GatherTokens.apply(rows, count, group)
        if torch.is_grad_enabled():
            source = GatheredTokens(whole.shape[-2], group)
            entered = whole.detach()
            if rows.requires_grad:
                entered = EnterTokens.apply(rows, entered, source, count, group)
            self._entered[whole] = Entered(version_of(whole), entered, rows=rows.detach(), source=source)
        return whole

    def begin_tokens(self, hidden: Tensor) -> None:
        """Where a pass begins with rows that another pipeline stage has made, of as many tokens as this tensor has."""
        self._count.value = hidden.shape[-2]

    def end_tokens(self) -> None:
        """Where a pass through the blocks ends, on this pipeline stage or altogether."""
        self._count.end()

    def leave_tokens(self, partial: Tensor) -> Tensor:
        """This rank's rows of the sum of the ranks' tensors."""
        return LeaveTokens.apply(partial, self._count, self.group)

    def partial(self, weight: Tensor) -> Tensor:
        """A weight that all ranks hold and that works on split activations: its gradients are summed."""
        return _SumGrad.apply(weight, self.group, InputUses())

    def partials(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """As `partial`, of several weights of one dtype, whose gradients are summed together."""
        return _SumGrads.apply(self.group, *weights)

    def partial_pieces(self, weight: Tensor, shard: TensorShard) -> Tensor:
        """A weight some of whose pieces several ranks hold: the gradients of each piece are summed over its ranks."""
        return _SumPieceGrads.apply(weight, self.group, shard)


def _check_dims(hidden: Tensor, where: str) -> None:
    if hidden.ndim < 2:
        got, need = f"{list(hidden.shape)} for {where}", "a hidden tensor [..., tokens, features]"
        raise TaskError(Problem(got, need, "sequence_parallel = false"), where="the tensor axis")


def _check_rows(rows: Tensor, length: int | None, group: TensorGroup, where: str) -> None:
    start, stop = (0, -1) if length is None else token_range(length, group)
    if rows.shape[-2] != stop - start:
        tokens = "none" if length is None else f"{stop - start} of {length}"
        got = f"{rows.shape[-2]} tokens for {where}, where this rank should have {tokens}"
        need = "the first block before the others, and between blocks only what works on each token independently"
        raise TaskError(Problem(got, need, "sequence_parallel = false"), where="the tensor axis")


def gather_last_dim(tensor: Tensor, group: TensorGroup, length: int) -> Tensor:
    """The ranks' slices of the last dim, one behind the other; the last ones may be shorter, `length` is of all."""
    return _Gather.apply(tensor, group, length)


def origins(tensor: Tensor) -> Iterator[Tensor | None]:
    """Where a tensor comes from outside of regions: the leaves of its graph; None for what is made inside of one.

    Nothing behind the end of a region is followed: there, all ranks have the same. The functions at both ends say
    `is_region_end`.
    """
    if tensor.grad_fn is None:
        yield tensor
        return
    pending: list[Node] = [tensor.grad_fn]
    seen = {None, tensor.grad_fn}
    while pending:
        node = pending.pop()
        is_end = getattr(node, "is_region_end", None)
        if is_end is False:
            yield None
        elif is_end is None and hasattr(node, "variable"):
            yield node.variable
        elif is_end is None:
            before = {each for each, _ in node.next_functions} - seen
            seen |= before
            pending += before


class _SumGrad(torch.autograd.Function):
    """The same values in forward; the sum over ranks in backward, unless the layer that uses them has made it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, uses: InputUses) -> Tensor:
        ctx.group, ctx.uses, ctx.is_region_end = group, uses, False
        # Not a view, which would keep its base alive; the version is shared, so autograd sees changes in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.uses.is_summed:
            ctx.uses.is_summed = False  # of this backward; the graph may be kept for another
            return grads[0], None, None
        addend = ctx.group.buffer(grads[0].shape, grads[0].dtype)
        return ctx.group.all_reduce(addend.copy_(grads[0])), None, None


class _SumGrads(torch.autograd.Function):
    """The same values in forward; in backward one sum over ranks for all gradients."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.is_region_end = group, False
        ctx.set_materialize_grads(False)  # a weight that no rank uses has no gradient
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        if not given:
            return None, *grads
        total = ctx.group.all_reduce(torch.cat([grad.reshape(-1) for grad in given]))
        sums = iter(total.split([grad.numel() for grad in given]))
        return None, *(None if grad is None else next(sums).view(grad.shape) for grad in grads)


class _Sum(torch.autograd.Function):
    """The sum over ranks in forward; the same gradient on each rank in backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: TensorGroup) -> Tensor:
        ctx.is_region_end = True
        if is_keeping():  # the product that made `partial` is kept too
            (total,) = kept(lambda: (group.all_reduce(partial.clone()),))
            return total
        total = group.all_reduce(partial)
        if total is partial:
            ctx.mark_dirty(partial)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """The whole last dim in forward; this rank's slice of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, length: int) -> Tensor:
        ctx.is_region_end, share = True, -(-length // group.size)
        ctx.start, ctx.length = group.index * share, tensor.shape[-1]
        padded = torch.nn.functional.pad(tensor, (0, share - ctx.length)) if ctx.length < share else tensor
        return writable_result(group.all_gather(padded, tensor.ndim - 1)[..., :length])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][..., ctx.start : ctx.start + ctx.length], None, None


class _SumPieceGrads(torch.autograd.Function):
    """The same values in forward; in backward, each replicated piece's gradient summed over the ranks that hold it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: TensorGroup, shard: TensorShard) -> Tensor:
        ctx.group, ctx.shard, ctx.is_region_end = group, shard, False
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        group, shard = ctx.group, ctx.shard
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        parts = grad.split([piece.length for piece in shard.pieces], shard.dim)
        shared = [(part, piece.num_replicas) for part, piece in zip(parts, shard.pieces, strict=True)]
        shared = [(part, sharing) for part, sharing in shared if sharing > 1]
        # Every rank adds its gradient at the place of its own piece: one sum over all ranks serves all pieces.
        places = [part.new_zeros((group.size // sharing, *part.shape)) for part, sharing in shared]
        for place, (part, sharing) in zip(places, shared, strict=True):
            place[group.index // sharing] = part
        total = group.all_reduce(torch.cat([place.reshape(-1) for place in places]))
        sums = total.split([place.numel() for place in places])
        for found, place, (part, sharing) in zip(sums, places, shared, strict=True):
            part.copy_(found.view(place.shape)[group.index // sharing])
        return grad, None, None
