"""Optimizers on flat buffers: the user's class, its options by group, its update over whole buckets at once.

piece         a stretch of a bucket's weights with the tensor where its summed gradient rests
element-wise  an update in which no element looks at another: it may run on flat buffers as it is
layer-wise    an update in which an element looks at two norms of its parameter: see `layerwise`
Law: the update of a flat piece equals the update of its parameters one by one.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.parts.layerwise import LAYERWISE, begin, finish
from fourfold.words.errors import OptimizerError, Problem

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
# How an update is carried out, not what it computes: chosen here unless the user did.
IMPLEMENTATION = ("fused", "foreach")

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class Piece(NamedTuple):
    """Elements [start, stop) of a bucket: its weights and where the sum of their gradients rests.

    `slot` is the number of the piece's parameter in the bucket, where pieces are cut by parameter.
    """

    start: int
    stop: int
    weight: Tensor
    gradient: Tensor
    slot: int | None = None


def check(optimizer: Optimizer) -> None:
    """Raise OptimizerError unless the optimizer's update can run on flat buffers."""
    kind = type(optimizer)
    if kind not in (*ELEMENTWISE, *LAYERWISE):
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        ours = ", ".join(f"ff.optim.{cls.__name__}" for cls in LAYERWISE)
        attempt = "one of these, or ff.DistributedOptimizer, which runs any optimizer as it is"
        need = f"an element-wise optimizer of torch.optim ({known}), or {ours}"
        raise OptimizerError(Problem(kind.__name__, need, attempt))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(Problem("differentiable = True", "an update outside autograd", "differentiable = False"))


def by_parameter(optimizer: Optimizer) -> bool:
    """Whether the update must know which elements are of one parameter."""
    return isinstance(optimizer, LAYERWISE)


