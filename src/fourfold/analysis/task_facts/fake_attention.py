"""Fake attention: scaled_dot_product_attention on the meta device, as the kernels of a run compute it.

fused   scores are not kept: queries, keys, values, outputs and a number for each row are
Law: what autograd keeps of a call is what torch's fused kernels, or those of the sequence axis, keep of it.

With dropout and one sequence rank, torch computes the call on a CPU by its products, and so does this.
"""

from typing import Any

import torch
from torch import Tensor

from fourfold.analysis.task_facts.operations import Kernel, KernelRecorder
from fourfold.parts.recompute import kept
from fourfold.plan.predict.facts import Collective, OperationKind
from fourfold.plan.sequence import SequenceSpec
from fourfold.step.sequence.sdpa_interception import AttentionCall
from fourfold.words.layout import Change, collective_sent_bytes


class FakeAttention:
    """Handles the calls of a forward. `recorder`: None where kernels are not counted."""

    def __init__(self, spec: SequenceSpec, recorder: KernelRecorder | None = None) -> None:
        self._spec, self._recorder = spec, recorder

    def __call__(self, call: AttentionCall) -> Tensor:
        if call.dropout_p and self._spec.size == 1:
            return call.run_sdpa()
        size = self._spec.size
        num_scores = call.q.shape[:-1].numel() * call.k.shape[-2] * size
        if self._recorder is not None:
            flops = 2.0 * num_scores * (call.q.shape[-1] + call.v.shape[-1]) / (2 if call.is_causal else 1)
            moved = sum(tensor.nbytes for tensor in (call.q, call.k, call.v)) + call.q.nbytes
            self._recorder.add(Kernel("attention", OperationKind.ATTENTION, flops, float(moved)))
        keeps_scores = size > self._spec.ulysses and self._spec.ring == "rsa"
        return _Fused.apply(call.q, call.k, call.v, num_scores if keeps_scores else 0)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, num_kept_scores: int) -> Tensor:
        out, *rows = kept(lambda: _results(q, v, num_kept_scores))
        ctx.save_for_backward(q, k, v, out, *rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _results(q: Tensor, v: Tensor, num_kept_scores: int) -> tuple[Tensor, ...]:
    """The output, and the sum of each row's exponentials; scores where they are kept."""
    # Heads of one token lie next to each other, as torch's kernels leave them: merging them copies nothing.
    out = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1])).transpose(-2, -3)
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = q.new_empty(q.shape[:-1], dtype=dtype)
    return (out, rows, q.new_empty(num_kept_scores, dtype=dtype)) if num_kept_scores else (out, rows)


def attention_collectives(call: AttentionCall, spec: SequenceSpec, num_samples: int) -> list[Collective]:
    """What sequence ranks send each other for a call, for one of its samples.

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
        Collective("sp", change, _whole_bytes(change, num_bytes, spec.size), forward, backward, recompute=1)
        for change, (num_bytes, forward, backward) in sent.items()
        if num_bytes
    ]


def _whole_bytes(change: Change, sent_bytes: float, size: int) -> float:
    """The whole tensor for which each of `size` ranks sends so many bytes."""
    return sent_bytes / collective_sent_bytes(change, whole_bytes=1, size=size)
