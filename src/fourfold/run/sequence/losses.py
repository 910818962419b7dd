"""Losses: what a loss of a part of the tokens says of the whole.

even     each rank's part has as many elements as the others': then the mean of their means is the mean
ignored  the targets that torch's own losses leave out, as they were called
Law: the ranks' sums and counts add up to those of the whole, or the loss is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fourfold.run.batch import has_tokens, leaves, measure
from fourfold.run.sequence.route import Call, routed
from fourfold.run.sequence.tokens import Share
from fourfold.words.errors import Problem, TaskError

VALUES = 'unreduced values (reduction="none"), or a pair (sum, count)'
CLOSE = 1e-3
# Where `ignore_index` stands among the arguments.
IGNORING = {F.cross_entropy: 4, F.nll_loss: 4}


class Sum(NamedTuple):
    """A loss, as a sum over elements."""

    total: float
    elements: float

    @property
    def mean(self) -> float:
        return self.total / self.elements if self.elements else 0.0


class Value(NamedTuple):
    """A loss, whether it was given as a mean, and the targets it has left out."""

    sum: Sum
    is_mean: bool
    ignored: list[int]


def observed(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any, samples: int) -> Value:
    """The value of a loss, and how it was come by."""
    ignored = []

    def watch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in IGNORING:
            place = IGNORING[func]
            ignored.append(int(args[place] if len(args) > place else kwargs.get("ignore_index", -100)))

    with routed(Call.plain, watch=watch):
        value = loss(outputs, targets)
    is_mean = isinstance(value, Tensor) and value.dim() == 0
    measured = measure(value, samples)
    return Value(Sum(float(measured.total), measured.count), is_mean, ignored)


def refuse_uneven(targets: Any, shares: Sequence[Share], ignored: Sequence[int], *, lengths: str) -> None:
    """Raise TaskError where the means of parts are no mean: some part has fewer targets. On all ranks alike.

    lengths: those that divide, in words.
    """
    length = shares[0].length
    counts = [share.size if share.kept is None else len(share.kept) for share in shares]
    what, attempt = f"{length} tokens, which do not divide", f"{VALUES}, or {lengths}"
    for target in leaves(targets) if len(set(counts)) == 1 else ():
        if not has_tokens(target, length) or target.is_floating_point():
            continue
        for index in {-100, *ignored}:
            told = (target != index).sum(0)
            counts = [int(sum(int(told[start:stop].sum()) for start, stop in share.spans)) for share in shares]
            what, attempt = f"targets with {index}, which is ignored", VALUES
            if len(set(counts)) > 1:
                break
    if len(set(counts)) > 1:
        got = f"sp = {len(shares)}, a loss that is a mean, and {what}: {counts} targets by rank"
        raise TaskError(
            Problem(got, "as many on every rank, or a loss that can be added up", attempt), where="the loss"
        )


def adding_up(whole: Sum, parts: Sequence[Sum], *, is_mean: bool) -> Problem | None:
    """What is wrong with a loss whose parts are not the whole's."""
    added = Sum(sum(part.total for part in parts), sum(part.elements for part in parts))
    counted = is_mean or added.elements == whole.elements
    if counted and abs(added.mean - whole.mean) <= CLOSE * max(abs(whole.mean), 1e-6):
        return None
    got = f"sp = {len(parts)}, a loss of {whole.mean:.6g} over {whole.elements:g} elements for all tokens"
    got += f", and {added.mean:.6g} over {added.elements:g} for the ranks' parts"
    need = "a loss of each token's output and its own target"
    return Problem(got, need, "targets that the data has shifted, and " + VALUES)
