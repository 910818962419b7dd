"""Split layers: modules of a user's model that compute with this rank's shard of their weights.

column       the output features are split: the input is entered, the output is this rank's features
row          the input features are split: the ranks' outputs are summed, then the bias is added, once
channels     each group of channels is computed by itself, and this rank has some of them
vocabulary   an embedding has the rows of some tokens; a head computes the logits of some tokens, which are gathered
             where all of them are needed
replicated   a module inside a region whose weights all ranks hold, such as a norm of each head
Law: a layer keeps its object, its name and its base class; `isinstance(layer, nn.Linear)` stays true. Its parameters
are the same objects, with this rank's shards for data.

The cut: a whole model becomes this rank's part of it.

Law: a rank that has cut a model holds no element that its shards do not name; whole parameters and buffers are the
first rank's, on all of them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.axes.tensor.rules.layout import TensorLayout
from fourfold.axes.tensor.rules.styles import Style
from fourfold.axes.tensor.work.cross_entropy import Vocabulary
from fourfold.axes.tensor.work.split_logits import split_logits
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.plan.param_spec import TensorShard
from fourfold.torch_kit.deferred_init import InitialModel, InitialWeights
from fourfold.words.errors import Problem, TaskError


class SplitLayer(nn.Module):
    """What split layers know: the style of their rule, their region, and the shards of their weights on this rank."""

    split_style: Style
    region: SplitRegion
    shards: Mapping[str, TensorShard]
    """By own parameter: the part of it that is here."""
    splits_tokens = False
    """Of a row layer: whether each rank gets some tokens of the sum."""

    def _row_product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of the ranks' `F.linear`, and the bias."""
        if not self.splits_tokens:
            total = self.region.row_product(input, weight)
            return total if bias is None else total + bias
        total = self.region.leave_tokens(F.linear(input, weight))
        return total if bias is None else total + self.region.partial(bias)

    def _shared(self, name: str) -> Tensor | None:
        """An own parameter; with gradients summed over the ranks that hold the same pieces, if several do."""
        weight = getattr(self, name)
        if weight is None or all(piece.num_replicas == 1 for piece in self.shards[name].pieces):
            return weight
        return self.region.partial_pieces(weight, self.shards[name])


