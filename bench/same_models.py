"""What `bench.same` trains: small models, losses, optimizers and batches, in plain PyTorch.

Law: weights and batches depend only on the case. A rank's batch is its part of the global one.

B batch · L tokens of a sample · D width · H heads · K head size
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.same_cases import STEPS, Case, data_ranks

FEATURES, CLASSES, WIDTH = 16, 10, 24
LENGTH, BYTES, HEADS = 16, 64, 4
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("torch", {"lr": 1e-2}),
    "SGD": ("torch", {"lr": 5e-2, "momentum": 0.9}),
    "LAMB": ("fourfold", {"lr": 1e-2}),
    "LARS": ("fourfold", {"lr": 1e-2}),
}


class Net(nn.Module):
    """Features [B, 16] to logits [B, 10]. `kind` says which layer is tied, frozen, normalized or unused."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(n, WIDTH) for n in (FEATURES, WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "norm" else nn.LayerNorm(WIDTH)
        if kind == "tied":
            self.third.weight = self.second.weight
        if kind == "frozen":
            self.second.requires_grad_(False)
        if kind == "spare":
            self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.first(x)))
        x = F.gelu(self.third(F.gelu(self.second(x))))
        return self.head(x) * self.scale


class Conv(nn.Module):
    """Features [B, 16], seen as images of 4 × 4, to logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x.view(-1, 1, 4, 4)))
        x = F.relu(self.norm(self.conv2(x)) + x)
        return self.head(x.mean(dim=(2, 3)))


class Attention(nn.Module):
    """Causal attention over tokens, [B, L, D] to [B, L, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x_BLD).chunk(3, dim=-1))
        out_BHLK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out_BHLK.transpose(1, 2).flatten(2))


class Text(nn.Module):
    """Tokens and their positions [B, L] to logits [B, L, 64]; the head is tied to the embedding."""

    def __init__(self, width: int = 16, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x_BLD = self.tokens(tokens) + self.places(positions)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x_BLD = x_BLD + layer(norm(x_BLD))
        return self.head(x_BLD)


def seed(case: Case) -> int:
    """A seed that is the same in every process and for every checkout."""
    return zlib.crc32(f"{case['model']} {case['dtype']} {case['batches']} {case['loss']}".encode())


def model(case: Case) -> nn.Module:
    torch.manual_seed(seed(case))
    kind = case["model"]
    made = Text() if kind == "attention" else Conv() if kind == "conv" else Net(kind)
    return made.to(getattr(torch, case["dtype"]))


def _flat(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.flatten(0, -2), targets.flatten()


def _values(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(outputs, targets), reduction="none")


def _pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(*_flat(outputs, targets), reduction="sum"), targets.numel()


def _scalar(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(outputs, targets))


def _masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    counts = targets.flatten() > 0
    return (_values(outputs, targets) * counts).sum(), int(counts.sum())


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "values": _values,
    "pair": _pair,
    "scalar": _scalar,
    "masked": _masked,
}


def optimizer(case: Case, fourfold_optim: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory of two groups: matrices with weight decay, the rest without. `fourfold_optim` is `ff.optim`."""
    home, options = OPTIMIZERS[case["optimizer"]]
    kind = getattr(torch.optim if home == "torch" else fourfold_optim, case["optimizer"])

    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = [p for p in parameters if p.requires_grad]
        matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
        return kind([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], **options)

    return make


def draw(case: Case, count: int, generator: torch.Generator) -> tuple[Any, Tensor]:
    """A batch of `count` samples."""
    randint = functools.partial(torch.randint, generator=generator)
    if case["model"] == "attention":
        positions = torch.arange(LENGTH).expand(count, LENGTH)
        inputs = {"tokens": randint(0, BYTES, (count, LENGTH)), "positions": positions}
        return inputs, randint(0, BYTES, (count, LENGTH))
    features = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return features.to(getattr(torch, case["dtype"])), randint(0, CLASSES, (count,))


def batches(case: Case, index: int, count: int = STEPS + 2) -> list[tuple[Any, Tensor]]:
    """The batches of a data rank: those of the steps, one to evaluate, one for a step after a reload."""
    result = []
    for step in range(count):
        size = 2 * case["microbatches"]
        if case["batches"] == "uneven":
            size += (index + step) % 2
        if case["batches"] == "empty" and step == 1 and index == data_ranks(case) - 1:
            size = 0
        result.append(draw(case, size, torch.Generator().manual_seed(seed(case) + 100 * step + index)))
    return result


class Source:
    """Numbered samples, for a Feed and for `ff.train`."""

    def __init__(self, case: Case, count: int, first: int = 0) -> None:
        self._inputs, self._targets = draw(case, count, torch.Generator().manual_seed(seed(case) + first))

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        inputs = self._inputs
        one = {name: value[index] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[index]
        return one, self._targets[index]
