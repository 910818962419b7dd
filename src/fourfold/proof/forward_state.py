"""Forward state: what a model writes into its buffers and parameters while it runs forward.

changes    the state that has other values after a forward than before, by name
rewritten  the untrained state that a forward has written with the values that were there, but for rounding: a moving
           average that is where it goes, such as a target that is still a copy of the weights. A forward shows more of
           it if it begins with other values
Law: a model is refused if the state after a forward depends on the samples or on the number of forwards, unless the
plan says `batch_norm = "local"` and the state is not trained.

Buffers and parameters are compared. Plain Python attributes are not.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.proof.random_weights import near_values
from fourfold.proof.tolerance import is_close
from fourfold.proof.weight_write_check import EDIT_ADVICE, WeightWriteTracker, describe_trained, is_identical
from fourfold.torch_kit.fingerprint import fingerprints
from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.torch_private import own_buffers, version_of
from fourfold.words.error_notes import format_names
from fourfold.words.errors import Problem

# ---- problems ------------------------------------------------------------------------------------------------------


def sample_dependence_problems(names: Sequence[str], num_parts: int, trained: Collection[str] = ()) -> list[Problem]:
    """What is wrong with state that depends on the samples of a forward, if a batch is split into so many parts."""
    problems = []
    if buffers := [name for name in names if name not in trained]:
        got = f"forward writes {format_names(buffers)}, and the values depend on its samples"
        need = f"the same values after each of the {num_parts} parts that a batch is split into"
        attempt = 'batch_norm = "local", which keeps them per rank (not the same training)'
        problems.append(Problem(got, need, attempt))
    if weights := [name for name in names if name in trained]:
        got = f"forward writes {describe_trained(weights)}, and the values depend on its samples"
        need = f"the same weights on all ranks, and after each of the {num_parts} parts that a batch is split into"
        attempt = f"{EDIT_ADVICE}, from statistics that step.all_reduce(…) has summed over the ranks"
        problems.append(Problem(got, need, attempt))
    return problems


def forward_count_problems(names: Sequence[str], num_microbatches: int, trained: Collection[str] = ()) -> list[Problem]:
    """What is wrong with state that depends on how often a model runs forward."""
    problems, need = [], "state that does not depend on the number of forwards in a step"
    if buffers := [name for name in names if name not in trained]:
        got = f"each forward changes {format_names(buffers)}, and microbatches = {num_microbatches}"
        attempt = 'microbatches = 1, or batch_norm = "local" (not the same training)'
        problems.append(Problem(got, need, attempt))
    if weights := [name for name in names if name in trained]:
        got = f"each forward changes {describe_trained(weights)}, and microbatches = {num_microbatches}"
        problems.append(Problem(got, need, f"microbatches = 1, or {EDIT_ADVICE}"))
    return problems


def loss_state_problem(names: Sequence[str], num_parts: int) -> Problem:
    """What is wrong with state of the loss that changes with the samples, or with the number of calls."""
    got = f"the loss writes its own {format_names([name.partition('.')[2] for name in names])} each time it is called"
    need = f"a loss without such state: it is called for each of the {num_parts} parts that a batch is split into"
    return Problem(got, need, 'batch_norm = "local", which keeps the state per rank (not the same training)')


# ---- state ---------------------------------------------------------------------------------------------------------


StateChanges = Mapping[str, Tensor]
StateSummary = Mapping[str, Sequence[str]]


class StateSnapshot:
    """The state of a model before a forward."""

    def __init__(self, model: nn.Module, *, not_restored: Collection[str] = (), counts_renorms: bool = True) -> None:
        """`not_restored` and `counts_renorms` are those of `WeightWriteTracker`."""
        self._model = model
        # The buffers of TorchScript modules cannot be replaced, only written.
        modules = [module for module in model.modules() if isinstance(own_buffers(module), dict)]
        self._buffers = [(module, dict(own_buffers(module))) for module in modules]
        self._values = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        self._versions = {name: version_of(buffer) for name, buffer in model.named_buffers()}
        self.write_tracker = WeightWriteTracker(model, not_restored=not_restored, counts_renorms=counts_renorms)

    def changes(self) -> StateChanges:
        """The state with other values than before, by name: copies of buffers, fingerprints of parameters."""
        now = dict(self._model.named_buffers())
        changed = {
            n: b.clone() for n, b in now.items() if n not in self._values or not is_identical(b, self._values[n][1])
        }
        return {**changed, **self.write_tracker.changes()}

    def rewritten(self) -> list[str]:
        """The buffers of numbers, and the frozen parameters, that were written and have the values of before."""
        pairs = [
            (name, buffer, *self._values[name]) for name, buffer in self._model.named_buffers() if name in self._values
        ]
        buffers = [(n, b, value) for n, b, old, value in pairs if b is not old or version_of(b) != self._versions[n]]
        written = [*buffers, *self.write_tracker.frozen_writes()]
        return [n for n, now, before in written if now.shape == before.shape and _is_near(now, before)]

    def restore(self) -> None:
        """Restore all buffers, and the parameters that were copied."""
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
    """Within, forward may write any state; on exit the model is restored, but for parameters in `not_restored`."""
    with torch.no_grad():
        state = StateSnapshot(model, not_restored=not_restored, counts_renorms=counts_renorms)
    try:
        with state.write_tracker:
            yield state
    finally:
        with torch.no_grad():
            state.restore()


def _is_near(now: Tensor, before: Tensor) -> bool:
    if not now.is_floating_point():
        return False
    return is_close(before, now, 16 * torch.finfo(now.dtype).eps)


@contextlib.contextmanager
def moved_state(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Within, these buffers and frozen parameters have other values, near their own."""
    with torch.no_grad(), untracked_access():
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        before = [(tensors[name].data, tensors[name].data.clone()) for name in names]
        for name, (data, _) in zip(names, before, strict=True):
            data.copy_(near_values(name, data))
    try:
        yield
    finally:
        with torch.no_grad():
            for data, values in before:
                data.copy_(values)


