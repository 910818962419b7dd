"""The whole model on a tensor rank: its structure, and random whole weights, held or drawn where they are used.

structure    the modules of the whole model, with parameters on the meta device: they have shapes and no memory
placeholder  stands for a weight in the model: it has its shape, dtype and device, one element of memory, and is NaN
use          an operation that gets a placeholder: it computes with the weight, which is drawn for it and then freed
Law: outputs and gradients are those of the model with all its weights. What does not see the weights, such as compiled
code, computes with NaN.
Law: all ranks draw the same weights, each from a seed of its own name, and a rank's shards are parts of them.

Autograd keeps no weight for backward either: it keeps which one it was, and there it is drawn again. Of the gradient of
a weight this rank's part is kept. A view of a weight, such as its transpose, is held until backward has used it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.axes.tensor.work.layers import local_part
from fourfold.plan.param_spec import TensorShard
from fourfold.proof.checks import CheckUnavailable
from fourfold.proof.random_weights import cast_real, draw_weight
from fourfold.torch_kit.model_copy import deep_copy
from fourfold.torch_kit.param_access import METADATA_FUNCTIONS
from fourfold.torch_kit.torch_private import DisableTorchFunction, has_memory, tree_leaves, tree_map_only

# ---- whole model ----------------------------------------------------------------------------------------------------


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


# ---- drawn weights --------------------------------------------------------------------------------------------------


GET_DATA = {attribute.__get__ for base in Tensor.__mro__ if (attribute := vars(base).get("data")) is not None}


class WeightSource(Protocol):
    """The whole weights that a model computes with inside the `with`; afterwards this rank's parts of their gradients.

    Made of random weights, and the shards of this rank.
    """

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What stands in the model for the weights."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...

    def local_gradients(self) -> Mapping[str, Tensor]:
        """Of those weights that have one."""
        ...


class HeldWeights:
    """All of them are in memory."""

    def __init__(self, weights: RandomWeights, shards: Mapping[str, TensorShard]) -> None:
        self.parameters, self._shards = weights.held(), shards

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def local_gradients(self) -> Mapping[str, Tensor]:
        found = {name: p.grad for name, p in self.parameters.items()}
        return {name: local_part(grad, self._shards[name]) for name, grad in found.items() if grad is not None}


class _Saved(NamedTuple):
    """A weight, or a view of it, as autograd keeps it."""

    name: str
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class DrawnWeights(TorchFunctionMode):
    """Each is in memory while an operation uses it. Raises CheckUnavailable where a model may write into a weight."""

    def __init__(self, weights: RandomWeights, shards: Mapping[str, TensorShard]) -> None:
        super().__init__()
        self.parameters, self._weights, self._shards = weights.placeholders(), weights, shards
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._in_use: dict[int, str] = {}
        """The weights of the operation that runs, by their address."""
        self._anchor = torch.zeros((), requires_grad=True)
        """Every trained weight is made of it, so that it has a place in the graph."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._gradients: dict[str, Tensor] = {}

    def local_gradients(self) -> Mapping[str, Tensor]:
        return self._gradients

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_use = func not in METADATA_FUNCTIONS and any(id(each) in self._names for each in tree_leaves((args, kwargs)))
        if not is_use:
            return func(*args, **kwargs)
        if func in GET_DATA:
            raise CheckUnavailable("the model reads .data of a weight, and may write there")
        before, self._in_use = self._in_use, {}
        try:
            args, kwargs = tree_map_only(nn.Parameter, self._weight, (args, kwargs))
            return func(*args, **kwargs)
        finally:
            self._in_use = before

    def _weight(self, parameter: nn.Parameter) -> Tensor:
        name = self._names.get(id(parameter))
        if name is None:
            return parameter
        weight = self._draw(name)
        if parameter.requires_grad and torch.is_grad_enabled():
            weight = _Draw.apply(self._anchor, weight, name, self)
        self._in_use[weight.untyped_storage().data_ptr()] = name
        return weight

    def add_gradient(self, name: str, whole: Tensor) -> None:
        """Add to this rank's part of a weight's gradient."""
        part = local_part(whole, self._shards[name])
        self._gradients[name] = self._gradients[name] + part if name in self._gradients else part

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        name = self._in_use.get(tensor.untyped_storage().data_ptr()) if self._in_use and has_memory(tensor) else None
        if name is None:
            return tensor
        return _Saved(name, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return self._draw(saved.name).as_strided(saved.size, saved.stride, saved.offset)

    def _draw(self, name: str) -> Tensor:
        with DisableTorchFunction():  # other modes would change or record how the numbers are drawn
            return self._weights.whole(name)


class _Draw(torch.autograd.Function):
    """A weight as a function of the anchor, of which it has only its place in the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, name: str, drawn: DrawnWeights) -> Tensor:
        ctx.name, ctx.drawn = name, drawn
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.drawn.add_gradient(ctx.name, grads[0])
        return None, None, None, None
