"""Dry run: what a first batch shows of a loss and of a model's state, before a weight moves.

whole   a few samples in one forward: as many as a microbatch has
parts   the same samples in two forwards, of different sizes
judged  a few of them once more in float64, forward and backward (`loss_judge.py`)
Law: a loss that is one number is refused where the parts, each weighted by its count, do not make up the whole; and so
is a forward that leaves other buffers or weights behind for other samples, or writes weights where that is lost. On
every rank, if on any.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.uses import explain_transform_errors
from fourfold.plan.plan import Plan
from fourfold.run.batch import (
    Microbatch,
    batch_and_parts,
    call_model,
    detached_clone,
    eval_mode,
    num_samples,
    slice_samples,
    split_microbatches,
    subsample,
    tree_leaves,
    tree_map,
    unpack_batch,
)
from fourfold.run.forward_state import (
    Changes,
    counting,
    dependent,
    differing,
    differing_summaries,
    kept,
    of_loss,
    summary,
)
from fourfold.run.gradient_hooks import hook_problems
from fourfold.run.loss_judge import EXACT, Verdict, first_line, judged
from fourfold.run.objective import Measured, Objective, is_compiled
from fourfold.run.parts_of_loss import Compared, compared
from fourfold.run.random_weights import Fits, fits
from fourfold.run.weight_watch import WeightWatch
from fourfold.run.weights import Weights
from fourfold.run.without_randomness import without_randomness
from fourfold.words.errors import Problem, TaskError

JUDGED_SAMPLES = 6  # parts of 2 and 4: a model may take a single sample for a batch without its first dim
log = logging.getLogger("fourfold")


class Forward(NamedTuple):
    """One forward, and what it left."""

    measured: Measured | None
    """None where the loss is not asked for."""
    samples: int
    changes: Changes
    of_loss: Changes
    """What it left in the buffers and parameters of the loss's modules."""
    writes: bool
    """Whether it has written state, or parameters, be it without a change."""
    has_drawn: bool
    itemsize: int
    made: int
    """How many numbers its operations have made."""


class _Shown(NamedTuple):
    """What this rank has compared, and how many numbers a forward makes of each of these samples."""

    batch: Any
    made: int


