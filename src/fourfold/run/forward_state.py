"""Forward state: what a model writes into its buffers and parameters while it runs forward.

trained    a parameter that the optimizer updates
Law: a model whose forward leaves other state behind on other ranks, or for other numbers of microbatches, is refused;
unless the plan says `batch_norm = "local"`, and the state is not trained.

Seen are buffers and parameters. Attributes of Python are not.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.parts.fingerprint import fingerprints
from fourfold.run.weight_writes import WeightWrites, same
from fourfold.words.errors import Problem

Changes = Mapping[str, Tensor]
Summary = Mapping[str, Sequence[str]]
EDIT = "the write after the step, inside step.edit()"


class Kept:
    """The state of a model before a forward."""

    def __init__(self, model: nn.Module, *, kept: Collection[str] = (), renorms: bool = True) -> None:
        """`kept`, `renorms`: as for `WeightWrites`."""
        self._model = model
        # Those of TorchScript cannot be replaced, only written.
        modules = [module for module in model.modules() if isinstance(module._buffers, dict)]
        self._buffers = [(module, dict(module._buffers)) for module in modules]
        self._values = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        self.writes = WeightWrites(model, kept=kept, renorms=renorms)

    def changes(self) -> Changes:
        """What has other values than before, by name: copies of buffers, fingerprints of parameters."""
        now = dict(self._model.named_buffers())
        changed = {n: b.clone() for n, b in now.items() if n not in self._values or not same(b, self._values[n][1])}
        return {**changed, **self.writes.changes()}

    def restore(self) -> None:
        """Put all buffers back, and the parameters that were copied."""
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, value in self._values.values():
            if not same(buffer, value):
                buffer.copy_(value)
        self.writes.restore()


@contextlib.contextmanager
def kept(model: nn.Module, *, kept: Collection[str] = (), renorms: bool = True) -> Iterator[Kept]:
    """Within, forward may write what it likes: afterwards the model is as it was. Parameters in `kept` are not."""
    with torch.no_grad():
        state = Kept(model, kept=kept, renorms=renorms)
    try:
        with state.writes:
            yield state
    finally:
        with torch.no_grad():
            state.restore()


def differing(runs: Sequence[Changes]) -> list[str]:
    """The names whose values, after forwards of different samples, are not the same."""
    names = sorted({name for changes in runs for name in changes})
    first, *others = runs
    return [n for n in names if any(n not in c or n not in first or not same(c[n], first[n]) for c in others)]


def summary(changes: Changes) -> dict[str, list[str]]:
    """Changes in a form that ranks can exchange: exact numbers, or sum, norm and precision of floating-point ones."""
    found = {}
    for name, value in changes.items():
        if value.is_floating_point():
            wide = value.to(torch.float64)
            numbers = [wide.sum().item(), torch.linalg.vector_norm(wide).item(), torch.finfo(value.dtype).eps]
            found[name] = [repr(number) for number in numbers]
        else:
            found[name] = [str(number) for number in fingerprints([value])]
    return found


def differing_summaries(runs: Sequence[Summary]) -> list[str]:
    """The names whose values, on ranks with different samples, are not the same, but for rounding."""
    names = sorted({name for changes in runs for name in changes})
    first, *others = runs if runs else [{}]
    return [n for n in names if any(n not in c or n not in first or not _alike(c[n], first[n]) for c in others)]


def _alike(a: Sequence[str], b: Sequence[str]) -> bool:
    if a == b:
        return True
    if len(a) != 3 or len(b) != 3 or a[2] != b[2]:
        return False
    # Machines that are not alike round differently.
    (total, norm, eps), (other, other_norm, _) = map(float, a), map(float, b)
    most = 16 * eps * max(norm, other_norm)
    return abs(total - other) <= most and abs(norm - other_norm) <= most


def dependent(names: Sequence[str], parts: int, trained: Collection[str] = ()) -> list[Problem]:
    """What is wrong with state that depends on the samples of a forward, where these are cut in so many parts."""
    problems = []
    if others := [name for name in names if name not in trained]:
        got = f"forward writes {_some(others)}, from the samples it is given"
        need = f"state that is the same after each part of a batch that is cut in {parts}"
        attempt = 'batch_norm = "local", for state of each rank\'s own (not the same training)'
        problems.append(Problem(got, need, attempt))
    if weights := [name for name in names if name in trained]:
        got = f"forward writes {told_trained(weights)}, from the samples it is given"
        need = f"weights that are the same on all ranks, and after each part of a batch that is cut in {parts}"
        attempt = f"{EDIT}, with statistics that step.sum(…) has added up over the ranks"
        problems.append(Problem(got, need, attempt))
    return problems


def counting(names: Sequence[str], microbatches: int, trained: Collection[str] = ()) -> list[Problem]:
    """What is wrong with state that depends on how often a model runs forward."""
    problems, need = [], "state that does not depend on how many forwards a step has"
    if others := [name for name in names if name not in trained]:
        got = f"each forward changes {_some(others)}, and microbatches = {microbatches}"
        attempt = 'microbatches = 1, or batch_norm = "local" (not the same training)'
        problems.append(Problem(got, need, attempt))
    if weights := [name for name in names if name in trained]:
        got = f"each forward changes {told_trained(weights)}, and microbatches = {microbatches}"
        problems.append(Problem(got, need, f"microbatches = 1, or {EDIT}"))
    return problems


def of_loss(names: Sequence[str], parts: int) -> Problem:
    """What is wrong with state of the loss that changes with the samples, or with how often it is called."""
    got = f"the loss writes {_some([name.partition('.')[2] for name in names])} of its own each time that it is called"
    need = f"a loss without such state: it is called for each part of a batch that is cut in {parts}"
    return Problem(got, need, 'batch_norm = "local", for state of each rank\'s own (not the same training)')


def told_trained(names: Sequence[str]) -> str:
    return f"{_some(names)}, which {'is' if len(names) == 1 else 'are'} trained"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
