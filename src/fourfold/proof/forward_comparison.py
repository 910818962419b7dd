"""Forward comparison: a few samples in one forward, against the same samples in two.

full       the samples of a microbatch in one forward
parts      the same samples in two forwards of different sizes
state      buffers and parameters of the model and of the loss's modules; plain Python attributes are not compared
changes    the state that has other values after a forward than before, by name
rewritten  the untrained state that a forward has written with the values that were there, but for rounding: a moving
           average that is where it goes, such as a target that is still a copy of the weights. A forward shows more of
           it if it begins with other values
Law: a loss that is a mean has the same value for the full samples and for the parts, each weighted by its count.
Law: a model is refused if the state after a forward depends on the samples or on the number of forwards, unless the
plan says `batch_norm = "local"` and the state is not trained.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fourfold.model.batch import (
    Microbatch,
    batch_and_parts,
    num_samples,
    repeated_and_parts,
    slice_samples,
    split_microbatches,
    unpack_batch,
)
from fourfold.model.fixed_random import without_randomness
from fourfold.model.model_call import call_model, eval_mode
from fourfold.model.objective import ForwardResult, Objective
from fourfold.plan.batch_split import BatchSplit
from fourfold.proof.checks import preserve_module
from fourfold.proof.grad_projections import is_close
from fourfold.proof.loss_check import LossComparison, compare_losses, count_problem
from fourfold.proof.loss_probes import probe_loss, probe_model_loss
from fourfold.proof.random_weights import near_values
from fourfold.proof.weight_write_check import (
    EDIT_ADVICE,
    WeightWriteCheck,
    WeightWriteTracker,
    describe_trained,
    is_identical,
)
from fourfold.torch_kit.fingerprint import fingerprints
from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.tensor_tree import detached_clone, tree_leaves, tree_map
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
T = TypeVar("T")


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


def differing(found: Sequence[Mapping[str, T]], is_same: Callable[[T, T], bool]) -> list[str]:
    """The names whose values are not in all of these, or not the same."""
    names = sorted({name for each in found for name in each})
    first, *others = found if found else [{}]
    return [n for n in names if any(n not in c or n not in first or not is_same(c[n], first[n]) for c in others)]


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


def is_close_summary(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether two of these differ by rounding only."""
    if a == b:
        return True
    if len(a) != 3 or len(b) != 3 or a[2] != b[2]:
        return False
    # Machines of different kinds round differently.
    (total, norm, eps), (other, other_norm, _) = map(float, a), map(float, b)
    tolerance = 16 * eps * max(norm, other_norm)
    return abs(total - other) <= tolerance and abs(norm - other_norm) <= tolerance


# ---- forward comparison ---------------------------------------------------------------------------------------------


# What a model raises that takes only a fixed number of samples.
_SIZE_ERRORS = (RuntimeError, ValueError, IndexError)


class DryRunForward(NamedTuple):
    """One forward of the dry run, and what it wrote."""

    result: ForwardResult | None
    """None where the loss is not computed."""
    part: Microbatch
    state_changes: StateChanges
    loss_state_changes: StateChanges
    """What it wrote into buffers and parameters of the loss's modules."""
    has_writes: bool
    """Whether it wrote any state or parameter, even the value that was there already."""
    rewritten: Sequence[str]
    """What it wrote with the values that were there."""
    has_randomness: bool
    min_itemsize: int
    num_elements: int
    """How many numbers its operations have computed."""

    @property
    def num_samples(self) -> int:
        return self.part.num_samples


class ComparedBatch(NamedTuple):
    """The samples that this rank has compared, and how many numbers a forward computes for each of them."""

    batch: Any
    elements_per_sample: int