def differing_across_forwards(forwards: Sequence[StateChanges]) -> list[str]:
    """The names whose values differ between forwards."""
    names = sorted({name for changes in forwards for name in changes})
    first, *others = forwards
    return [n for n in names if any(n not in c or n not in first or not is_identical(c[n], first[n]) for c in others)]


def summarize_changes(changes: StateChanges) -> dict[str, list[str]]:
    """Changes as ranks exchange them: fingerprints, or sum, norm and precision of floating-point values."""
    summary = {}
    for name, value in changes.items():
        if value.is_floating_point():
            wide = value.to(torch.float64)
            numbers = [wide.sum().item(), torch.linalg.vector_norm(wide).item(), torch.finfo(value.dtype).eps]
            summary[name] = [repr(number) for number in numbers]
        else:
            summary[name] = [str(number) for number in fingerprints([value])]
    return summary


def differing_across_ranks(summaries: Sequence[StateSummary]) -> list[str]:
    """The names whose values differ between ranks by more than rounding."""
    names = sorted({name for summary in summaries for name in summary})
    first, *others = summaries if summaries else [{}]
    return [
        n for n in names if any(n not in c or n not in first or not _is_close_summary(c[n], first[n]) for c in others)
    ]


def _is_close_summary(a: Sequence[str], b: Sequence[str]) -> bool:
    if a == b:
        return True
    if len(a) != 3 or len(b) != 3 or a[2] != b[2]:
        return False
    # Machines of different kinds round differently.
    (total, norm, eps), (other, other_norm, _) = map(float, a), map(float, b)
    tolerance = 16 * eps * max(norm, other_norm)
    return abs(total - other) <= tolerance and abs(norm - other_norm) <= tolerance
