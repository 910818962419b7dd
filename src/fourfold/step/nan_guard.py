"""NaN guard: bad steps are skipped, or end the training.

bad step  a step whose global loss, or gradient norm if one is measured, is not finite
Law: all ranks skip the same steps. A skipped step changes neither weights nor optimizer states nor the model's buffers;
the order of the samples goes on.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fourfold.comm.communicator import Communicator
from fourfold.orders.sample_order import BatchRange
from fourfold.step.step_state import ALL_DAMAGED, NO_ELEMENTS, StepState
from fourfold.torch_kit.torch_private import version_of
from fourfold.words.errors import Problem, TrainingError

MAX_NAMED_SAMPLES = 64  # of one rank, in a message


class Skipped(NamedTuple):
    """A skipped step. `rank`: the rank whose loss was not finite; None if there were several, or none."""

    text: str
    rank: int | None


class BadStepPolicy(Protocol):
    """What becomes of bad steps."""

    def save_buffers(self) -> None:
        """Before a step: copy the buffers that forward may change, such as running statistics."""
        ...

    def accept(self) -> None:
        """A step was good."""
        ...

    def skip(self, text: str) -> None:
        """Undo a bad step, which `text` describes. Raises TrainingError if it must not be skipped."""
        ...


class RefuseBadSteps:
    """The first bad step ends the training: there is nothing to undo."""

    def save_buffers(self) -> None:
        pass

    def accept(self) -> None:
        pass

    def skip(self, text: str) -> None:
        raise TrainingError(
            Problem(text, "a finite loss and gradient", "skip_nan=10 to skip such steps"), where="training"
        )


class SkipBadSteps:
    """At most `limit` bad steps in a row are skipped."""

    def __init__(self, model: nn.Module, limit: int) -> None:
        self._model, self._limit = model, limit
        self._num_in_a_row = 0
        self._buffers: dict[str, tuple[Tensor, int, Tensor]] = {}

    @torch.no_grad()
    def save_buffers(self) -> None:
        for name, buffer in self._model.named_buffers():
            saved = self._buffers.get(name)
            if saved is None or saved[0] is not buffer or saved[1] != version_of(buffer):
                self._buffers[name] = buffer, version_of(buffer), buffer.clone()

    def accept(self) -> None:
        self._num_in_a_row = 0

    @torch.no_grad()
    def skip(self, text: str) -> None:
        for buffer, version, saved in self._buffers.values():
            if version_of(buffer) != version:
                buffer.copy_(saved)
        self._num_in_a_row += 1
        if self._num_in_a_row > self._limit:
            need = f"at most skip_nan = {self._limit} such steps in a row"
            raise TrainingError(Problem(f"{text}; the {self._limit} steps before were bad too", need), where="training")


class NanGuard:
    """Checks each step of one rank; `limit` is how many steps in a row may be skipped."""

    def __init__(self, communicator: Communicator, model: nn.Module, *, limit: int) -> None:
        self._communicator = communicator
        self.policy: BadStepPolicy = SkipBadSteps(model, limit) if limit else RefuseBadSteps()

    def check(self, state: StepState, step: int, samples: BatchRange | None) -> Skipped | None:
        """After a step: None if it was good. Collective if it was bad.

        `samples`: of the batch, if known. Raises TrainingError if the step is bad and must not be skipped.
        """
        if state.bad_reason is None:
            self.policy.accept()
            return None
        if state.bad_reason == ALL_DAMAGED:  # there is no forward to undo, and nothing that skip_nan should count
            return Skipped(f"step {step}: {ALL_DAMAGED}", None)
        skipped = self._describe(state, step, samples)
        self.policy.skip(skipped.text)
        return skipped

    def _describe(self, state: StepState, step: int, samples: BatchRange | None) -> Skipped:
        bad = [index for microbatch in state.nonfinite_microbatches() for index in microbatch]
        if samples is not None:
            ids = samples.sample_ids()
            # If every rank's loss is finite, all samples are named: the gradient may be that of any of them.
            names: list[Any] = [[ids[index] for index in bad], ids]
        else:
            names = [bad, []]
        by_rank = self._communicator.all_gather_json([len(bad) > 0, *names])
        bad_ranks = [rank for rank, (is_bad, _, _) in enumerate(by_rank) if is_bad]
        noun = "samples" if samples is not None else "samples of its batch"
        if bad_ranks:
            parts = [f"rank {rank}, {noun} {sample_list(by_rank[rank][1])}" for rank in bad_ranks]
        else:
            parts = [f"rank {rank}, {noun} {sample_list(ids)}" for rank, (_, _, ids) in enumerate(by_rank) if ids]
            parts = [*(["every rank's own loss is finite"] if state.bad_reason != NO_ELEMENTS else []), *parts]
        place = "" if samples is None else f" ({samples})"
        text = f"step {step}: {'; '.join([str(state.bad_reason), *parts])}{place}"
        return Skipped(text, bad_ranks[0] if len(bad_ranks) == 1 else None)


def sample_list(numbers: list[int], *, limit: int = MAX_NAMED_SAMPLES) -> str:
    """The numbers of a rank's samples, for a message."""
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return ", ".join(map(str, numbers[:limit])) + more
