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
from fourfold.parts.torch_private import own_buffers
from fourfold.step.dry_run.weight_write_tracker import WeightWriteTracker, is_identical
from fourfold.words.errors import Problem

StateChanges = Mapping[str, Tensor]
StateSummary = Mapping[str, Sequence[str]]
EDIT_ADVICE = "the write after the step, inside step.edit()"


class StateSnapshot:
    """The state of a model before a forward."""

    def __init__(self, model: nn.Module, *, not_restored: Collection[str] = (), counts_renorms: bool = True) -> None:
        """`kept`, `renorms`: as for `WeightWrites`."""
        self._model = model
        # Those of TorchScript cannot be replaced, only written.
        modules = [module for module in model.modules() if isinstance(own_buffers(module), dict)]
        self._buffers = [(module, dict(own_buffers(module))) for module in modules]
        self._values = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        self.write_tracker = WeightWriteTracker(model, not_restored=not_restored, counts_renorms=counts_renorms)

    def changes(self) -> StateChanges:
        """What has other values than before, by name: copies of buffers, fingerprints of parameters."""
        now = dict(self._model.named_buffers())
        changed = {
            n: b.clone() for n, b in now.items() if n not in self._values or not is_identical(b, self._values[n][1])
        }
        return {**changed, **self.write_tracker.changes()}

    def restore(self) -> None:
        """Put all buffers back, and the parameters that were copied."""
        for module, buffers in self._buffers:
            own_buffers(module).clear()
            own_buffers(module).update(buffers)
        for buffer, value in self._values.values():
            if not is_identical(buffer, value):
                buffer.copy_(value)
        self.write_tracker.restore()


@contextlib.contextmanager
def preserve_state(
    model: nn.Module, *, not_restored: Collection[str] = (), counts_renorms: bool = True
) -> Iterator[StateSnapshot]:
    """Within, forward may write what it likes: afterwards the model is as it was. Parameters in `kept` are not."""
    with torch.no_grad():
        state = StateSnapshot(model, not_restored=not_restored, counts_renorms=counts_renorms)
    try:
        with state.write_tracker:
            yield state
    finally:
        with torch.no_grad():
            state.restore()


def differing_across_forwards(runs: Sequence[StateChanges]) -> list[str]:
    """The names whose values, after forwards of different samples, are not the same."""
    names = sorted({name for changes in runs for name in changes})
    first, *others = runs
    return [n for n in names if any(n not in c or n not in first or not is_identical(c[n], first[n]) for c in others)]


def summarize_changes(changes: StateChanges) -> dict[str, list[str]]:
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


def differing_across_ranks(runs: Sequence[StateSummary]) -> list[str]:
    """The names whose values, on ranks with different samples, are not the same, but for rounding."""
    names = sorted({name for changes in runs for name in changes})
    first, *others = runs if runs else [{}]
    return [
        n for n in names if any(n not in c or n not in first or not _is_close_summary(c[n], first[n]) for c in others)
    ]


def _is_close_summary(a: Sequence[str], b: Sequence[str]) -> bool:
    if a == b:
        return True
    if len(a) != 3 or len(b) != 3 or a[2] != b[2]:
        return False
    # Machines that are not alike round differently.
    (total, norm, eps), (other, other_norm, _) = map(float, a), map(float, b)
    most = 16 * eps * max(norm, other_norm)
    return abs(total - other) <= most and abs(norm - other_norm) <= most


def sample_dependence_problems(names: Sequence[str], num_parts: int, trained: Collection[str] = ()) -> list[Problem]:
    """What is wrong with state that depends on the samples of a forward, where these are cut in so many parts."""
    problems = []
    if others := [name for name in names if name not in trained]:
        got = f"forward writes {_format_names(others)}, from the samples it is given"
        need = f"state that is the same after each part of a batch that is cut in {num_parts}"
        attempt = 'batch_norm = "local", for state of each rank\'s own (not the same training)'
        problems.append(Problem(got, need, attempt))
    if weights := [name for name in names if name in trained]:
        got = f"forward writes {describe_trained(weights)}, from the samples it is given"
        need = f"weights that are the same on all ranks, and after each part of a batch that is cut in {num_parts}"
        attempt = f"{EDIT_ADVICE}, with statistics that step.sum(…) has added up over the ranks"
        problems.append(Problem(got, need, attempt))
    return problems


def forward_count_problems(names: Sequence[str], num_microbatches: int, trained: Collection[str] = ()) -> list[Problem]:
    """What is wrong with state that depends on how often a model runs forward."""
    problems, need = [], "state that does not depend on how many forwards a step has"
    if others := [name for name in names if name not in trained]:
        got = f"each forward changes {_format_names(others)}, and microbatches = {num_microbatches}"
        attempt = 'microbatches = 1, or batch_norm = "local" (not the same training)'
        problems.append(Problem(got, need, attempt))
    if weights := [name for name in names if name in trained]:
        got = f"each forward changes {describe_trained(weights)}, and microbatches = {num_microbatches}"
        problems.append(Problem(got, need, f"microbatches = 1, or {EDIT_ADVICE}"))
    return problems


def loss_state_problem(names: Sequence[str], num_parts: int) -> Problem:
    """What is wrong with state of the loss that changes with the samples, or with how often it is called."""
    written = _format_names([name.partition(".")[2] for name in names])
    got = f"the loss writes {written} of its own each time that it is called"
    need = f"a loss without such state: it is called for each part of a batch that is cut in {num_parts}"
    return Problem(got, need, 'batch_norm = "local", for state of each rank\'s own (not the same training)')


def describe_trained(names: Sequence[str]) -> str:
    return f"{_format_names(names)}, which {'is' if len(names) == 1 else 'are'} trained"


def _format_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
