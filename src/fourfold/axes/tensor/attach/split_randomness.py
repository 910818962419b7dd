"""Split randomness: random numbers that a model draws for activations which are split over the tensor axis.

draw   a call of dropout, of attention with dropout, or of a function that makes random numbers
slice  the part of the whole model's tensor that this rank draws for
Law: tensor ranks have equal states, and draw the same numbers, which is right for whole activations. For split ones,
the slices of a tensor would have equal masks: each rank draws others, by its slice. A draw for which that cannot be
done is refused.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fourfold.axes.tensor.attach.tensor_parts import TensorPlace
from fourfold.model import sdpa_interception
from fourfold.model.fixed_random import DROPOUT_FUNCTIONS, RANDOM_FUNCTION_NAMES
from fourfold.model.rank_dropout import DrawSlice, FoundDraw
from fourfold.plan.param_spec import TensorShard
from fourfold.proof.grad_projections import is_close
from fourfold.proof.module_trace import ModuleTrace
from fourfold.torch_kit.param_access import restore_arguments
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import DisableTorchFunction, is_in_backward
from fourfold.words.errors import Problem

COMPOSITES = {F.multi_head_attention_forward}
"""Whose dropouts are replaced inside of them."""
REPLACED_FUNCTIONS = {*sdpa_interception.DROPOUT_FUNCTIONS, sdpa_interception.SDPA, *COMPOSITES}
"""Those for which a rank can draw the numbers of its slice."""


class Draw(NamedTuple):
    """A draw: the module that made it, what drew (for messages), and the tensor that it was for.

    function  of torch
    """

    module: str
    what: str
    tensor: Tensor
    function: Any


class FoundDraws(NamedTuple):
    """The draws whose slices are known, in the order of the forward, and those that are not right on split features."""

    known: Sequence[FoundDraw]
    refused: Sequence[Draw]


class DrawRecorder(TorchFunctionMode):
    """Records the draws of a forward."""

    def __init__(self, trace: ModuleTrace) -> None:
        super().__init__()
        self._trace = trace
        self.draws: list[Draw] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = restore_arguments(func, args, kwargs or {})
        original = sdpa_interception.original_function(func)
        what = None if is_in_backward() else _what_draws(original, args, kwargs)
        result = func(*args, **kwargs)
        if what is not None:
            # Of a function that makes random numbers, what it has made; of dropout, its input; of attention, queries.
            given = kwargs.get("query", kwargs.get("input"))
            tree = (result,) if what in RANDOM_FUNCTION_NAMES else (args, given, kwargs)
            with DisableTorchFunction():
                tensor = next(tree_leaves(tree), None)
                if tensor is not None:
                    self.draws.append(Draw(self._trace.current, what, tensor.detach(), original))
        return result


def find_draws(
    whole: Sequence[Draw], local: Sequence[Draw], place: TensorPlace, shards: Iterable[TensorShard]
) -> FoundDraws:
    """The draws of the model that is cut, next to those of the whole model. `shards`: of the weights that are split."""
    shards, numbered = list(shards), dict(_numbered(whole))
    known, refused = [], []
    for key, mine in _numbered(local):
        try:
            part = _find(numbered.get(key), mine, place, shards)
        except LookupError:
            refused.append(mine)
            continue
        if mine.function in REPLACED_FUNCTIONS:
            known.append(FoundDraw(mine.module, part))
    return FoundDraws(known, refused)


def _numbered(draws: Sequence[Draw]) -> Iterator[tuple[tuple[str, str, int], Draw]]:
    """Each draw, and which of its module's draws of its kind it is."""
    counts: Counter[tuple[str, str]] = Counter()
    for draw in draws:
        counts[draw[:2]] += 1
        yield (*draw[:2], counts[draw[:2]]), draw


def _find(whole: Draw | None, local: Draw, place: TensorPlace, shards: Sequence[TensorShard]) -> DrawSlice | None:
    """The slice of a draw. Raises LookupError if there is none, or if no other numbers can be drawn for it."""
    if whole is None:
        raise LookupError
    if local.function in REPLACED_FUNCTIONS - COMPOSITES:
        return find_slice(whole.tensor, local.tensor, place, shards)
    is_same = whole.tensor.shape == local.tensor.shape
    if not is_same or not (local.what in RANDOM_FUNCTION_NAMES or is_close(whole.tensor, local.tensor)):
        raise LookupError
    return None