def build(factory: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The user's optimizer over the original parameters. Raises OptimizerError for what cannot run on flat buffers."""
    _spare_dynamo()
    optimizer = factory(parameters)
    if not isinstance(optimizer, Optimizer):
        attempt = "functools.partial(torch.optim.AdamW, lr=3e-4)"
        raise OptimizerError(Problem(repr(optimizer), "a function from parameters to a torch optimizer", attempt))
    check(optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = len(held - {id(p) for p in parameters})
    if strangers:
        problem = Problem(
            f"{strangers} parameters that are not the model's", "an optimizer of the parameters it is given"
        )
        raise OptimizerError(problem)
    left = sum(p.requires_grad and id(p) not in held for p in parameters)
    if left:
        got = f"{left} trainable parameters that are in no group"
        raise OptimizerError(Problem(got, "every trainable parameter in a group", "p.requires_grad_(False) for them"))
    return optimizer


def _spare_dynamo() -> None:
    """Keep torch from importing torch._dynamo when an optimizer is made: 1.25 s in every process."""
    plain = inspect.unwrap(Optimizer.add_param_group)
    if not hasattr(plain, "__dynamo_disable"):
        setattr(plain, "__dynamo_disable", plain)


class FlatOptimizer:
    """The user's optimizer, once per bucket, over pieces of flat memory."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[int], pieces: Sequence[Sequence[Piece]]) -> None:
        """`groups[b]` is the index of bucket b's group in `optimizer.param_groups`."""
        self._user, self._groups, self._pieces = optimizer, groups, pieces
        self._chosen = [_implementation(optimizer, p[0].weight) if p else {} for p in pieces]
        self._flat = [self._make(bucket) for bucket in range(len(pieces))]

    def _make(self, bucket: int) -> Optimizer:
        kind = type(self._user)
        accepted = inspect.signature(kind).parameters
        options: dict[str, Any] = {k: v for k, v in self._user.defaults.items() if k in accepted} | self._chosen[bucket]
        flat = kind([piece.weight for piece in self._pieces[bucket]], **options)
        for piece in self._pieces[bucket]:
            piece.weight.grad = piece.gradient
        return flat

    @torch.no_grad()
    def update(self, bucket: int, used: Sequence[bool] | None = None) -> None:
        """One step of the bucket's weights. `used[s]`: whether any rank had a gradient for slot s; None = all."""
        flat = self._flat[bucket]
        theirs = self._user.param_groups[self._groups[bucket]]
        flat.param_groups[0].update({k: v for k, v in theirs.items() if k != "params"} | self._chosen[bucket])
        if used is not None:
            for piece in self._pieces[bucket]:
                assert piece.slot is not None
                piece.weight.grad = piece.gradient if used[piece.slot] else None
        if isinstance(flat, LAYERWISE):
            self._update_by_parameter(bucket, flat)
        else:
            # Without torch's wrappers of `step`: they import torch._dynamo, and cost more than a small bucket's update.
            inspect.unwrap(type(flat).step)(flat)
        # A scheduler of torch warns unless it has seen a step of the optimizer it was made with.
        self._user._opt_called = True  # type: ignore[attr-defined]

    def _update_by_parameter(self, bucket: int, flat: Any) -> None:
        owners = [piece.slot for piece in self._pieces[bucket] if piece.slot is not None]
        begun = begin(flat, owners, num_parameters=1 + max(owners))
        finish(begun, begun.squares)

    def stretches(self, bucket: int, start: int, stop: int) -> dict[str, Any]:
        """The state of elements [start, stop) of a bucket as it lies: lists of consecutive tensors, scalars as floats.

        Empty before the first update.
        """
        covering = [piece for piece in self._pieces[bucket] if piece.start < stop and start < piece.stop]
        states = [self._flat[bucket].state.get(piece.weight, {}) for piece in covering]
        bounds = [(max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start) for piece in covering]
        result: dict[str, Any] = {}
        for key, first in states[0].items():
            if isinstance(first, Tensor) and first.shape == covering[0].weight.shape:
                result[key] = [s[key][low:high] for s, (low, high) in zip(states, bounds, strict=True)]
            else:
                result[key] = first.item() if isinstance(first, Tensor) else first
        return result

    def state(self, bucket: int, start: int, stop: int) -> dict[str, Any]:
        """Like `stretches`, with copies of tensors [stop − start]."""
        state = self.stretches(bucket, start, stop)
        return {key: torch.cat(value) if isinstance(value, list) else value for key, value in state.items()}

    def load_state(self, bucket: int, slots: Sequence[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Put back what `state` gave for stretches (start, stop, state) that tile the bucket."""
        for piece in self._pieces[bucket]:
            covering = [slot for slot in slots if slot[0] < piece.stop and piece.start < slot[1]]
            state: dict[str, Any] = {}
            if any(s.keys() != covering[0][2].keys() for _, _, s in covering):
                got = "parameters of one bucket, some with a state and some without"
                raise OptimizerError(Problem(got, "the plan it was saved with"), where="the state")
            for key, first in covering[0][2].items():
                if isinstance(first, Tensor):
                    stretches = [s[key][max(a, piece.start) - a : min(b, piece.stop) - a] for a, b, s in covering]
                    state[key] = torch.cat(stretches).to(piece.weight.device)
                elif any(s[key] != first for _, _, s in covering):
                    problem = Problem(f"{key} differs between parameters of one bucket", "the plan it was saved with")
                    raise OptimizerError(problem, where="the state")
                else:
                    state[key] = _scalar(first, piece.weight, fused=bool(self._chosen[bucket].get("fused")))
            self._flat[bucket].state[piece.weight] = state


def _scalar(value: Any, weight: Tensor, *, fused: bool) -> Any:
    """A scalar of the state as torch's optimizers keep it: a tensor, on the device where a fused update reads it."""
    if not isinstance(value, float):
        return value
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.tensor(value, dtype=dtype, device=weight.device if fused else None)


def _implementation(optimizer: Optimizer, weight: Tensor) -> dict[str, bool | None]:
    """Fused, where the class has it for this device and the user asked for no other implementation."""
    theirs = {key: optimizer.defaults.get(key) for key in IMPLEMENTATION if key in optimizer.defaults}
    if "fused" not in theirs or any(value is not None for value in theirs.values()):
        return theirs
    # torch 2.13's fused SGD leaves most elements of 2-byte weights as they are on CPUs (pytorch#191763).
    able = weight.device.type == "cuda" or weight.dtype in (torch.float32, torch.float64)
    return {"fused": True, "foreach": False} if able else theirs
