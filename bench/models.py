"""Models: what the benches train, in plain single-device PyTorch.

case    a model, its batches, a learning rate
blocks  the layers that FSDP wraps one by one; every model has them as `blocks`
Law: weights depend on the seed only, and batch i on (rank, i) only, so that all configurations train the same.

B batch · L sequence · D width · H heads · K head size · C channels
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]

VOCABULARY, LENGTH = 256, 256
CLASSES = 16


class Attention(nn.Module):
    """Causal self-attention, [B, L, D] to [B, L, D]."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q_BHLK, k_BHLK, v_BHLK = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x_BLD).chunk(3, dim=-1)
        )
        out_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
        return self.out(out_BHLK.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One pre-norm Transformer layer, [B, L, D] to [B, L, D]."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm1(x_BLD))
        return x_BLD + self.mlp(self.norm2(x_BLD))


class GPT(nn.Module):
    """A byte-level GPT with learned positions: tokens [B, L] to logits [B, L, 256]; 4.94 M parameters."""

    def __init__(self, width: int = 256, num_layers: int = 6, num_heads: int = 8):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        x_BLD = self.tokens(tokens_BL) + self.positions(positions_L)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))


class Residual(nn.Module):
    """Two 3×3 convolutions and a skip, [B, C, ·, ·] to [B, C', ·/stride, ·/stride]."""

    def __init__(self, num_in: int, num_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, num_out), nn.GroupNorm(8, num_out)
        is_identity = stride == 1 and num_in == num_out
        self.skip = nn.Identity() if is_identity else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class CNN(nn.Module):
    """A small ResNet with group normalization: images [B, 3, 32, 32] to logits [B, 16]; 6.4 M parameters."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 320), depth: int = 2):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        blocks, num_in = [], widths[0]
        for stage, width in enumerate(widths):
            for layer in range(depth):
                blocks.append(Residual(num_in, width, stride=2 if stage and not layer else 1))
                num_in = width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(num_in, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class MLP(nn.Module):
    """Weights and little else: [B, 3072] to logits [B, 16]; 56.7 M parameters."""

    def __init__(self, width: int = 3072, depth: int = 6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(x_BD)


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, unreduced: logits [..., classes], targets [...] to [number of targets]."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")


def draw_bytes(batch_size: int, generator: torch.Generator) -> Batch:
    text_BL = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1), generator=generator)
    return text_BL[:, :-1].contiguous(), text_BL[:, 1:].contiguous()


def _images(batch_size: int, generator: torch.Generator) -> Batch:
    images = torch.randn(batch_size, 3, 32, 32, generator=generator)
    return images, torch.randint(0, CLASSES, (batch_size,), generator=generator)


def draw_vectors(batch_size: int, generator: torch.Generator) -> Batch:
    x_BD = torch.randn(batch_size, 3072, generator=generator)
    return x_BD, torch.randint(0, CLASSES, (batch_size,), generator=generator)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its data; `batch_size` is per rank."""

    model: Callable[[], nn.Module]
    draw_batch: Callable[[int, torch.Generator], Batch]
    batch_size: int
    lr: float

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    def batches(self, rank: int, num_batches: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1 + rank)
        return [self.draw_batch(self.batch_size, generator) for _ in range(num_batches)]


CASES = {
    "gpt1": Case(model=GPT, draw_batch=draw_bytes, batch_size=1, lr=3e-4),
    "gpt8": Case(model=GPT, draw_batch=draw_bytes, batch_size=8, lr=3e-4),
    "cnn": Case(model=CNN, draw_batch=_images, batch_size=16, lr=3e-4),
    "mlp": Case(model=MLP, draw_batch=draw_vectors, batch_size=8, lr=1e-4),
}