def find_slice(whole: Tensor, local: Tensor, place: TensorPlace, shards: Iterable[TensorShard]) -> DrawSlice | None:
    """The slice of `whole` that `local` is. `shards`: those of the weights by which features may be split here.

    Raises LookupError if it is no slice of one dim.
    """
    dims = [dim for dim in range(whole.dim()) if whole.dim() == local.dim() and whole.shape[dim] != local.shape[dim]]
    if whole.shape == local.shape and is_close(whole, local):
        return None
    if len(dims) != 1:
        raise LookupError
    (dim,) = dims
    if any(is_close(each, local) for each in place.token_parts(whole, local)):
        return DrawSlice(whole.dim(), dim, ((place.number, place.number + 1),), is_of_tokens=True)
    length, own = whole.shape[dim], local.shape[dim]
    for fold in _divisors(math.gcd(length, own)):
        full, part = (tensor.unflatten(dim, (fold, -1)) for tensor in (whole, local))
        for ranges in _candidates(length // fold, own // fold, place, shards if fold == 1 else ()):
            expected = torch.cat([full.narrow(dim + 1, start, stop - start) for start, stop in ranges], dim + 1)
            if is_close(expected, part):
                return DrawSlice(whole.dim(), dim, ranges, fold)
    raise LookupError


def _candidates(
    length: int, own: int, place: TensorPlace, shards: Iterable[TensorShard]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ranges that a rank may have of `length` features, if it has `own`."""
    if own and length % own == 0:
        # An equal share; or the same one as other ranks, where there are fewer of them than ranks.
        start = place.number * (length // own) // place.size * own
        yield ((start, start + own),)
    for shard in shards:
        if shard.shape and shard.shape[shard.dim] == length and shard.local_shape[shard.dim] == own:
            yield tuple((piece.start, piece.stop) for piece in shard.pieces)


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _what_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What a call draws for, in words; None: it draws nothing."""
    name = getattr(func, "__name__", "")
    if func in DROPOUT_FUNCTIONS:
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
        kind = "dropout" if func in sdpa_interception.DROPOUT_FUNCTIONS else name
        return f"{kind} = {p:g}" if p > 0 and training else None
    if func is sdpa_interception.SDPA:
        p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return f"attention with dropout_p = {p:g}" if p > 0 else None
    if func is F.multi_head_attention_forward:
        p = kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0)
        return f"attention with dropout_p = {p:g}" if p > 0 and kwargs.get("training", True) else None
    return name if name in RANDOM_FUNCTION_NAMES else None


def with_slices_of_one_token(by_rank: Sequence[Sequence[FoundDraw]]) -> list[list[FoundDraw]]:
    """The draws of the tensor ranks of a place, of a dry run that may have had one token.

    The first rank has all of it then, and takes its slice for a whole tensor; the others have none of it.
    """
    found = [list(draws) for draws in by_rank]
    for number, (draw, *others) in enumerate(zip(*found, strict=False)):
        parts = {None if other.part is None else other.part._replace(ranges=()) for other in others}
        part = parts.pop() if len(parts) == 1 else None
        if draw.part is None and part is not None and part.is_of_tokens:
            found[0][number] = FoundDraw(draw.module, part._replace(ranges=((0, 1),)))
    return found


def slices_mismatch(by_rank: Sequence[Sequence[FoundDraw]]) -> Problem | None:
    """What is wrong if the tensor ranks of a place do not all draw for whole tensors in the same calls."""
    kinds = [[(draw.module, draw.part is None) for draw in draws] for draws in by_rank]
    if all(each == kinds[0] for each in kinds):
        return None
    got = "tensor ranks with different draws of dropout, or with a whole tensor where others have a slice"
    return Problem(got, "dropout at the same places on each of them", "dropout = 0, or tp = 1")
