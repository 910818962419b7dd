"""BERT as one rank of a tensor axis or of a context axis holds it: the model whose memory `context_memory` counts.

num_shards  the ranks among which weights are split, and with them heads, inner sizes and vocabulary; 1 = not split
split       whether these ranks split the tokens too, where a layer's weights are whole
Law: autograd keeps the same tensors here as on the ranks of a real job. Collectives are left out, except one that
makes a tensor (the gathered logits): the others change values but no sizes.

Post-norm, tied output weight, a loss on every position (Devlin et al., 2019; split as Megatron does, Shoeybi et al.,
2019). Dropout keeps one byte an element, as it does on GPUs; on CPUs torch's own keeps a float.

B batch · L sequence on this rank · D width · H heads on this rank · K head size · V vocabulary on this rank
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DROPOUT = 0.1
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Losses = Callable[[Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """BERT-base, with the vocabulary padded so that 12 ranks can split it."""

    width: int = 768
    heads: int = 12
    layers: int = 12
    vocabulary: int = 30528
    positions: int = 512


def dropout(x: Tensor) -> Tensor:
    return torch.native_dropout(x, DROPOUT, True)[0]


def math_attention(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor) -> Tensor:
    """Attention with its rows in memory: backward keeps the weights, the weights after dropout, and the mask."""
    scores = q_BHLK @ k_BHLK.transpose(-1, -2) * q_BHLK.shape[-1] ** -0.5
    return dropout(F.softmax(scores, -1)) @ v_BHLK


def flash_attention(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor) -> Tensor:
    """Flash attention: backward keeps the output and one log-sum-exp per row. Its dropout is redrawn, not kept."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BHLK, k_BHLK, v_BHLK)[0]


