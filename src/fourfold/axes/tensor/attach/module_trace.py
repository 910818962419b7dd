"""Module trace: what the modules of a model get and return in one forward, in the order of its computation.

part   of a tensor of the whole model: what a tensor rank has of it, in one of its dims; of hidden tensors that are
       split over tokens, its tokens
Law: hooks exist only inside the `with`; a tensor whose place in the whole one cannot be told is not compared.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.plan.param_spec import TensorShard
from fourfold.proof.grad_projections import is_close
from fourfold.torch_kit.param_access import METADATA_FUNCTIONS
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import is_in_backward

INPUT, OUTPUT = "input", "output"


class Event(NamedTuple):
    """The first floating-point tensor that a module got or returned, in its `call`-th call."""

    name: str
    kind: str
    call: int
    tensor: Tensor


class ModuleTrace:
    """Within, the forwards of all modules of a model are recorded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.events: list[Event] = []
        self._active: list[str] = []
        self._num_calls: dict[tuple[str, str], int] = {}
        self.failed_module: str | None = None
        """The innermost module that raised."""

    @property
    def current(self) -> str:
        """The name of the module that is running; "" is the model itself."""
        return self._active[-1] if self._active else ""

    def __enter__(self) -> Self:
        self._hooks = []
        for name, module in self._model.named_modules():
            enter, leave = self._hooks_of(name)
            self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hooks_of(self, name: str) -> tuple[Any, Any]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._active.append(name)
            self._record(name, INPUT, (args, kwargs))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            if output is None and self.failed_module is None and not is_in_backward():
                self.failed_module = name  # torch calls the hook without an output if the forward has raised
            self._record(name, OUTPUT, output)
            self._active.pop()

        return enter, leave

    def _record(self, name: str, kind: str, tree: Any) -> None:
        tensor = next((each for each in tree_leaves(tree) if each.is_floating_point() or each.is_complex()), None)
        if tensor is not None and not is_in_backward():  # a checkpoint's second forward is not traced
            call = self._num_calls[name, kind] = self._num_calls.get((name, kind), 0) + 1
            self.events.append(Event(name, kind, call, tensor.detach()))

    def find(self, name: str, kind: str) -> Tensor | None:
        """The last tensor that a module got or returned; None: there is none."""
        return next((each.tensor for each in reversed(self.events) if (each.name, each.kind) == (name, kind)), None)


class OutsideUses(TorchFunctionMode):
    """Notes split weights of a model that are used while no layer runs that has them.

    weights  those that it computes with
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        shards: Mapping[str, TensorShard],
        trace: ModuleTrace,
    ) -> None:
        super().__init__()
        self._trace = trace
        self._names = {id(p): name for name, p in weights.items() if not shards[name].is_whole}
        layers: dict[nn.Parameter, set[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            layers.setdefault(p, set()).add(name.rpartition(".")[0])
        self._layers = {name: layers[p] for name, p in model.named_parameters()}
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA_FUNCTIONS:
            for each in args:
                name = self._names.get(id(each))
                if name is not None and self._trace.current not in self._layers[name]:
                    self.names.append(name)
        return func(*args, **(kwargs or {}))


class TensorPlace(NamedTuple):
    """Place `number` of the `size` places of the tensor axis.

    splits_tokens  hidden tensors may be split over tokens
    """

    number: int
    size: int
    splits_tokens: bool = False

    def is_part(self, whole: Tensor, local: Tensor, shard: TensorShard | None = None) -> bool | None:
        """Whether `local` is what this place has of `whole`; None: it cannot be told.

        shard  that of the weight which splits the last dim, where there is one
        """
        expected = list(self.parts(whole, local, shard))
        return any(is_close(each, local) for each in expected) if expected else None

    def parts(self, whole: Tensor, local: Tensor, shard: TensorShard | None = None) -> Iterator[Tensor]:
        """What this place may have of `whole`, in the shape of `local`."""
        yield from self.token_parts(whole, local)
        features = self._split_features(whole, local, shard)
        if features is not None:
            yield features

    def token_parts(self, whole: Tensor, local: Tensor) -> Iterator[Tensor]:
        """This place's tokens of `whole`, if they have the shape of `local`."""
        if self.splits_tokens and whole.dim() > 1 and whole.shape != local.shape:
            tokens = TensorShard.even(whole.shape, whole.dim() - 2, self.number, self.size)
            if tokens.local_shape == tuple(local.shape):
                (piece,) = tokens.pieces
                yield whole.narrow(tokens.dim, piece.start, piece.length)

    def _split_features(self, whole: Tensor, local: Tensor, shard: TensorShard | None) -> Tensor | None:
        if whole.shape == local.shape:
            return whole
        if whole.dim() != local.dim():
            return None
        dims = [dim for dim in range(whole.dim()) if whole.shape[dim] != local.shape[dim]]
        if len(dims) != 1:
            return None
        (dim,) = dims
        if shard is not None and dim == whole.dim() - 1 and shard.shape[shard.dim] == whole.shape[dim]:
            pieces = [whole.narrow(dim, piece.start, piece.length) for piece in shard.pieces]
            return torch.cat(pieces, dim) if pieces else None
        # An equal share of the units; or one unit, where several places hold the same.
        length = local.shape[dim]
        if not length or whole.shape[dim] % length:
            return None
        return whole.narrow(dim, self.number * (whole.shape[dim] // length) // self.size * length, length)


def first_difference(
    whole: ModuleTrace, local: ModuleTrace, place: TensorPlace, split_shards: Mapping[tuple[str, str], TensorShard]
) -> Event | None:
    """The first event of the model that is cut whose tensor is not this place's part of the whole model's.

    split_shards  by module and kind: the shard of the weight which splits the last dim of what it gets or returns
    """
    known = {each[:3]: each.tensor for each in whole.events}
    for event in local.events:
        expected = known.get(event[:3])
        if expected is not None and (
            place.is_part(expected, event.tensor, split_shards.get((event.name, event.kind))) is False
        ):
            return event
    return None