class ColumnLinear(SplitLayer, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return self.region.linear(input, cast(Tensor, self._shared("weight")), self._shared("bias"))


class RowLinear(SplitLayer, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return self._row_product(input, self.weight, self.bias)


class VocabularyLinear(SplitLayer, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        logits = F.linear(self.region.enter(input), self.weight, self.bias)
        ((start, _, _, _),) = self.shards["weight"].pieces
        return split_logits(logits, Vocabulary(self.region.group, start, self.shards["weight"].shape[0]))


class VocabularyEmbedding(SplitLayer, nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        ((start, stop, _, _),) = self.shards["weight"].pieces
        _check_tokens(input, self.shards["weight"].shape[0])
        is_absent = (input < start) | (input >= stop)
        rows = (input - start).masked_fill(is_absent, 0)
        # The gradient of the padding row is dropped, on the rank that has it.
        padding = None if self.padding_idx is None else self.padding_idx - start
        padding = padding if padding is not None and 0 <= padding < stop - start else None
        found = F.embedding(rows, self.weight, padding, scale_grad_by_freq=False, sparse=False)
        return self.region.leave(found.masked_fill(is_absent[..., None], 0))


def _check_tokens(tokens: Tensor, num_tokens: int) -> None:
    """Refuse tokens outside of the vocabulary, which no rank has: the sum of the ranks would be zero. All ranks do."""
    is_outside = (tokens < 0) | (tokens >= num_tokens)
    if tokens.device.type != "cpu":
        # Indices of which there are none: the device's own assertion catches them, and nobody waits for it.
        torch.zeros((), device=tokens.device).expand(num_tokens)[is_outside * num_tokens]
    elif bool(is_outside.any()):
        got = f"token {int(tokens[is_outside][0])} in a vocabulary of {num_tokens}"
        raise TaskError(
            Problem(got, f"tokens from 0 to {num_tokens - 1}", "the tokenizer of this model"), where="the batch"
        )


class ColumnConv1D(SplitLayer):
    """Mixed into transformers' Conv1D, whose weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = cast(Tensor, self._shared("weight")), cast(Tensor, self._shared("bias"))
        return self.region.linear(x, weight.t(), bias)


class RowConv1D(SplitLayer):
    """Mixed into transformers' Conv1D, whose weight is [in, out]."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self._row_product(x, self.weight.t(), self.bias)


class ColumnConvolution(SplitLayer):
    """Mixed into the class of a convolution."""

    def forward(self, input: Tensor, *args: Any) -> Tensor:
        return cast(Callable[..., Any], super().forward)(self.region.enter(input), *args)


class RowConvolution(SplitLayer):
    """Mixed into the class of a convolution."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor, *args: Any) -> Tensor:
        bias, base = self.bias, cast(Callable[..., Any], super().forward)
        vars(self)["bias"] = None  # found before the parameter; it is added once, to the sum
        try:
            partial = base(input, *args)
        finally:
            del vars(self)["bias"]
        total = self.region.leave(partial)
        return total if bias is None else total + bias.view(-1, *[1] * (self.weight.dim() - 2))


class SplitChannels(SplitLayer):
    """Mixed into the class of a layer that computes what its class does, of this rank's channels."""


class Replicated(SplitLayer):
    """Mixed into the class of any module: its own parameters are used with summed gradients."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with summed_gradients(self, self.region):
            return cast(Callable[..., Any], super().forward)(*args, **kwargs)


@contextlib.contextmanager
def summed_gradients(module: nn.Module, region: SplitRegion) -> Iterator[None]:
    """Within, a module uses its own parameters with gradients that are summed over the ranks, all of them together."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, p in module.named_parameters(recurse=False):
        if p.requires_grad:
            by_dtype.setdefault(p.dtype, []).append(name)
    weights: dict[str, Tensor] = {}
    for names in by_dtype.values():
        weights |= zip(names, region.partials([getattr(module, name) for name in names]), strict=True)
    vars(module).update(weights)  # found before the parameters, which are not among a module's own attributes
    try:
        yield
    finally:
        for name in weights:
            del vars(module)[name]


# What takes the place of a module's class, by the style of its rule.
SPLIT_CLASSES: Mapping[tuple[Style, type[nn.Module]], type[SplitLayer]] = {
    (Style.COLUMN, nn.Linear): ColumnLinear,
    (Style.ROW, nn.Linear): RowLinear,
    (Style.VOCABULARY, nn.Linear): VocabularyLinear,
    (Style.VOCABULARY, nn.Embedding): VocabularyEmbedding,
}
# The same for transformers' Conv1D, which is no class of torch.
CONV1D_CLASSES: Mapping[Style, type[SplitLayer]] = {Style.COLUMN: ColumnConv1D, Style.ROW: RowConv1D}
# What is mixed into the classes of layers that split channels.
CHANNEL_CLASSES: Mapping[Style, type[SplitLayer]] = {
    Style.COLUMN: ColumnConvolution,
    Style.ROW: RowConvolution,
    Style.CHANNELS: SplitChannels,
}
CHANNEL_LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.GroupNorm,
)  # fmt: skip


def split_layer(module: nn.Module, style: Style, region: SplitRegion, shards: Mapping[str, TensorShard]) -> None:
    """Make a module compute with this rank's shards of its own parameters, which are cut already."""
    module.__class__ = _split_class(style, type(module))
    layer = cast(SplitLayer, module)
    layer.split_style, layer.region, layer.shards = style, region, shards
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = module.weight.shape[0]
    elif isinstance(module, ColumnConv1D | RowConv1D):
        vars(module).update(zip(("nx", "nf"), cast(Tensor, module.weight).shape, strict=True))


@functools.cache
def _split_class(style: Style, base: type[nn.Module]) -> type[nn.Module]:
    """The class that a module of class `base` gets, a subclass of it."""
    if style is Style.REPLICATED:
        return _subclass(f"Replicated{base.__name__}", Replicated, base)
    for (of_style, plain), split in SPLIT_CLASSES.items():
        if of_style is style and issubclass(base, plain):
            # A forward of the subclass, as that of an embedding which scales its output, goes on to the split one.
            return split if base is plain else _subclass(f"{split.__name__}{base.__name__}", base, split)
    if issubclass(base, CHANNEL_LAYERS):
        return _subclass(f"{style.capitalize()}{base.__name__}", CHANNEL_CLASSES[style], base)
    return _subclass(CONV1D_CLASSES[style].__name__, CONV1D_CLASSES[style], base)


def _subclass(name: str, *bases: type) -> type[nn.Module]:
    return cast(type[nn.Module], type(name, bases, {}))


# ---- cut -------------------------------------------------------------------------------------------------------------


class TensorRanks(Protocol):
    """Of a communicator along tp, what a cut needs."""

    @property
    def rank(self) -> int: ...

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """The first rank's values go to all."""
        ...


@torch.no_grad()
def cut_model(
    initial: InitialModel,
    layout: TensorLayout,
    region: SplitRegion,
    tensor_ranks: TensorRanks,
    is_own: Callable[[str], bool],
) -> None:
    """Cut a model in place. Collective: the first rank's parameters and buffers go to all.

    is_own  whether this rank's stage computes with a parameter; others get shapes only, and no memory

    Of parameters whose parts can be had by themselves, such as those in files, each rank has its own.
    Parameters stay the same objects, so an optimizer made of them goes on with the shards.
    """
    model, index = initial.model, tensor_ranks.rank
    for name, parameter in model.named_parameters():  # each tied parameter once
        part = _own_part(initial.weights, parameter, layout.shards[name][index], tensor_ranks)
        parameter.data = part if is_own(name) else part.new_zeros(()).expand(part.shape)
    for buffer in model.buffers():
        tensor_ranks.broadcast(buffer)
    for name, counts in layout.counts.items():
        module = model.get_submodule(name)
        for attribute, count in counts.items():
            setattr(module, attribute, count)
    for name, style in layout.styles.items():
        module = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        own = {key: layout.shards[f"{prefix}{key}"][index] for key, _ in module.named_parameters(recurse=False)}
        split_layer(module, style, region, own)


def _own_part(
    weights: InitialWeights, parameter: nn.Parameter, shard: TensorShard, tensor_ranks: TensorRanks
) -> torch.Tensor:
    """This rank's part of a parameter's initial values. Collective."""
    part = None if shard.is_whole else weights.part(parameter, shard)
    if part is not None:
        return part
    whole = weights.whole(parameter)  # if weights are deferred: one at a time
    tensor_ranks.broadcast(whole)
    return whole if shard.is_whole else local_part(whole, shard)


def local_part(whole: torch.Tensor, shard: TensorShard) -> torch.Tensor:
    """A copy of the pieces that a shard names, in memory of its own."""
    if shard.is_whole:  # of a scalar too, which has no dim to take a piece of
        return whole.clone(memory_format=torch.contiguous_format)
    pieces = [whole.narrow(shard.dim, piece.start, piece.length) for piece in shard.pieces]
    return torch.cat(pieces, shard.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