class Block(nn.Module):
    """A layer; `attend` is called with this rank's heads and tokens."""

    def __init__(self, shape: Shape, num_shards: int, attend: Attend, *, split: bool) -> None:
        super().__init__()
        width, inner = shape.width, 4 * shape.width // num_shards
        self.num_shards = num_shards if split else 1
        self.head_size, self.attend = width // shape.heads, attend
        self.qkv, self.out = nn.Linear(width, 3 * width // num_shards), nn.Linear(width // num_shards, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        qkv = self._column_linear(x_BLD, self.qkv)
        batch, length, _ = qkv.shape
        q_BHLK, k_BHLK, v_BHLK = qkv.view(batch, length, 3, -1, self.head_size).permute(2, 0, 3, 1, 4).unbind()
        attended = self.attend(q_BHLK, k_BHLK, v_BHLK).transpose(1, 2).reshape(batch, length, -1)
        x_BLD = self.norm1(x_BLD + dropout(self._reduce_scatter(self.out(attended))))
        inner = F.gelu(self._column_linear(x_BLD, self.up))
        return self.norm2(x_BLD + dropout(self._reduce_scatter(self.down(inner))))

    def _column_linear(self, x_BLD: Tensor, layer: nn.Linear) -> Tensor:
        return (
            layer(x_BLD)
            if self.num_shards == 1
            else _SplitLinear.apply(x_BLD, layer.weight, layer.bias, self.num_shards)
        )

    def _reduce_scatter(self, x_BLD: Tensor) -> Tensor:
        return x_BLD if self.num_shards == 1 else _ReduceScatterTokens.apply(x_BLD, self.num_shards)


class Bert(nn.Module):
    """Tokens [B, L] and their positions to logits [B, L, V]."""

    def __init__(
        self, shape: Shape, *, num_shards: int = 1, split: bool = False, attend: Attend = math_attention
    ) -> None:
        """`split`: between the split layers each rank has 1/num_shards of the tokens, as in Megatron."""
        super().__init__()
        self.num_shards = num_shards if split else 1
        self.token = nn.Embedding(shape.vocabulary // num_shards, shape.width)
        self.position = nn.Embedding(shape.positions, shape.width)
        self.norm = nn.LayerNorm(shape.width)
        self.blocks = nn.ModuleList(Block(shape, num_shards, attend, split=split) for _ in range(shape.layers))
        self.transform, self.transform_norm = nn.Linear(shape.width, shape.width), nn.LayerNorm(shape.width)
        self.bias = nn.Parameter(torch.zeros(shape.vocabulary // num_shards))

    def forward(self, ids_BL: Tensor, positions_BL: Tensor) -> Tensor:
        x_BLD = dropout(self.norm(self.token(ids_BL) + self.position(positions_BL)))
        for block in self.blocks:
            x_BLD = block(x_BLD)
        hidden_BLD = self.transform_norm(F.gelu(self.transform(x_BLD)))
        if self.num_shards > 1:
            return _SplitLinear.apply(hidden_BLD, self.token.weight, self.bias, self.num_shards)
        return F.linear(hidden_BLD, self.token.weight, self.bias)


class _InPlaceCrossEntropy(torch.autograd.Function):
    """Megatron's vocabulary-parallel cross-entropy: softmax and its gradient overwrite the logits."""

    @staticmethod
    def forward(ctx: Any, logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
        logits_BLV = logits_BLV.detach()
        logits_BLV.sub_(logits_BLV.amax(-1, keepdim=True))
        target_BL1 = logits_BLV.gather(-1, targets_BL[..., None])
        total_BL1 = logits_BLV.exp_().sum(-1, keepdim=True)
        logits_BLV.div_(total_BL1)
        ctx.save_for_backward(logits_BLV, targets_BL)
        return (total_BL1.log() - target_BL1)[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_BL,) = gradients
        softmax_BLV, targets_BL = ctx.saved_tensors
        softmax_BLV.scatter_add_(-1, targets_BL[..., None], -torch.ones_like(gradient_BL)[..., None])
        return softmax_BLV.mul_(gradient_BL[..., None]), None


class _SplitLinear(torch.autograd.Function):
    """A column-split layer on split tokens: all-gathers them in forward and again in backward, then reduce-scatters.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), §4.2.
    """

    @staticmethod
    def forward(ctx: Any, x_BlD: Tensor, weight: Tensor, bias: Tensor, num_shards: int) -> Tensor:
        ctx.save_for_backward(x_BlD, weight)
        ctx.num_shards = num_shards
        return F.linear(_gather_tokens(x_BlD, num_shards), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_BlD, weight = ctx.saved_tensors
        (gradient_BLE,) = gradients
        rows = gradient_BLE.flatten(0, 1)
        gradient_BlD = _local_tokens(gradient_BLE @ weight, ctx.num_shards)
        return gradient_BlD, rows.T @ _gather_tokens(x_BlD, ctx.num_shards).flatten(0, 1), rows.sum(0), None


class _ReduceScatterTokens(torch.autograd.Function):
    """Reduce-scatter: partial sums of all tokens to the sums of this rank's tokens; backward all-gathers."""

    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, num_shards: int) -> Tensor:
        ctx.num_shards = num_shards
        return _local_tokens(x_BLD, num_shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather_tokens(gradients[0], ctx.num_shards), None


def _gather_tokens(x_BlD: Tensor, num_shards: int) -> Tensor:
    batch, length, width = x_BlD.shape
    return x_BlD.new_empty(batch, num_shards * length, width)


def _local_tokens(x_BLD: Tensor, num_shards: int) -> Tensor:
    batch, length, width = x_BLD.shape
    return x_BLD.new_empty(batch, length // num_shards, width)


class _GatherLogits(torch.autograd.Function):
    """All-gather of the logits; backward takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, num_shards: int) -> Tensor:
        ctx.local_size = logits_NV.shape[-1]
        return logits_NV.new_empty(len(logits_NV), num_shards * ctx.local_size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][:, : ctx.local_size], None


def losses(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """torch's own cross-entropy: it keeps the log-softmax, and its backward makes two more tensors of that size."""
    return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="none")


def in_place_losses(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Cross-entropy that holds no more than the logits; with a split vocabulary, this rank's part of them."""
    return _InPlaceCrossEntropy.apply(logits_BLV, targets_BL)


def gathered_losses(num_shards: int) -> Losses:
    """torch's own cross-entropy on the logits of all ranks."""

    def compute(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
        return losses(_GatherLogits.apply(logits_BLV.flatten(0, 1), num_shards)[None], targets_BL)

    return compute
