"""Predict tasks: the GPT and the MLP of `bench/models.py` as tasks, which plans of every axis can train.

Law: the arithmetic is that of `bench/models.py`; positions are inputs, and heads lie together, as cp and tp need it.

    fourfold plan calibrate bench/predict_tasks.py:gpt -n 2
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fourfold as ff
from bench.models import CLASSES, GPT, LENGTH, MLP, VOCABULARY, Attention, losses

NUM_BATCHES = 4
HEAD_SIZE = 32
GPT_RULES = {
    "tokens": "vocabulary",
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
    "head": "vocabulary",
}
# Pairs of layers: what one has split, the next one sums.
MLP_RULES = {f"blocks.{index}.0": ("column", "row")[index % 2] for index in range(6)}


class ByHeadAttention(Attention):
    """The same attention; the fused layer has q, k and v of one head side by side, so slices of it are whole heads."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        q_BHLK, k_BHLK, v_BHLK = self.qkv(x_BLD).unflatten(-1, (-1, 3, HEAD_SIZE)).permute(3, 0, 2, 1, 4)
        out_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
        return self.out(out_BHLK.transpose(1, 2).flatten(2))


class PositionedGPT(GPT):
    """Tokens and positions [B, L] to logits [B, L, 256]."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, Attention):
                module.__class__ = ByHeadAttention

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        x_BLD = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))


class Texts:
    """Random bytes with their positions; the targets are the next bytes."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._text = torch.randint(0, VOCABULARY, (num_samples, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, index: int, /) -> tuple[dict[str, Tensor], Tensor]:
        row = self._text[index]
        return {"tokens": row[:-1].contiguous(), "positions": torch.arange(LENGTH)}, row[1:].contiguous()


def gpt(*, batch_size: int = 8) -> ff.Task:
    return ff.Task(
        model=PositionedGPT,
        loss=losses,
        data=lambda: ff.Data(train=Texts(NUM_BATCHES * batch_size)),
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4, fused=True),
        tensor=GPT_RULES,
        batch_size=batch_size,
        unit="tokens",
    )


def mlp(*, batch_size: int = 16) -> ff.Task:
    return ff.Task(
        model=_make_mlp,
        loss=losses,
        data=lambda: _vectors(NUM_BATCHES * batch_size),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4, fused=True),
        tensor=MLP_RULES,
        batch_size=batch_size,
    )


def _make_mlp() -> nn.Module:
    return MLP()


def _vectors(num_samples: int) -> ff.Data:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 3072, generator=generator)
    targets = torch.randint(0, CLASSES, (num_samples,), generator=generator)
    return ff.Data(train=list(zip(inputs, targets, strict=True)))
