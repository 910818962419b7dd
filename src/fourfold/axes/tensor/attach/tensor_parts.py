"""Tensor parts: where a model that is cut has other tensors than its part of the whole model's.

part   of a tensor of the whole model: what a tensor rank has of it, in one of its dims; of hidden tensors that are
       split over tokens, its tokens
Law: a tensor whose place in the whole one cannot be told is not compared.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.plan.param_spec import TensorShard
from fourfold.proof.grad_projections import is_close
from fourfold.proof.module_trace import Event, ModuleTrace
from fourfold.torch_kit.param_access import METADATA_FUNCTIONS


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
