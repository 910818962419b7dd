"""Dry run: what a first batch shows of a loss and of a model's state, before a weight moves.

whole   a few samples in one forward: as many as a microbatch has
parts   the same samples in two forwards, of different sizes
Law: a loss that is one number is refused where the parts, each weighted by its count, do not make up the whole; and so
is a forward that leaves other buffers behind for other samples. On every rank, if on any.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.uses import naming_transforms
from fourfold.plan.plan import Plan
from fourfold.run.batch import Microbatch, call, cut, evaluating, halves, leaves, mapped, num_samples, some
from fourfold.run.forward_state import Changes, counting, dependent, differing, kept, of_loss
from fourfold.run.gradient_hooks import hook_problems
from fourfold.run.objective import Measured, Objective, is_compiled
from fourfold.run.parts_of_loss import Compared, compared
from fourfold.run.without_randomness import without_randomness
from fourfold.words.errors import FourfoldError, Problem, TaskError


class Forward(NamedTuple):
    """One forward, and what it left."""

    measured: Measured | None
    """None where the loss is not asked for."""
    samples: int
    changes: Changes
    of_loss: Changes
    """What it left in the buffers of the loss's modules."""
    has_drawn: bool
    itemsize: int


class DryRun:
    """The dry run of one rank, of what it is that its objective learns."""

    def __init__(self, model: nn.Module, objective: Objective, plan: Plan, device: torch.device) -> None:
        self._model, self._objective, self._plan, self._device = model, objective, plan, device
        self._parts = plan.dp * plan.sp * plan.microbatches
        objective.is_cut = self._parts > 1
        self._done: set[bool] = set()
        self._sample: Microbatch | None = None

    def is_due(self, *, training: bool) -> bool:
        """Whether a batch must be tried out before it is used."""
        # With sp > 1 the loss has a dry run of its own: `run.sequence`.
        return self._parts > 1 and (training or self._plan.sp == 1) and not {training, True} & self._done

    def run(
        self,
        batch: Any,
        reading: contextlib.AbstractContextManager[None],
        exchange: Callable[[Any], list[Any]],
        *,
        training: bool,
    ) -> None:
        """Try a batch out. Collective. `reading`: within, the model may be called.

        Raises TaskError on every rank where the loss or the model cannot be cut; what a rank's model or loss raises
        is raised there, and a TaskError on the others.
        """
        told: dict[str, Any] = {"error": None, "problems": [], "loss": None, "writes": False, "empty": True}
        told |= {"single": False, "counted": False, "divisors": None}
        error: Exception | None = None
        with reading:
            try:
                with naming_transforms():
                    told |= self._show(batch, training=training)
            except Exception as caught:  # raised below, when the other ranks have heard of it
                error, told["error"] = caught, _first_line(caught)
        self._judge(exchange(told), error, training=training)

    def _show(self, batch: Any, *, training: bool) -> dict[str, Any]:
        """What a batch shows on this rank."""
        self._objective.divisors.forget()
        samples = num_samples(batch)
        told: dict[str, Any] = {"empty": samples == 0}
        if training and (problems := hook_problems(self._model, self._parts)):
            told["problems"] = problems
        elif samples and self._objective.is_models_own and is_compiled(self._model):
            attempt = "its parts compiled: model.model = torch.compile(model.model)"
            told["problems"] = [_unseen("loss = None and a compiled model", self._parts, attempt)]
        elif samples:
            told |= self._try(batch, samples, training=training)
        return told

    def _try(self, batch: Any, samples: int, *, training: bool) -> dict[str, Any]:
        few = min(samples, max(2, -(-samples // self._plan.microbatches)))
        tried = mapped(some(batch, 0, few), lambda tensor: tensor.to(self._device))
        # Where each part has statistics of its own, these do not make a loss of the whole.
        local = self._plan.batch_norm == "local"
        watches = training and not local
        with evaluating(self._model) if local or not training else contextlib.nullcontext():
            whole = self._forward(tried)
            value = None if whole.measured is None else whole.measured.value
            writes = watches and bool(whole.changes or whole.of_loss)
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
            problems = self._state_problems(tried, [*parts, whole]) if watches and whole.changes else []
            if watches and whole.of_loss:
                problems += self._loss_problems(tried, [*parts, whole])
        is_number = whole.measured is not None and self._objective.is_number(whole.measured.value, whole.samples)
        if is_number and self._objective.is_compiled:
            problems.append(_unseen("a compiled loss that is one number", self._parts, "the loss as it was written"))
        self._sample = cut(mapped(some(tried, 0, 1), torch.clone), 1, self._device)[0]
        told: dict[str, Any] = {"problems": problems, "writes": watches and bool(whole.changes)}
        told |= {"single": self._objective.is_single, "counted": self._objective.is_counted}
        told["divisors"] = self._objective.divisors.found()
        return told | ({"loss": self._compared(whole, parts)} if is_compared else {})

    def _cut(self, batch: Any, whole: Forward) -> tuple[Forward, list[Forward]]:
        """The forward of the whole, and those of two parts. One sample makes a whole with itself."""
        if whole.samples > 1:
            first = max(1, whole.samples // 3)
            try:
                return whole, [self._forward(some(batch, *span)) for span in ((0, first), (first, whole.samples))]
            except (RuntimeError, ValueError, IndexError):
                return self._repeated(batch, whole)
        try:
            return self._forward(mapped(batch, lambda tensor: torch.cat([tensor, tensor]))), [whole, whole]
        except (RuntimeError, ValueError, IndexError):
            # A model for one sample at a time: then all parts of a batch have one.
            return whole, [whole]

    def _repeated(self, batch: Any, whole: Forward) -> tuple[Forward, list[Forward]]:
        """The same for a model that takes no fewer samples: two halves, each of them twice."""
        half = whole.samples // 2
        if whole.samples % 2:
            batch = some(batch, 0, 2 * half)
            whole = self._forward(batch)
        halves_twice = (
            mapped(some(batch, start, start + half), lambda tensor: torch.cat([tensor, tensor])) for start in (0, half)
        )
        return whole, [self._forward(twice)._replace(samples=half) for twice in halves_twice]

    def _forward(self, batch: Any, *, times: int = 1) -> Forward:
        samples = num_samples(batch)
        part = Microbatch(*halves(batch), samples, 0)
        modules = self._objective.modules(self._model)
        # With autograd on, as in a step: a model may differentiate within forward.
        with kept(self._model) as state, kept(modules) as loss_state:
            with _uncompiled(self._model, self._objective), without_randomness(self._device) as watched:
                measured = [self._measured(part) for _ in range(times)]
            return Forward(
                measured[-1], samples, state.changes(), loss_state.changes(), watched.has_drawn, watched.itemsize
            )

    def _measured(self, part: Microbatch) -> Measured | None:
        if self._plan.sp == 1:
            return self._objective.try_out(self._model, part)
        call(self._model, part.inputs)
        return None

    def _compared(self, whole: Forward, parts: Sequence[Forward]) -> Compared:
        forwards = (whole, *parts)
        of_whole, *of_parts = [forward.measured for forward in forwards if forward.measured is not None]
        numbers = [t.detach() for each in (of_whole, *of_parts) for t in leaves(each.outputs) if t.is_floating_point()]
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
            return [dependent(names, self._parts)]
        if self._plan.microbatches == 1:
            return []
        names = differing([forwards[-1].changes, self._forward(batch, times=2).changes])
        return [counting(names, self._plan.microbatches)] if names else []

    def _loss_problems(self, batch: Any, forwards: Sequence[Forward]) -> list[Problem]:
        """What is wrong with the buffers that the loss has changed; ranks without samples do not call it."""
        several = self._forward(batch, times=2).of_loss
        names = differing([*(forward.of_loss for forward in forwards), several])
        return [of_loss(names, self._parts)] if names else []

    def _judge(self, everyone: list[dict[str, Any]], error: Exception | None, *, training: bool) -> None:
        failed = {rank: told["error"] for rank, told in enumerate(everyone) if told["error"] is not None}
        if error is not None:
            raise error
        if failed:
            rank, text = next(iter(failed.items()))
            raise TaskError(Problem(f"rank {rank} failed on its first batch: {text}"), where="the task")
        problems = [Problem(*problem) for told in everyone for problem in told["problems"]]
        if problems:
            raise TaskError(list(dict.fromkeys(problems)), where="the model")
        losses = [Compared(*told["loss"]) for told in everyone if told["loss"] is not None]
        known = [loss for loss in losses if loss.is_known]
        self._objective.by_hand = bool(known) and all(loss.by_hand for loss in known)
        self._objective.is_mixed = any(loss.is_mixed for loss in known)
        divisors = [loss.divided_by for loss in known]
        is_divided = bool(known) and all(divisor is not None for divisor in divisors)
        self._objective.divided_by = 1.0 if self._objective.by_hand else divisors[0] if is_divided else None
        self._objective.divisors.learn([told["divisors"] for told in everyone])
        self._objective.is_single = any(told["single"] for told in everyone)
        self._objective.is_counted = any(told["counted"] for told in everyone)
        problem = next((loss.problem for loss in known if loss.problem is not None), None)
        if problem is not None and not self._objective.by_hand:
            raise TaskError(problem, where="the loss")
        writes = any(told["writes"] for told in everyone)
        empty = [rank for rank, told in enumerate(everyone) if told["empty"]]
        if writes and empty:
            got = f"a first batch without samples on rank {empty[0]}, and a model whose forward changes its buffers"
            raise TaskError(Problem(got, "a sample on each rank", "a larger batch"), where="the batch")
        # An empty batch has shown nothing, nor has a loss that is no finite number; unreduced values are asked once.
        if len(empty) < len(everyone) and (known or all(loss.is_unreduced for loss in losses)):
            self._done.add(training)
            self._objective.stand_in = self._sample if writes else self._objective.stand_in


def _uncompiled(model: nn.Module, objective: Objective) -> contextlib.AbstractContextManager[Any]:
    """Within, what is compiled runs as it was written: a few forwards of other sizes are not worth a compilation."""
    compiled = objective.is_compiled or any(map(is_compiled, model.modules()))
    # Only then: otherwise it would import the compiler, which takes 1.25 s.
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _unseen(what: str, parts: int, attempt: str) -> Problem:
    """What is wrong with a mean inside compiled code, where it is one of parts of a batch."""
    need = "to see which loss functions are called, and how many targets they count"
    attempt = f"{attempt}; or a loss that returns unreduced values, or a pair (sum, count)"
    return Problem(f"{what}, and a batch that is cut in {parts}", need, attempt)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    if isinstance(error, FourfoldError):  # its first line says how many problems there are
        return "; ".join(line.strip() for line in lines[1:])
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