class DryRun:
    """The dry run of one rank, of what it is that its objective learns."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        plan: Plan,
        device: torch.device,
        weights: Weights,
        *,
        num_sharing: int,
        speaks: bool,
    ) -> None:
        """`num_sharing`: how many ranks use the memory of this device. `speaks`: whether this rank logs for all."""
        self._model, self._objective, self._plan, self._device = model, objective, plan, device
        self._num_sharing, self._speaks = num_sharing, speaks
        self._parts = plan.dp * plan.sp * plan.microbatches
        objective.is_cut = self._parts > 1
        self._watch = WeightWatch(plan, weights)
        self._watches = True
        """Whether what forwards write is compared, be it trained or not; what is trained is in any case."""
        self._done: set[bool] = set()
        self._sample: Microbatch | None = None
        self._shown: _Shown | None = None

    def is_due(self, *, training: bool) -> bool:
        """Whether a batch must be tried out before it is used."""
        # With sp > 1 the loss has a dry run of its own: `run.sequence`.
        is_asked = self._parts > 1 or (training and self._watch.fixed is not None)
        return is_asked and (training or self._plan.sp == 1) and not {training, True} & self._done

    def run(
        self,
        batch: Any,
        reading: Callable[[str], contextlib.AbstractContextManager[None]],
        exchange: Callable[[Any], list[Any]],
        *,
        training: bool,
    ) -> None:
        """Try a batch out. Collective. `reading(kind)`: within, the model may be called.

        Raises TaskError on every rank where the loss or the model cannot be cut; what a rank's model or loss raises
        is raised there, and a TaskError on the others.
        """
        told: dict[str, Any] = {"error": None, "problems": [], "loss": None, "writes": False, "empty": True}
        told |= {"single": False, "counted": False, "changed": {}, "divisors": None}
        error: Exception | None = None
        self._shown = None
        with reading("try out"):
            try:
                with explain_transform_errors():
                    told |= self._show(batch, training=training)
            except Exception as caught:  # raised below, when the other ranks have heard of it
                error, told["error"] = caught, first_line(caught)
        everyone = exchange(told)
        self._judge(everyone, error)
        losses = [Compared(*told["loss"]) for told in everyone if told["loss"] is not None]
        is_known = any(loss.is_known for loss in losses)
        if training and is_known:
            self._judge_exactly(reading, exchange)
        self._shown = None
        empty = sum(told["empty"] for told in everyone)
        # An empty batch has shown nothing, nor has a loss that is no finite number; unreduced values are asked once.
        if empty < len(everyone) and (is_known or all(loss.is_unreduced for loss in losses)):
            self._done.add(training)
            writes = any(told["writes"] for told in everyone)
            self._objective.stand_in = self._sample if writes else self._objective.stand_in

    def _show(self, batch: Any, *, training: bool) -> dict[str, Any]:
        """What a batch shows on this rank."""
        self._objective.divisors.reset()
        samples = num_samples(batch)
        told: dict[str, Any] = {"empty": samples == 0}
        self._watch.begin()
        if training and (problems := hook_problems(self._model, self._parts)):
            told["problems"] = problems
        elif samples and self._objective.is_models_own and is_compiled(self._model):
            attempt = "its parts compiled: model.model = torch.compile(model.model)"
            told["problems"] = [_unseen("loss = None and a compiled model", self._parts, attempt)]
        elif samples:
            told |= self._try(batch, samples, training=training)
        told["problems"] = [*told.get("problems", []), *self._watch.problems()]
        return told

    def _try(self, batch: Any, samples: int, *, training: bool) -> dict[str, Any]:
        few = min(samples, max(2, -(-samples // self._plan.microbatches)))
        tried = tree_map(slice_samples(batch, 0, few), lambda tensor: tensor.to(self._device))
        # Where each part has statistics of its own, these do not make a loss of the whole.
        local = self._plan.batch_norm == "local"
        self._watches = training and not local
        if training and (local or self._parts == 1):
            self._forward(tried)  # for what it writes into weights, which is refused in any case
            if self._parts == 1:
                return {}
        with eval_mode(self._model) if local or not training else contextlib.nullcontext():
            whole = self._forward(tried)
            value = None if whole.measured is None else whole.measured.value
            writes = whole.writes
            # Pairs are believed: with them a loss says that that of a part is what it wants.
            is_compared = isinstance(value, Tensor) and (training or value.numel() == 1)
            if not is_compared and not writes:
                return {}
            try:
                whole, parts = self._cut(tried, whole)
            except (RuntimeError, ValueError, IndexError):
                if isinstance(value, Tensor) and value.numel() > 1 and not writes:
                    return {}  # A model for so many samples at a time: all parts of a batch have as many.
                raise
            problems = self._state_problems(tried, [*parts, whole]) if whole.changes else []
            if whole.of_loss:
                problems += self._loss_problems(tried, [*parts, whole])
        is_number = whole.measured is not None and self._objective.is_number(whole.measured.value, whole.samples)
        if is_number and self._objective.is_compiled:
            problems.append(_unseen("a compiled loss that is one number", self._parts, "the loss as it was written"))
        self._sample = split_microbatches(tree_map(slice_samples(tried, 0, 1), torch.clone), 1, self._device)[0]
        told: dict[str, Any] = {"problems": problems, "writes": self._watches and whole.writes}
        told |= {"single": self._objective.is_single, "counted": self._objective.is_counted}
        told["changed"], told["divisors"] = summary(whole.changes), self._objective.divisors.summarize()
        if not is_compared:
            return told
        loss = self._compared(whole, parts)
        # With one part the model takes one sample at a time.
        if loss.is_known and not loss.has_drawn and len(parts) > 1:
            self._shown = _Shown(tried, -(-whole.made // whole.samples))
        return told | {"loss": loss}

    def _cut(self, batch: Any, whole: Forward) -> tuple[Forward, list[Forward]]:
        """The forward of the whole, and those of two parts. One sample makes a whole with itself."""
        together, parts = batch_and_parts(batch)
        if whole.samples > 1:
            try:
                return whole, [self._forward(part) for part in parts]
            except (RuntimeError, ValueError, IndexError):
                return self._repeated(batch, whole)
        try:
            return self._forward(together), [whole, whole]
        except (RuntimeError, ValueError, IndexError):
            # A model for one sample at a time: then all parts of a batch have one.
            return whole, [whole]

    def _repeated(self, batch: Any, whole: Forward) -> tuple[Forward, list[Forward]]:
        """The same for a model that takes no fewer samples: two halves, each of them twice."""
        half = whole.samples // 2
        if whole.samples % 2:
            batch = slice_samples(batch, 0, 2 * half)
            whole = self._forward(batch)
        halves_twice = (
            tree_map(slice_samples(batch, start, start + half), lambda tensor: torch.cat([tensor, tensor]))
            for start in (0, half)
        )
        return whole, [self._forward(twice)._replace(samples=half) for twice in halves_twice]

    def _forward(self, batch: Any, *, times: int = 1) -> Forward:
        samples = num_samples(batch)
        part = Microbatch(*unpack_batch(batch), samples, 0)
        modules = self._objective.modules(self._model)
        # With autograd on, as in a step: a model may differentiate within forward.
        watch = self._watch
        with kept(modules) as loss_state, kept(self._model, kept=watch.not_copied, renorms=watch.renorms) as state:
            with self._objective.uncompiled(self._model), without_randomness(self._device) as watched:
                measured = [self._measured(part) for _ in range(times)]
            watch.look(state.writes)
            changes = state.changes()
            writes = bool(changes or state.writes.written)
            if not self._watches:
                changes = {name: value for name, value in changes.items() if name in watch.trained}
            loss_changes = loss_state.changes() if self._watches else {}
            seen = watched.has_drawn, watched.itemsize, watched.made
            return Forward(measured[-1], samples, changes, loss_changes, writes or bool(loss_changes), *seen)

    def _measured(self, part: Microbatch) -> Measured | None:
        # Copies: a model may write into its inputs, or differentiate by them.
        part = part._replace(
            inputs=tree_map(part.inputs, detached_clone), targets=tree_map(part.targets, detached_clone)
        )
        if self._plan.sp == 1:
            return self._objective.try_out(self._model, part)
        call_model(self._model, part.inputs)
        return None

    def _compared(self, whole: Forward, parts: Sequence[Forward]) -> Compared:
        forwards = (whole, *parts)
        of_whole, *of_parts = [forward.measured for forward in forwards if forward.measured is not None]
        numbers = [
            t.detach() for each in (of_whole, *of_parts) for t in tree_leaves(each.outputs) if t.is_floating_point()
        ]
        return compared(
            of_whole,
            of_parts,
            samples=[forward.samples for forward in parts],
            itemsize=min(forward.itemsize for forward in forwards),
            largest=max(map(_largest, numbers), default=0.0),
        )._replace(has_drawn=any(forward.has_drawn for forward in forwards), names=self._objective.names)

    def _state_problems(self, batch: Any, forwards: Sequence[Forward]) -> list[Problem]:
        """What is wrong with the buffers that these forwards have changed."""
        if names := differing([forward.changes for forward in forwards]):
            return dependent(names, self._parts, self._watch.trained)
        if self._plan.microbatches == 1:
            return []
        names = differing([forwards[-1].changes, self._forward(batch, times=2).changes])
        return counting(names, self._plan.microbatches, self._watch.trained)

    def _loss_problems(self, batch: Any, forwards: Sequence[Forward]) -> list[Problem]:
        """What is wrong with the buffers that the loss has changed; ranks without samples do not call it."""
        several = self._forward(batch, times=2).of_loss
        names = differing([*(forward.of_loss for forward in forwards), several])
        return [of_loss(names, self._parts)] if names else []

    def _judge_exactly(
        self,
        reading: Callable[[str], contextlib.AbstractContextManager[None]],
        exchange: Callable[[Any], list[Any]],
    ) -> None:
        """Judge the loss of a few samples in float64, and its gradients. Collective."""
        batch, activations, shown = None, 0, self._shown
        if shown is not None:
            batch = subsample(shown.batch, min(num_samples(shown.batch), JUDGED_SAMPLES))
            # Gradients of what autograd keeps, too; one sample is judged as two.
            activations = 2 * shown.made * max(2, num_samples(batch))
        mine = fits(self._model, self._device, num_sharing=self._num_sharing, activations=activations)
        room = Fits(*map(all, zip(*exchange(mine), strict=True)))
        verdict, error = Verdict(), None
        with reading("judge"):
            try:
                if batch is not None:
                    with eval_mode(self._model) if self._plan.batch_norm == "local" else contextlib.nullcontext():
                        verdict = judged(
                            self._model, self._objective, *batch_and_parts(batch), room=room, device=self._device
                        )
            except Exception as caught:  # raised below, when the other ranks have heard of it
                error = caught
        everyone = exchange({"verdict": verdict, "error": None if error is None else first_line(error)})
        _raise(everyone, error)
        verdicts = [Verdict(*told["verdict"]) for told in everyone]
        if (problem := next((v.problem for v in verdicts if v.problem is not None), None)) is not None:
            raise TaskError(Problem(*problem), where="the loss")
        weaker = next((v for v in verdicts if v.fell_back), None)
        if weaker is not None and self._speaks:
            how = "compared no gradients"
            if weaker.judgement is not None:
                how = f"computed {weaker.judgement} instead of {EXACT}"
            log.warning("the dry run of the loss %s: %s", how, weaker.fell_back)

    def _judge(self, everyone: list[dict[str, Any]], error: Exception | None) -> None:
        _raise(everyone, error)
        problems = [Problem(*problem) for told in everyone for problem in told["problems"]]
        changed = [told["changed"] for told in everyone if not told["empty"]]
        if not problems and (names := differing_summaries(changed)):
            problems = dependent(names, self._parts, self._watch.trained)
        if problems:
            raise TaskError(list(dict.fromkeys(problems)), where="the model")
        losses = [Compared(*told["loss"]) for told in everyone if told["loss"] is not None]
        known = [loss for loss in losses if loss.is_known]
        self._objective.by_hand = bool(known) and all(loss.by_hand for loss in known)
        self._objective.is_mixed = any(loss.is_mixed for loss in known)
        divisors = [loss.divided_by for loss in known]
        is_divided = bool(known) and all(divisor is not None for divisor in divisors)
        self._objective.divided_by = 1.0 if self._objective.by_hand else divisors[0] if is_divided else None
        self._objective.divisors.merge_ranks([told["divisors"] for told in everyone])
        self._objective.is_single = any(told["single"] for told in everyone)
        self._objective.is_counted = any(told["counted"] for told in everyone)
        problems = [] if self._objective.by_hand else [loss.problem for loss in known]
        problem = next((each for each in (*problems, *(loss.bent for loss in known)) if each is not None), None)
        if problem is not None:
            raise TaskError(problem, where="the loss")
        writes = any(told["writes"] for told in everyone)
        empty = [rank for rank, told in enumerate(everyone) if told["empty"]]
        if writes and empty:
            got = f"a first batch without samples on rank {empty[0]}, and a model whose forward changes its buffers"
            raise TaskError(Problem(got, "a sample on each rank", "a larger batch"), where="the batch")


def _raise(everyone: list[dict[str, Any]], error: Exception | None) -> None:
    """Raise what a rank has raised: `error` is this rank's."""
    failed = {rank: told["error"] for rank, told in enumerate(everyone) if told["error"] is not None}
    if error is not None:
        raise error
    if failed:
        rank, text = next(iter(failed.items()))
        raise TaskError(Problem(f"rank {rank} failed on its first batch: {text}"), where="the task")


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _unseen(what: str, parts: int, attempt: str) -> Problem:
    """What is wrong with a mean inside compiled code, where it is one of parts of a batch."""
    need = "to see which loss functions are called, and how many targets they count"
    attempt = f"{attempt}; or a loss that returns unreduced values, or a pair (sum, count)"
    return Problem(f"{what}, and a batch that is cut in {parts}", need, attempt)
