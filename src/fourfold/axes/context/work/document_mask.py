"""Document masks: packed documents in one row, each token attending to the earlier tokens of its own document.

start   the position in its row of the first token of a token's document
bounds  a query at position i attends to the keys [start, i]
Law: attention with a document mask equals causal attention to each document alone. No mask of L × L is made, and no
score of two documents is computed.

B batch · H heads · L tokens of a row · l tokens of a rank · K head size
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.axes.context.rules.document_tiles import DocumentSpan
from fourfold.words.errors import Problem, TrainingError

WHERE = "attention with a document mask"
SDPA = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


class DocumentMask(Tensor):
    """The `attn_mask` of scaled_dot_product_attention for packed documents: int64 starts [B or 1, L].

    It is causal, with and without `is_causal=True`. With cp > 1, the starts are those of this rank's tokens, [B, l], as
    the step cuts them; their values remain positions in the whole row.
    """

    @staticmethod
    def __new__(cls, starts: Tensor) -> "DocumentMask":
        """Raises TrainingError for anything but int64 starts of two dims."""
        if not isinstance(starts, Tensor) or starts.dim() != 2 or starts.dtype != torch.int64:
            is_tensor = isinstance(starts, Tensor)
            got = f"{starts.dtype} {list(starts.shape)}" if is_tensor else type(starts).__name__
            need = "int64 [samples, tokens]: for each token, the position in its row at which its document starts"
            raise TrainingError(Problem(got, need, "DocumentMask(inputs['document_starts'])"), where=WHERE)
        return starts.as_subclass(cls)

    @property
    def starts(self) -> Tensor:
        """The starts as an ordinary tensor."""
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in SDPA:
            return _attend(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, tuple(args), dict(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not isinstance(attn_mask, DocumentMask):
        raise TrainingError(Problem("a DocumentMask as a query, key or value", "attn_mask=DocumentMask"), where=WHERE)
    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    return document_attention(query, key, value, attn_mask.starts, **options)


def document_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, **options: Any) -> Tensor:
    """Causal attention within documents, where this rank has all tokens: q, k, v [B, (H,) L, K], starts [B or 1, L].

    `options` are those of scaled_dot_product_attention. Raises TrainingError for starts that fit no documents.
    """
    check_starts(starts, num_samples=q.shape[0], num_tokens=q.shape[-2])
    if q.is_meta:  # shapes are asked for, and no start is known
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    rows = []
    for sample, spans in _samples(starts, [(0, starts.shape[-1])]):
        parts, begin = [], 0
        for _, num_tokens in spans:
            tokens = (sample, ..., slice(begin, begin + num_tokens), slice(None))
            parts.append(F.scaled_dot_product_attention(q[tokens], k[tokens], v[tokens], is_causal=True, **options))
            begin += num_tokens
        rows.append(torch.cat(parts, dim=-2))
    return torch.cat(rows) if rows else F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def _samples(starts: Tensor, ranges: Sequence[tuple[int, int]]) -> list[tuple[slice, Sequence[DocumentSpan]]]:
    """The samples that have the same spans, with these."""
    spans = document_spans(starts, ranges)
    if len(spans) == 1:
        return [(slice(None), spans[0])]
    return [(slice(sample, sample + 1), each) for sample, each in enumerate(spans)]


def document_spans(starts: Tensor, ranges: Sequence[tuple[int, int]]) -> list[list[DocumentSpan]]:
    """The documents of a rank's tokens, for each row of starts [B or 1, l]. `ranges`: the tokens' positions in the row.

    Raises TrainingError for a start behind its token, or within a document.
    """
    positions = torch.cat([torch.arange(*each, device=starts.device) for each in ranges])
    changes = starts[:, 1:] != starts[:, :-1]
    # Where a document changes between neighbours in the row, the new one starts there.
    is_neighbour = (positions[1:] == positions[:-1] + 1) & (starts[:, 1:] != positions[1:])
    wrong = (starts > positions) | (starts < 0)
    wrong[:, 1:] |= (changes & is_neighbour) | (starts[:, 1:] < starts[:, :-1])
    if bool(wrong.any()):
        sample, token = wrong.nonzero()[0].tolist()
        got = f"sample {sample}, token {int(positions[token])}: document start {int(starts[sample, token])}"
        need = "the position in the row of the first token of the token's document"
        raise TrainingError(Problem(got, need, "document_starts as in a packed row: not split or shifted"), where=WHERE)
    found = []
    for row in starts:
        values, counts = torch.unique_consecutive(row, return_counts=True)
        found.append([DocumentSpan(*each) for each in zip(values.tolist(), counts.tolist(), strict=True)])
    return found


def check_starts(starts: Tensor, *, num_samples: int, num_tokens: int) -> None:
    """Raise TrainingError unless starts are [B or 1, l]."""
    if starts.shape[0] in (1, num_samples) and starts.shape[1] == num_tokens:
        return
    got, need = f"document starts {list(starts.shape)}", f"[{num_samples} or 1, {num_tokens}]: one for each token"
    raise TrainingError(Problem(got, need, "the rows of these samples"), where=WHERE)
