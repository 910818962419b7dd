"""Models that use their weights in ways that make sharding hard: 16 features, ten classes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class FunctionalUse(nn.Module):
    """Uses weights outside their modules: tied by hand, transposed, and through a view that is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        view = self.second.weight.t()
        x = F.gelu(self.first(x))
        x = F.gelu(self.second(x))
        x = x + F.gelu(F.linear(x, self.first.weight[:, :8].t().repeat(3, 1)))
        return self.head(x @ view) + (x @ self.first.weight) @ self.first.weight[:10].t()


class ReusedLayers(nn.Module):
    """Uses each layer twice, with other layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.inner:
                x = torch.tanh(layer(x))
        return self.head(x)


class Checkpointed(nn.Module):
    """Activation checkpointing: reentrant, non-reentrant, and nested."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self._checkpoint(self.layers[0], x.requires_grad_(), use_reentrant=True)
        x = self._checkpoint(self.layers[1], x, use_reentrant=False)
        x = self._checkpoint(lambda y: self._checkpoint(self.layers[3], self.layers[2](y), use_reentrant=False), x)
        return self.head(x)

    def _checkpoint(self, layer: Any, x: Tensor, *, use_reentrant: bool = False) -> Tensor:
        # Ranks may be threads: restoring the generator here would disturb a model that another rank is making.
        out = checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        assert isinstance(out, Tensor)
        return out


class LargeGRU(nn.Module):
    """One operation needs more weights at once than are unsharded otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(4, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.inner(x.view(-1, 4, 4))
        return self.head(out[:, -1])


class _ScaleFunction(torch.autograd.Function):
    """An autograd function that saves its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight.exp(), (gradients[0] * x * weight.exp()).sum(0)


class CustomFunction(nn.Module):
    """A custom autograd function, and weights that do not belong to a torch layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.linspace(-0.5, 0.5, 16) for _ in range(6))
        self.offset = nn.Parameter(torch.zeros(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(_ScaleFunction.apply(x, scale) + self.offset)  # type: ignore[operator]
        return self.head(x)


class AttentionLayers(nn.Module):
    """torch's own attention, whose projections are views of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 8)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class ComplexWeights(nn.Module):
    """Complex weights, whose gradients have imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(16, 12, dtype=torch.complex128) * 0.2)
        self.offset = nn.Parameter(torch.randn(12, dtype=torch.complex128))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.filter.dtype) @ self.filter
        z = z * torch.exp(1j * z.real.tanh()) + self.offset
        return self.head(torch.cat((z.real, z.imag), dim=-1))


AWKWARD_MODELS: dict[str, type[nn.Module]] = {
    "outside": FunctionalUse,
    "reused": ReusedLayers,
    "checkpointed": Checkpointed,
    "many at once": LargeGRU,
    "own function": CustomFunction,
    "attending": AttentionLayers,
    "complex": ComplexWeights,
}