class ForwardComparison:
    """Compares forwards on one rank. It keeps the batch of the last comparison."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        split: BatchSplit,
        device: torch.device,
        weight_check: WeightWriteCheck,
    ) -> None:
        self._model, self._objective, self._split, self._device = model, objective, split, device
        self._weight_check = weight_check
        self._compares_state = True
        """Whether untrained state is compared; trained weights always are."""
        self.compared_batch: ComparedBatch | None = None

    def run(self, batch: Any, *, training: bool) -> dict[str, Any]:
        """Run the forwards for a batch that is not empty. Returns this rank's part of the dry run's report."""
        total = num_samples(batch)
        size = min(total, max(2, -(-total // self._split.num_microbatches)))
        batch = tree_map(slice_samples(batch, 0, size), lambda tensor: tensor.to(self._device))
        # With "local", each part has batch statistics of its own, so the losses of the parts do not make up the full
        # loss.
        is_local = self._split.has_local_batch_norm
        self._compares_state = training and not is_local
        if training and (is_local or self._split.num_parts == 1):
            self._forward(batch)  # only for its writes into weights, which are refused in any case
            if self._split.num_parts == 1:
                return {}
        with eval_mode(self._model) if is_local or not training else contextlib.nullcontext():
            full = self._forward(batch)
            if full.num_samples > 1 and self._objective.is_shape_1_scalar is None:
                self._objective.is_shape_1_scalar = _has_shape_1(full)  # of several values, a part may have one
            raw_loss = None if full.result is None else full.result.raw_loss
            # A pair (sum, count) is not compared: it says that the loss of a part is what the user wants.
            is_loss_compared = isinstance(raw_loss, Tensor) and (training or raw_loss.numel() == 1)
            is_rewritten, problems = self._rewrite_problems(batch, full.rewritten) if full.rewritten else (False, [])
            has_writes = full.has_writes or is_rewritten
            form = {} if full.result is None else {"has_scalar": isinstance(raw_loss, Tensor) and raw_loss.dim() == 0}
            if not is_loss_compared and not has_writes:
                return form
            try:
                full, parts = self._forward_parts(batch, full)
            except _SIZE_ERRORS:
                if isinstance(raw_loss, Tensor) and raw_loss.numel() > 1 and not has_writes:
                    return form  # The model takes this many samples only, and every part of a batch has as many.
                raise
            if full.state_changes:
                problems = self._state_problems(batch, [*parts, full]) or problems
            if full.loss_state_changes:
                problems += self._loss_state_problems(batch, [*parts, full])
            loss = {}
            if is_loss_compared:
                loss = {"loss": self._compare_losses(batch, full, parts)._replace(broadcast=_broadcast_shapes(full))}
            problems += self._count_problems(batch, *loss.values())
        if self._is_scalar(full) and self._objective.function.is_compiled:
            problems.append(
                compiled_problem("a compiled scalar loss", self._split.num_parts, "the loss without torch.compile")
            )
        return {"problems": problems, **self._summarize(full._replace(has_writes=has_writes), parts), **form, **loss}

    def extend_compared(self, batch: Any, few: Any) -> None:
        """The samples that were compared were shortened ones of a batch: from now on those of the batch count."""
        if self.compared_batch is not None:
            samples, elements = num_samples(self.compared_batch.batch), self.compared_batch.elements_per_sample
            ratio = sum(t.numel() for t in tree_leaves(batch)) / sum(t.numel() for t in tree_leaves(few))
            whole = tree_map(slice_samples(batch, 0, samples), lambda tensor: tensor.to(self._device))
            self.compared_batch = ComparedBatch(whole, math.ceil(elements * ratio))

    def _is_scalar(self, forward: DryRunForward) -> bool:
        return forward.result is not None and self._objective.is_scalar(forward.result.raw_loss, forward.num_samples)

    def _summarize(self, full: DryRunForward, parts: Sequence[DryRunForward]) -> dict[str, Any]:
        return {
            "has_writes": self._compares_state and full.has_writes,
            "is_shape_1_scalar": full.num_samples > 1 and all(map(_has_shape_1, (full, *parts))),
            "uses_counts": self._objective.uses_counts,
            "state_changes": summarize_changes(full.state_changes),
        }

    # ---- forwards -----------------------------------------------------------------------------------

    def _forward_parts(self, batch: Any, full: DryRunForward) -> tuple[DryRunForward, list[DryRunForward]]:
        """The forward of the full samples, and those of two parts. A single sample is taken twice to make parts."""
        full_batch, parts = batch_and_parts(batch)
        if full.num_samples > 1:
            try:
                return full, [self._forward(part) for part in parts]
            except _SIZE_ERRORS:
                return self._forward_repeated_halves(batch, full)
        try:
            return self._forward(full_batch), [full, full]
        except _SIZE_ERRORS:
            # The model takes one sample at a time, so every part of a batch has one.
            return full, [full]

    def _forward_repeated_halves(self, batch: Any, full: DryRunForward) -> tuple[DryRunForward, list[DryRunForward]]:
        """The same for a model that takes a fixed number of samples: each part is one half of them, taken twice."""
        half = full.num_samples // 2
        if full.num_samples % 2:
            batch = slice_samples(batch, 0, 2 * half)
            full = self._forward(batch)
        halves_twice = (
            tree_map(slice_samples(batch, start, start + half), lambda tensor: torch.cat([tensor, tensor]))
            for start in (0, half)
        )
        forwards = [self._forward(twice) for twice in halves_twice]
        return full, [each._replace(part=each.part._replace(num_samples=half)) for each in forwards]

    def _forward(self, batch: Any, *, num_forwards: int = 1) -> DryRunForward:
        part = Microbatch(*unpack_batch(batch), num_samples(batch), 0)
        modules, check = self._objective.function.modules(self._model), self._weight_check
        # With autograd on, as in a step: a model may differentiate within forward.
        with (
            preserve_state(modules) as loss_state,
            preserve_state(self._model, not_restored=check.not_restored, counts_renorms=check.counts_renorms) as state,
        ):
            with self._objective.force_eager(self._model), without_randomness(self._device) as mode:
                results = [self._forward_loss(part) for _ in range(num_forwards)]
            check.observe(state.write_tracker)
            changes = state.changes()
            has_writes = bool(changes or state.write_tracker.written)
            if not self._compares_state:
                changes = {name: value for name, value in changes.items() if name in check.trained_names}
            loss_changes = loss_state.changes() if self._compares_state else {}
            return DryRunForward(
                results[-1],
                part,
                changes,
                loss_changes,
                has_writes or bool(loss_changes),
                state.rewritten() if self._compares_state else (),
                mode.has_randomness,
                mode.min_itemsize,
                mode.num_elements,
            )

    def _forward_loss(self, part: Microbatch) -> ForwardResult | None:
        # Copies: a model may write into its inputs, or differentiate by them.
        part = part._replace(
            inputs=tree_map(part.inputs, detached_clone), targets=tree_map(part.targets, detached_clone)
        )
        if self._split.num_token_shards == 1:
            return self._objective.dry_run(self._model, part)
        call_model(self._model, part.inputs)
        return None

    # ---- comparison ---------------------------------------------------------------------------------

    def _compare_losses(self, batch: Any, full: DryRunForward, parts: Sequence[DryRunForward]) -> LossComparison:
        comparison = _compare_forwards(full, parts)
        # With a single part, the model takes one sample at a time.
        if comparison.is_comparable and not comparison.has_randomness and len(parts) > 1:
            self.compared_batch = ComparedBatch(batch, -(-full.num_elements // full.num_samples))
        if not comparison.is_comparable or comparison.problem is not None:
            return comparison
        if not comparison.has_randomness and (fault := self._find_fault_of_repeated(batch)) is not None:
            return fault
        if not self._is_scalar(full):
            return comparison
        if comparison.is_torch_mean:
            return comparison
        assert full.result is not None
        return self._probe_loss(full, full.result, comparison, _of_samples(full, parts))

    def _find_fault_of_repeated(self, batch: Any) -> LossComparison | None:
        """A comparison of samples that are repeated, of a loss or a model that mixes them; None if it shows none.

        It takes at least three samples, else not more than the batch has, and cuts where the batch was cut: a model
        may want samples in groups. Other losses than values and torch's means are probed.
        """
        first = max(1, num_samples(batch) // 3)
        whole, parts = repeated_and_parts(slice_samples(batch, 0, 2 * first), first)
        try:
            with self._objective.trying():
                found = _compare_forwards(self._forward(whole), [self._forward(each) for each in parts])
        except Exception:  # of a model that takes another number of samples
            return None
        is_shown = found.is_comparable and (found.is_unreduced or found.is_torch_mean or found.mixes_outputs)
        return found if is_shown and not found.is_additive and not found.has_randomness else None

    def _probe_loss(
        self, full: DryRunForward, result: ForwardResult, comparison: LossComparison, of_samples: Sequence[bool]
    ) -> LossComparison:
        """The comparison of a hand-made scalar loss, or of a probe in which it is no mean."""

        def hidden(outputs: Any) -> Any:  # outputs without samples get a dim of 1, which no probe changes or cuts
            flags = iter(of_samples)
            return tree_map(outputs, lambda tensor: tensor if next(flags) else tensor[None])

        def compute(outputs: Any, targets: Any, samples: int) -> ForwardResult:
            flags = iter(of_samples)
            shown = tree_map(outputs, lambda tensor: tensor if next(flags) else tensor[0])
            given = self._objective.loss_of_outputs(shown, Microbatch(None, targets, samples, 0))
            return given._replace(outputs=hidden(given.outputs))

        part, means = full.part, [call.name for call in result.calls]
        modules = self._objective.function.modules(self._model)
        with self._objective.trying(), preserve_module(modules), preserve_state(modules):
            if not self._objective.function.is_of_model:
                probed = probe_loss(
                    compute, result._replace(outputs=hidden(result.outputs)), part.targets, part.num_samples
                )
            elif not comparison.has_randomness:
                probed = probe_model_loss(self._compute_model_loss, part.inputs, part.num_samples, means=means)
            else:
                return comparison
        return probed.fault or comparison._replace(is_mixed=comparison.is_mixed or probed.is_mixed)

    def _compute_model_loss(self, _: Any, inputs: Any, samples: int) -> ForwardResult:
        result = self._forward(inputs).result
        assert result is not None, samples
        return result

    def _state_problems(self, batch: Any, forwards: Sequence[DryRunForward]) -> list[Problem]:
        """What is wrong with the model state that these forwards have changed."""
        trained = self._weight_check.trained_names
        if names := differing([forward.state_changes for forward in forwards], is_identical):
            return sample_dependence_problems(names, self._split.num_parts, trained)
        if self._split.num_microbatches == 1:
            return []
        after_two = self._forward(batch, num_forwards=2).state_changes
        names = differing([forwards[-1].state_changes, after_two], is_identical)
        return forward_count_problems(names, self._split.num_microbatches, trained)

    def _rewrite_problems(self, batch: Any, names: Sequence[str]) -> tuple[bool, list[Problem]]:
        """Whether a forward changes this state where it begins with other values, and what is wrong with that."""
        is_changed, problems = False, list[Problem]()
        # Not the errors of a model that cannot begin with other values; what it has shown before is not lost.
        with contextlib.suppress(Exception), moved_state(self._model, names):
            full = self._forward(batch)
            is_changed = bool(full.state_changes)
            if is_changed:
                full, parts = self._forward_parts(batch, full)
                problems = self._state_problems(batch, [*parts, full])
        return is_changed, problems

    def _count_problems(self, batch: Any, comparison: LossComparison | None = None) -> list[Problem]:
        """What explains a loss that is no mean, if the model or the loss counts its forwards."""
        if comparison is None or comparison.problem is None or comparison.has_randomness:
            return []

        def raw_loss() -> Tensor:
            result = self._forward(batch).result
            assert result is not None
            return result.raw_loss

        problem = count_problem(self._model, self._objective, raw_loss)
        return [] if problem is None else [problem]

    def _loss_state_problems(self, batch: Any, forwards: Sequence[DryRunForward]) -> list[Problem]:
        """What is wrong with the state that the loss has changed: ranks without samples do not call the loss."""
        after_two = self._forward(batch, num_forwards=2).loss_state_changes
        names = differing([*(forward.loss_state_changes for forward in forwards), after_two], is_identical)
        return [loss_state_problem(names, self._split.num_parts)] if names else []


def _has_shape_1(forward: DryRunForward) -> bool:
    """Whether the loss has shape [1]. Of unreduced values, all samples have more than some of them."""
    loss = None if forward.result is None else forward.result.raw_loss
    return isinstance(loss, Tensor) and loss.dim() > 0 and loss.numel() == 1


def _compare_forwards(full: DryRunForward, parts: Sequence[DryRunForward]) -> LossComparison:
    """Compare the losses of forwards that have one."""
    forwards = (full, *parts)
    full_result, *part_results = [forward.result for forward in forwards if forward.result is not None]
    return compare_losses(
        full_result,
        part_results,
        part_sizes=[forward.num_samples for forward in parts],
        min_itemsize=min(forward.min_itemsize for forward in forwards),
    )._replace(has_randomness=any(forward.has_randomness for forward in forwards))


def _broadcast_shapes(forward: DryRunForward) -> str:
    """Shapes of as many elements, such as [N, 1] and [N], of which a loss by elements makes [N, N] values; or empty."""
    outputs, targets = None if forward.result is None else forward.result.outputs, forward.part.targets
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.numel() != targets.numel():
        return ""
    try:
        shape = torch.broadcast_shapes(outputs.shape, targets.shape)
    except RuntimeError:
        return ""
    if math.prod(shape) == outputs.numel():
        return ""
    return f"outputs {list(outputs.shape)} and targets {list(targets.shape)}, which broadcast to {list(shape)}"


def _of_samples(full: DryRunForward, parts: Sequence[DryRunForward]) -> list[bool]:
    """For each output, whether it has a row for each sample: others are as long for fewer samples."""
    columns = [list(tree_leaves(each.result.outputs)) for each in (full, *parts) if each.result is not None]
    sizes = [num_samples((each.part.inputs, each.part.targets)) for each in (full, *parts)]
    if len({len(column) for column in columns}) > 1:  # a list with a tensor for each sample
        return [True] * len(columns[0])
    others = [column for column, size in zip(columns, sizes, strict=True) if size != sizes[0]]
    return [
        not leaf.dim() or not any(column[index].shape == leaf.shape for column in others)
        for index, leaf in enumerate(columns[0])
    ]


def first_sample(batch: Any, device: torch.device) -> Microbatch:
    """A copy of it, for forwards of ranks without samples."""
    return split_microbatches(tree_map(slice_samples(batch, 0, 1), torch.clone), 1, device)[0]


def compiled_problem(what: str, num_parts: int, attempt: str) -> Problem:
    """What is wrong with a mean that compiled code computes, if the batch is split into parts."""
    got = f"{what}, and a batch that is split into {num_parts} parts"
    need = "uncompiled calls of loss functions: Fourfold counts their targets, to weight the parts"
    return Problem(got, need, f"{attempt}; or a loss that returns unreduced values, or a pair (sum, count)")
