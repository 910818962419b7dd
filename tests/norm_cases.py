"""Models with batch normalization, stock ones among them, and batches for them, in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases import SEED_LOCK

SHAPES = {0: (), 1: (3,), 2: (3, 2), 3: (2, 2, 2)}  # behind samples and channels
NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class WithActivation(nn.BatchNorm2d):
    """A subclass whose own forward calls F.batch_norm, as those of timm."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 0.1 if self.momentum is None else self.momentum
        return torch.tanh(
            F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True, momentum)
        )


class Net(nn.Module):
    """A linear layer over channels, norms, and a head. `kind`: how the norms are used."""

    def __init__(self, kind: str = "plain", *, dims: int = 0, norm: type[nn.Module] | None = None, **options) -> None:
        super().__init__()
        make = functools.partial(norm or NORMS[dims], 5, **options)
        self.kind = kind
        self.first, self.norm, self.mid, self.other, self.head = (
            nn.Linear(8, 5), make(), nn.Linear(5, 5), make(), nn.Linear(5, 3)
        )  # fmt: skip
        if kind == "frozen weights":
            for module in (self.first, self.norm):
                module.requires_grad_(False)
        if kind == "tied":
            self.other = self.norm

    def train(self, mode: bool = True) -> "Net":
        super().train(mode)
        if self.kind == "frozen statistics":
            self.other.eval()
        return self

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.other(self.mid(self.norm(x).movedim(1, -1)).movedim(-1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).movedim(-1, 1)
        if self.kind == "checkpointed":
            x = checkpoint(self.block, x, use_reentrant=False)
        elif self.kind == "reentrant":
            x = checkpoint(self.block, x, use_reentrant=True)
        elif self.kind == "functional":
            x = torch.func.functional_call(self.norm, dict(self.norm.named_parameters()), (x,)) + self.block(x)
        elif self.kind == "penalty":
            x = x + torch.autograd.grad(self.block(x).square().sum(), x, create_graph=True)[0]
        else:
            x = self.block(x)
        return self.head(x.flatten(2).mean(2) if x.dim() > 2 else x)


KINDS = ("plain", "frozen weights", "frozen statistics", "tied", "checkpointed", "reentrant", "functional", "penalty")


def net(*args, **options) -> Net:
    with SEED_LOCK:
        torch.manual_seed(3)
        return Net(*args, **options).double().train()


def batches(sizes, dims: int):
    generator = torch.Generator().manual_seed(5)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(3 + draw(size, *SHAPES[dims], 8), torch.randint(0, 3, (size,), generator=generator)) for size in sizes]


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def images(*sizes: int, width: int):
    generator = torch.Generator().manual_seed(5)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(draw(size, 3, width, width), torch.randint(0, 3, (size,), generator=generator)) for size in sizes]


class Logits(nn.Module):
    """The logits of a model of transformers, of images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


def resnet(library: str) -> nn.Module:
    """A stock ResNet, without a change."""
    with SEED_LOCK:
        torch.manual_seed(3)
        if library == "torchvision":
            return pytest.importorskip("torchvision").models.resnet18(num_classes=3).double().train()
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1], layer_type="basic"
        )
        config.num_labels = 3
        return Logits(transformers.ResNetForImageClassification(config)).double().train()
