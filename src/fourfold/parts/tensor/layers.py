"""Split layers: modules of a user's model that compute with this rank's shard of their weights.

column       the output features are split: the input is entered, the output is this rank's features
row          the input features are split: the ranks' outputs are summed, then the bias is added, once
vocabulary   an embedding has the rows of some tokens; a head computes the logits of some tokens, then all gather them
replicated   a module inside a region whose weights all ranks hold, such as a norm of each head
Law: a layer keeps its object, its name and its base class; `isinstance(layer, nn.Linear)` stays true. Its parameters
are the same objects, with this rank's shards for data.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.parts.tensor.split_region import SplitRegion
from fourfold.plan.tensor_rules import Style
from fourfold.plan.tensor_shard import TensorShard


class SplitLayer(nn.Module):
    """What is mixed into the class of a layer that is split."""

    region: SplitRegion
    shards: Mapping[str, TensorShard]
    """By own parameter: the part of it that is here."""
    weight: Tensor
    bias: Tensor | None

    def shared(self, name: str) -> Tensor | None:
        """An own parameter; with gradients summed over the ranks that hold the same pieces, if several do."""
        weight = getattr(self, name)
        if weight is None or all(piece.num_replicas == 1 for piece in self.shards[name].pieces):
            return weight
        return self.region.partial_pieces(weight, self.shards[name])


class ColumnLinear(SplitLayer):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.region.enter(input), cast(Tensor, self.shared("weight")), self.shared("bias"))


class RowLinear(SplitLayer):
    def forward(self, input: Tensor) -> Tensor:
        total = self.region.leave(F.linear(input, self.weight))
        return total if self.bias is None else total + self.bias


class ColumnConv1D(SplitLayer):
    """transformers' Conv1D: a linear layer whose weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.region.enter(x), cast(Tensor, self.shared("weight")).t(), self.shared("bias"))


class RowConv1D(SplitLayer):
    def forward(self, x: Tensor) -> Tensor:
        return self.region.leave(F.linear(x, self.weight.t())) + self.bias


class VocabularyLinear(SplitLayer):
    def forward(self, input: Tensor) -> Tensor:
        logits = F.linear(self.region.enter(input), self.weight, self.bias)
        return self.region.gather(logits, self.shards["weight"].shape[0])


class VocabularyEmbedding(SplitLayer):
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        ((start, stop, _, _),) = self.shards["weight"].pieces
        is_absent = (input < start) | (input >= stop)
        rows = (input - start).masked_fill(is_absent, 0)
        # The gradient of the padding row is dropped, on the rank that has it.
        padding = None if self.padding_idx is None else self.padding_idx - start
        padding = padding if padding is not None and 0 <= padding < stop - start else None
        found = F.embedding(rows, self.weight, padding)
        return self.region.leave(found.masked_fill(is_absent[..., None], 0))


class Replicated(SplitLayer):
    """Its own parameters are used with summed gradients."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weights = {name: self.region.partial(weight) for name, weight in self.named_parameters(recurse=False)}
        base = cast(Callable[..., Any], super().forward)
        vars(self).update(weights)  # found before the parameters, which are not among a module's own attributes
        try:
            return base(*args, **kwargs)
        finally:
            for name in weights:
                del vars(self)[name]


LINEAR, CONV1D, EMBEDDING = "linear", "conv1d", "embedding"
LAYERS: Mapping[tuple[Style, str], type[SplitLayer]] = {
    (Style.COLUMN, LINEAR): ColumnLinear,
    (Style.COLUMN, CONV1D): ColumnConv1D,
    (Style.ROW, LINEAR): RowLinear,
    (Style.ROW, CONV1D): RowConv1D,
    (Style.VOCABULARY, LINEAR): VocabularyLinear,
    (Style.VOCABULARY, EMBEDDING): VocabularyEmbedding,
}


def split_layer(module: nn.Module, style: Style, region: SplitRegion, shards: Mapping[str, TensorShard]) -> None:
    """Make a module compute with this rank's shards of its own parameters, which are cut already.

    The rules have shown that its class is one that can be split in this style.
    """
    mixin = Replicated if style is Style.REPLICATED else LAYERS[style, _kind(module)]
    module.__class__ = _mixed(mixin, type(module))
    layer = cast(SplitLayer, module)
    layer.region, layer.shards = region, shards
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = module.weight.shape[0]
    elif hasattr(module, "nf"):
        module.nf = module.weight.shape[1]


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    return LINEAR if isinstance(module, nn.Linear) else CONV1D


@functools.cache
def _mixed(mixin: type[SplitLayer], base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `base` with the forward of `mixin`."""
    if mixin is Replicated:
        return _subclass(f"{mixin.__name__}Of{base.__name__}", mixin, base)
    plain = next((each for each in (nn.Linear, nn.Embedding) if issubclass(base, each)), base)
    split = _subclass(mixin.__name__, mixin, plain)
    # A forward of the subclass, as that of an embedding which scales its output, calls the split one.
    return split if base is plain else _subclass(f"{mixin.__name__}Of{base.__name__}", base, split)


def _subclass(name: str, *bases: type) -> type[nn.Module]:
    return cast(type[nn.Module], type(name, bases, {}))
