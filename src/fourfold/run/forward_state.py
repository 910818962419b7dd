"""Forward state: what a model writes into its buffers while it runs forward.

Law: a model whose forward leaves other buffers behind on other ranks, or for other numbers of microbatches, is refused;
unless the plan says `batch_norm = "local"`.

Seen are buffers, and parameters that are not trained. Attributes of Python are not.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.words.errors import Problem

Changes = Mapping[str, Tensor]


class Kept:
    """The state of a model before a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = [(module, dict(module._buffers)) for module in model.modules()]
        self._values = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        self._frozen = _digests(model)

    def changes(self) -> Changes:
        """What has other values than before, by name: the buffers' are copies, of a frozen parameter it is a digest."""
        now = dict(self._model.named_buffers())
        changed = {n: b.clone() for n, b in now.items() if n not in self._values or not same(b, self._values[n][1])}
        frozen = {n: d for n, d in _digests(self._model).items() if n in self._frozen and not same(d, self._frozen[n])}
        return changed | frozen

    def restore(self) -> None:
        """Put all buffers back. A frozen parameter that was written stays so: such a model is refused."""
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, value in self._values.values():
            if not same(buffer, value):
                buffer.copy_(value)


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[Kept]:
    """Within, forward may write what it likes: afterwards the model's buffers are as they were."""
    with torch.no_grad():
        state = Kept(model)
    try:
        yield state
    finally:
        with torch.no_grad():
            state.restore()


def same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def differing(runs: Sequence[Changes]) -> list[str]:
    """The names whose values, after forwards of different samples, are not the same."""
    names = sorted({name for changes in runs for name in changes})
    first, *others = runs
    return [n for n in names if any(n not in c or n not in first or not same(c[n], first[n]) for c in others)]


def dependent(names: Sequence[str], parts: int) -> Problem:
    """What is wrong with state that depends on the samples of a forward, where these are cut in so many parts."""
    got = f"forward writes {_some(names)}, from the samples it is given"
    need = f"state that is the same after each part of a batch that is cut in {parts}"
    return Problem(got, need, 'batch_norm = "local", for state of each rank\'s own (not the same training)')


def counting(names: Sequence[str], microbatches: int) -> Problem:
    """What is wrong with state that depends on how often a model runs forward."""
    got = f"each forward changes {_some(names)}, and microbatches = {microbatches}"
    attempt = 'microbatches = 1, or batch_norm = "local" (not the same training)'
    return Problem(got, "state that does not depend on how many forwards a step has", attempt)


def of_loss(names: Sequence[str], parts: int) -> Problem:
    """What is wrong with buffers of the loss that change with the samples, or with how often it is called."""
    got = f"the loss writes {_some([name.partition('.')[2] for name in names])} of its own each time that it is called"
    need = f"a loss without such state: it is called for each part of a batch that is cut in {parts}"
    return Problem(got, need, 'batch_norm = "local", for state of each rank\'s own (not the same training)')


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"


def _digests(model: nn.Module) -> dict[str, Tensor]:
    """Sum and norm of each parameter that is not trained: a copy of a large frozen model would not fit."""
    frozen = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad and p.is_floating_point()}
    wide = torch.float64
    return {n: torch.stack([p.sum(dtype=wide), torch.linalg.vector_norm(p, dtype=wide)]) for n, p in frozen.items()}
