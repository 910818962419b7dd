"""Masks: attention masks when every rank holds some of the queries and some of the keys.

key mask    [b, h, 1, l]: this rank's keys, for all queries (padding); it travels with the keys
query mask  [b, h, l or 1, L]: this rank's queries, for all keys in the order of the full sequence
starts      [b, l]: packed documents; a query attends to the keys from its document's start to itself

b is B or 1, h is H or 1. As in torch, a mask is boolean (True: attend) or is added to the scores.
Law: a number at or below half of its dtype's minimum means "not attended", as −inf does. Added to a score, such a
number would swallow the score, and the softmax would still give the key weight.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from fourfold.axes.context.rules.layout import TokenRange, TokenRanges
from fourfold.axes.context.work.document_mask import DocumentMask, check_starts
from fourfold.words.errors import Problem, TrainingError

WHERE = "attention over the context axis"  # in error messages


@dataclass(frozen=True)
class Mask:
    """A mask in one of the three forms, or none. `key_mask` is additive, in the dtype of the keys."""

    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    document_starts: Tensor | None = None


NO_MASK = Mask()


def parse_mask(mask: Tensor | None, queries: Tensor, keys: Tensor, size: int) -> Mask:
    """Bring a mask as torch's attention takes it into its form on an axis of `size` ranks. Raises TrainingError."""
    if mask is None:
        return NO_MASK
    if isinstance(mask, DocumentMask):
        check_starts(mask.starts, num_samples=queries.shape[0], num_tokens=keys.shape[-2])
        return Mask(document_starts=mask.starts)
    problem = _mask_problem(mask, queries, keys, size)
    if problem is not None:
        raise TrainingError(problem, where=WHERE)
    mask = mask.view(*(1,) * (4 - mask.ndim), *mask.shape)
    local = keys.shape[-2]
    if mask.shape[-1] == local * size:
        return Mask(query_mask=mask)
    return Mask(key_mask=to_additive(mask, keys.dtype))


def _mask_problem(mask: Tensor, queries: Tensor, keys: Tensor, size: int) -> Problem | None:
    local, length = keys.shape[-2], keys.shape[-2] * size
    got = f"an attention mask {list(mask.shape)} of {mask.dtype}"
    if mask.requires_grad:
        return Problem(f"{got} that requires a gradient", "a mask that does not require one", "mask.detach()")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return Problem(got, "a boolean or floating-point mask", "mask.bool()")
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    fits = mask.ndim <= 4 and shape[0] in (1, queries.shape[0]) and shape[1] in (1, queries.shape[1])
    forms = {(1, local), (1, length), (local, length)}
    if fits and shape[-2:] in forms:
        return None
    need = (
        f"[.., 1, {local}] (this rank's keys), or [.., {local} or 1, {length}] (this rank's queries by all keys), "
        f"for {queries.shape[0]} samples and {queries.shape[1]} heads"
    )
    attempt = "this rank's rows of the mask of the full sequence"
    return Problem(got, need, attempt)


def to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask in additive form, in this dtype; −inf means not attended."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -inf)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -inf).to(dtype)


def tile_mask(query_mask: Tensor, queries: TokenRange, columns: TokenRanges) -> Tensor:
    """The part of a query mask for the queries [start, stop) and the keys at these ranges of the full sequence."""
    if query_mask.shape[-2] > 1:
        query_mask = query_mask[..., queries[0] : queries[1], :]
    parts = [query_mask[..., start:stop] for start, stop in columns]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def fully_masked(mask: Tensor, *, is_causal: bool) -> Tensor:
    """Which queries may attend to no key: bool [b, h, rows or 1]. `mask` [b, h, rows or 1, keys] is additive.

    is_causal  there are as many queries as keys, and each query attends to the keys up to its own
    """
    attended = mask > -inf
    if not is_causal:
        return ~attended.any(-1)
    if attended.shape[-2] == 1:
        return attended.squeeze(-2).to(torch.uint8).cummax(-1).values == 0
    return ~attended.tril().any(-1)
