"""Whole model: what a dry run needs of a model that has been cut: its modules as they were, and random weights.

structure  the modules of the whole model, with parameters on the meta device: they have shapes and no memory
Law: all ranks draw the same weights, each from a seed of its own name, and a rank's shards are parts of them.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fourfold.axes.tensor.work.cut import local_part
from fourfold.plan.tensor_shard import TensorShard
from fourfold.proof.checks import CheckUnavailable
from fourfold.proof.random_weights import cast_real, draw_weight
from fourfold.torch_kit.model_copy import deep_copy


def copy_structure(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have no memory. It shares the buffers. Raises TaskError if it has no copy."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return deep_copy(model, model, "with tp > 1, a dry run compares it with the model that is cut", memo)


class RandomWeights:
    """Whole parameters in the shapes of a model that has been cut, drawn by name; integers are the model's own."""

    def __init__(
        self, model: nn.Module, shards: Mapping[str, TensorShard], dtype: torch.dtype | None, device: torch.device
    ) -> None:
        """`dtype`: of what is drawn; None: of the parameter. Raises CheckUnavailable for integers that are split."""
        self._own = dict(model.named_parameters())
        self._shards, self._dtype, self._device = shards, dtype, device
        for name, p in self._own.items():
            if not self._is_drawn(p) and not shards[name].is_whole:
                raise CheckUnavailable(f"{name} is split, and {str(p.dtype).removeprefix('torch.')}")

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A whole parameter's values, the same in every call."""
        p, shape = self._own[name], self._shards[name].shape
        if not self._is_drawn(p):
            return p.detach().clone()
        numbers = draw_weight(name, shape, self._device)
        if p.is_complex():
            numbers = torch.complex(numbers, draw_weight(f"{name} (imaginary)", shape, self._device))
        return numbers.to(p.dtype) if self._dtype is None else cast_real(numbers, self._dtype)

    def held(self) -> dict[str, nn.Parameter]:
        """All whole parameters."""
        return {name: nn.Parameter(self.whole(name), p.requires_grad) for name, p in self._own.items()}

    def local(self) -> dict[str, nn.Parameter]:
        """This rank's parts of all parameters. Of the whole ones, one is in memory at a time."""
        return {
            name: nn.Parameter(local_part(self.whole(name), self._shards[name]), p.requires_grad)
            for name, p in self._own.items()
        }

    @torch.no_grad()
    def placeholders(self) -> dict[str, nn.Parameter]:
        """Parameters in the shapes of the whole ones that have one element of memory: NaN. Integers are whole."""
        made = {}
        for name, p in self._own.items():
            like = (
                torch.full((), math.nan, dtype=p.dtype, device=self._device) if self._is_drawn(p) else self.whole(name)
            )
            like = cast_real(like, self._dtype).expand(self._shards[name].shape)
            made[name] = nn.Parameter(like, p.requires_grad)
        return made

    @staticmethod
    def _is_drawn(p: Tensor) -> bool:
        return p.is_floating_point() or p.is_complex()
