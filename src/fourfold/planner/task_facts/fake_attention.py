"""Fake attention: scaled_dot_product_attention on the meta device, as the kernels of a run compute it.

fused   scores are not kept: queries, keys, values, outputs and a number for each row are
Law: what autograd keeps of a call is what torch's fused kernels, or those of the context axis, keep of it.

Context ranks run the attention of a step, with fake peers. With dropout and one context rank, torch computes the call
on a CPU by its products, and so does this.
"""

from typing import Any

import torch
from torch import Tensor

from fourfold.axes.context.rules.layout import ContextSpec
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.context_group import ContextGroup
from fourfold.axes.context.work.dropout import AttentionDropout
from fourfold.model.sdpa_interception import AttentionCall, intercept_attention
from fourfold.planner.predict.facts import Collective, OperationKind
from fourfold.planner.task_facts.fake_ranks import MAX_HOPS, FakeChannel
from fourfold.planner.task_facts.operations import Kernel, KernelRecorder
from fourfold.torch_kit.recompute import kept
from fourfold.words.layout import Change, collective_sent_bytes


class FakeAttention:
    """Handles the calls of a forward. `recorder`: None where kernels are not counted."""

    def __init__(self, spec: ContextSpec, recorder: KernelRecorder | None = None) -> None:
        self._spec, self._recorder = spec, recorder
        sizes = spec.size // spec.ulysses, spec.ulysses
        ring, heads = (FakeChannel(size, size - 1, max_hops=MAX_HOPS) for size in sizes)
        self._group = ContextGroup(ring, heads, spec.ring)
        """Seen from the last rank, which has the most work of a causal ring in plain order."""

    def __call__(self, call: AttentionCall) -> Tensor:
        if self._recorder is not None:
            return self._recorded(call, self._recorder)
        if self._spec.size == 1:
            return call.run_sdpa() if call.dropout_p else _fused(call)
        dropout = AttentionDropout(call.dropout_p) if call.dropout_p else None
        options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale, "enable_gqa": call.enable_gqa}
        with intercept_attention(_fused):  # of ranks that have all tokens of some heads
            return context_attention(call.q, call.k, call.v, self._group, mask=call.mask, dropout=dropout, **options)

    def _recorded(self, call: AttentionCall, recorder: KernelRecorder) -> Tensor:
        """One kernel, unless torch computes the call by its products."""
        if call.dropout_p and self._spec.size == 1:
            return call.run_sdpa()
        num_scores = call.q.shape[:-1].numel() * call.k.shape[-2] * self._spec.size
        flops = 2.0 * num_scores * (call.q.shape[-1] + call.v.shape[-1]) / (2 if call.is_causal else 1)
        moved = sum(tensor.nbytes for tensor in (call.q, call.k, call.v)) + call.q.nbytes
        recorder.add(Kernel("attention", OperationKind.ATTENTION, flops, float(moved)))
        return _fused(call)


def _fused(call: AttentionCall) -> Tensor:
    return _Fused.apply(call.q, call.k, call.v)  # pyright: ignore[reportReturnType]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, rows = kept(lambda: _results(q, v))
        ctx.save_for_backward(q, k, v, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the sum of each row's exponentials."""
    # Heads of one token lie next to each other, as torch's kernels leave them: merging them copies nothing.
    out = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1])).transpose(-2, -3)
    return out, q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def attention_collectives(call: AttentionCall, spec: ContextSpec, num_samples: int) -> list[Collective]:
    """What context ranks send each other for a call, for one of its samples.

    A ring sends keys and values as often as an all-gather of them does: once in forward; in backward again, and their
    gradients. An exchange of heads moves queries, keys, values and outputs once in each direction.
    """
    keys_values = (call.k.nbytes + call.v.nbytes) / num_samples
    exchanged = keys_values + 2 * call.q.nbytes / num_samples
    ring_length = spec.size // spec.ulysses
    sent = {
        Change.ALL_GATHER: ((ring_length - 1) * keys_values, 1, 2),
        Change.ALL_TO_ALL: (exchanged * (spec.ulysses - 1) / spec.ulysses, 1, 1),
    }
    return [
        Collective("cp", change, _whole_bytes(change, num_bytes, spec.size), forward, backward, recompute=1)
        for change, (num_bytes, forward, backward) in sent.items()
        if num_bytes
    ]


def _whole_bytes(change: Change, sent_bytes: float, size: int) -> float:
    """The whole tensor for which each of `size` ranks sends so many bytes."""
    return sent_bytes / collective_sent_bytes(change, whole_bytes=1, size=size)
