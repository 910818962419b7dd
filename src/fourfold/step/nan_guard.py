"""Guard: bad steps are left out, or end the training.

bad step  one whose global loss, or norm of the gradient where one is measured, is not a finite number
Law: all ranks leave out the same steps, and a step that is left out changes neither weights nor optimizer states,
nor the model's buffers; the order of the samples goes on.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.torch_private import version_of
from fourfold.plan.sample_order import BatchRange
from fourfold.step.actions import NO_ELEMENTS, Actions
from fourfold.words.errors import Problem, TrainingError

MAX_NAMED_SAMPLES = 64  # samples of a rank that a message names


class Skipped(NamedTuple):
    """A step that was left out. `rank`: whose loss was not finite; None where it was several ranks' or no one's."""

    text: str
    rank: int | None


class NanGuard:
    """Judges each step of one rank; `limit` is how many in a row may be left out."""

    def __init__(self, communicator: Communicator, model: nn.Module, *, limit: int) -> None:
        self._communicator, self._model, self._limit = communicator, model, limit
        self._num_in_a_row = 0
        self._buffers: dict[str, tuple[Tensor, int, Tensor]] = {}

    @torch.no_grad()
    def save_buffers(self) -> None:
        """Before a step: remember the buffers, which forward may change (running statistics)."""
        if self._limit == 0:
            return
        for name, buffer in self._model.named_buffers():
            known = self._buffers.get(name)
            if known is None or known[0] is not buffer or known[1] != version_of(buffer):
                self._buffers[name] = buffer, version_of(buffer), buffer.clone()

    def check(self, actions: Actions, step: int, samples: BatchRange | None) -> Skipped | None:
        """After step `number`: None where it was good. Collective where it was bad.

        Raises TrainingError where the step is bad and may not be left out. `samples`: the batch's, where known.
        """
        if actions.bad_reason is None:
            self._num_in_a_row = 0
            return None
        self._num_in_a_row += 1
        self._restore()
        skipped = self._describe(actions, step, samples)
        if self._num_in_a_row <= self._limit:
            return skipped
        if self._limit == 0:
            problem = Problem(skipped.text, "a finite loss and gradient", "skip_nan=10 to leave such steps out")
        else:
            need = f"at most skip_nan = {self._limit} such steps in a row"
            problem = Problem(f"{skipped.text}; the {self._limit} steps before were no better", need)
        raise TrainingError(problem, where="training")

    @torch.no_grad()
    def _restore(self) -> None:
        for buffer, version, kept in self._buffers.values():
            if version_of(buffer) != version:
                buffer.copy_(kept)

    def _describe(self, actions: Actions, number: int, samples: BatchRange | None) -> Skipped:
        mine = [list(some) for some in actions.nonfinite_microbatches()]
        bad = list(itertools.chain(*mine))
        if samples is not None:
            ids = samples.sample_ids()
            # Where no rank's loss is to blame, all samples are told: any of them may have had the gradient.
            told: list[Any] = [[ids[index] for index in bad], ids]
        else:
            told = [bad, []]
        everyone = self._communicator.all_gather_json([len(bad) > 0, *told])
        guilty = [rank for rank, (is_bad, _, _) in enumerate(everyone) if is_bad]
        of = "samples" if samples is not None else "samples of its batch"
        if guilty:
            parts = [f"rank {rank}, {of} {_sample_list(everyone[rank][1])}" for rank in guilty]
        else:
            parts = [f"rank {rank}, {of} {_sample_list(ids)}" for rank, (_, _, ids) in enumerate(everyone) if ids]
            parts = [*(["every rank's own loss is finite"] if actions.bad_reason != NO_ELEMENTS else []), *parts]
        place = "" if samples is None else f" ({samples})"
        text = f"step {number}: {'; '.join([str(actions.bad_reason), *parts])}{place}"
        return Skipped(text, guilty[0] if len(guilty) == 1 else None)


def _sample_list(numbers: list[int]) -> str:
    more = f" and {len(numbers) - MAX_NAMED_SAMPLES} more" if len(numbers) > MAX_NAMED_SAMPLES else ""
    return ", ".join(map(str, numbers[:MAX_NAMED_SAMPLES])) + more
