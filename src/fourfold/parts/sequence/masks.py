"""Masks of attention where every rank has some of the queries and some of the keys.

keys   [b, h, 1, l]: of this rank's keys, for all queries (padding); it travels with them
rows   [b, h, l or 1, L]: of this rank's queries, for all keys in the order of the whole sequence (packed documents)

b and h are B and H, or 1. As in torch a mask is boolean, True where a query attends, or is added to the scores.
Numbers at or below half of the least of their dtype mean "not attended", as −inf does: added up they would lose what
they are added to, and with them a row's share of the sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.plan.sequence import TokenRange, TokenRanges
from fourfold.words.errors import Problem, TrainingError

INF = float("inf")


@dataclass(frozen=True)
class Mask:
    """A mask in one of the two forms, or none. `keys` is one that is added, in the keys' dtype."""

    key_mask: Tensor | None = None
    query_mask: Tensor | None = None


NO_MASK = Mask()


def parse_mask(mask: Tensor | None, queries: Tensor, keys: Tensor, size: int) -> Mask:
    """A mask as torch's attention takes it -> its form on an axis of `size` ranks. Raises TrainingError."""
    if mask is None:
        return NO_MASK
    problem = _mask_problem(mask, queries, keys, size)
    if problem is not None:
        raise TrainingError(problem, where="attention over the sequence axis")
    mask = mask.view(*(1,) * (4 - mask.ndim), *mask.shape)
    local = keys.shape[-2]
    if mask.shape[-1] == local * size:
        return Mask(query_mask=mask)
    return Mask(key_mask=to_additive(mask, keys.dtype))


def _mask_problem(mask: Tensor, queries: Tensor, keys: Tensor, size: int) -> Problem | None:
    local, whole = keys.shape[-2], keys.shape[-2] * size
    got = f"a mask {list(mask.shape)} of {mask.dtype}"
    if mask.requires_grad:
        return Problem(f"{got} that wants a gradient", "one that does not", "mask.detach()")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return Problem(got, "a boolean or a floating-point one", "mask.bool()")
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    fits = mask.ndim <= 4 and shape[0] in (1, queries.shape[0]) and shape[1] in (1, queries.shape[1])
    forms = {(1, local), (1, whole), (local, whole)}
    if fits and shape[-2:] in forms:
        return None
    need = (
        f"[.., 1, {local}]: this rank's keys, or [.., {local} or 1, {whole}]: this rank's queries by all keys "
        f"({list(queries.shape[:2])} samples and heads)"
    )
    attempt = "the rows of the mask of the whole sequence that are this rank's"
    return Problem(got, need, attempt)


def to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as one that is added, of this dtype: −inf is not attended."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -INF)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -INF).to(dtype)


def tile_mask(rows: Tensor, queries: TokenRange, columns: list[TokenRange]) -> Tensor:
    """Of a mask of rows, those of the queries (or all), by the keys of these spans of the whole sequence."""
    if rows.shape[-2] > 1:
        rows = rows[..., queries[0] : queries[1], :]
    parts = [rows[..., start:stop] for start, stop in columns]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def key_ranges(spans: TokenRanges, keys: TokenRange) -> list[TokenRange]:
    """Where in the whole sequence the keys [start, stop) of a rank with these spans are."""
    found, passed = [], 0
    for start, stop in spans:
        first, last = max(keys[0] - passed, 0), min(keys[1] - passed, stop - start)
        if first < last:
            found.append((start + first, start + last))
        passed += stop - start
    return found


def fully_masked(mask: Tensor, *, is_causal: bool) -> Tensor:
    """bool [b, h, rows or 1]: the queries that may attend to no key; `mask` [b, h, rows or 1, keys] is added.

    `causal`: there are as many queries as keys, and each sees those up to its own.
    """
    seen = mask > -INF
    if not is_causal:
        return ~seen.any(-1)
    if seen.shape[-2] == 1:
        return seen.squeeze(-2).to(torch.uint8).cummax(-1).values == 0
    return ~seen.tril().any(-1)
