"""Actions: what each verb of a program does with this rank's tensors.

totals   loss and counts over all ranks and microbatches of a step
nominal  the count that gradients are divided by during backward, when the step's own is not known yet
Law: after a step's updates, weights have moved by the gradient of the mean over the global batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.comm import Transport
from fourfold.parts.data import Gradients
from fourfold.parts.optim import FlatOptimizer
from fourfold.run.batch import Loss, Microbatch, call, measure
from fourfold.words.action import LOSS, NORM, USED
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.spans import DONE, SILENT


class Parts(NamedTuple):
    """What the verbs work with: the gradients of all buckets, their transport, their update."""

    gradients: Gradients
    transport: Transport
    optimizer: FlatOptimizer
    parameters: Sequence[Sequence[nn.Parameter]]
    """By bucket and slot."""


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks and microbatches of a step."""

    loss: float
    count: float
    samples: float
    tokens: float
    asked: float
    """How many ranks have been asked to stop."""


class Actions:
    """One rank's tensors, and a method for each verb."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        parts: Parts,
        *,
        clip: float | None,
        agree: Callable[[float], float],
    ) -> None:
        """`agree` is the sum of a number over the data ranks, used once, in the first step."""
        self._model, self._loss, self._parts, self._clip, self._agree = model, loss, parts, clip, agree
        # Gradients are divided by a nominal count during backward, when the step's own is not known yet: an estimate
        # in the first step, its count in all others. The rest of the division is made up for after the reduction,
        # and is 1 where batches are even.
        self.nominal_count: float | None = None
        self.asked = False
        """Whether this rank has been asked to stop; every rank learns of it within the step."""
        self.recorder = SILENT
        slots = [len(parameters) for parameters in parts.parameters]
        self._offsets = [sum(slots[:bucket]) for bucket in range(len(slots))]

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Begin a step; afterwards `totals` and `grad_norm` tell of it."""
        self._microbatches = microbatches
        self._losses: dict[int, Loss] = {}
        self._local = torch.zeros(5, dtype=torch.float64, device=self._device)
        self._local[4] = float(self.asked)
        self._last = max((index for index, part in enumerate(microbatches) if part.samples), default=-1)
        self._sealed, self._scaled = False, False
        self._used: list[float] | None = None
        self.totals: Totals | None = None
        self.grad_norm: float | None = None
        self._parts.gradients.forget()
        self._parts.gradients.begin()
        self._parts.gradients.listening = True

    def end(self) -> None:
        """End a step that went well: the sums may be overwritten."""
        self._parts.transport.close()

    def stop(self) -> None:
        """End a step, however it went: gradients of other backwards are not taken."""
        self._parts.gradients.listening = False

    @property
    def _device(self) -> torch.device:
        return self._parts.parameters[0][0].device

    def forward(self, index: int) -> None:
        part = self._microbatches[index]
        if part.samples:
            loss = measure(self._loss(call(self._model, part.inputs), part.targets), part.samples)
            self._losses[index] = loss
            self._local[:4] += torch.stack([loss.total.detach().double(), *self._numbers(loss.count, part)])

    def _numbers(self, count: float, part: Microbatch) -> Tensor:
        return torch.tensor([count, part.samples, part.tokens], dtype=torch.float64, device=self._device)

    def backward(self, index: int) -> None:
        if self.nominal_count is None:
            count = self._losses[index].count if index in self._losses else 0.0
            self.nominal_count = max(1.0, self._agree(count) * len(self._microbatches))
        if index in self._losses:
            if index == self._last:
                self._parts.gradients.last()
            (self._losses.pop(index).total / self.nominal_count).backward()

    def measure(self, kind: int) -> None:
        transport = self._parts.transport
        if kind == LOSS:
            transport.measure(LOSS, self._local)
        elif kind == USED:
            self._seal()
            transport.measure(USED, torch.tensor(self._parts.gradients.written, dtype=torch.float64))
            self._used = transport.measured(USED)
        elif kind == NORM:
            self._count()
            self._complete_all()
            own = [transport.own(bucket).flat for bucket in range(len(self._parts.parameters))]
            norms = torch.stack([torch.linalg.vector_norm(flat) for flat in own])
            transport.measure(NORM, norms.double().square().sum().reshape(1))
            self._clip_to(transport.measured(NORM)[0] ** 0.5 * self._factor)

    def _clip_to(self, norm: float) -> None:
        assert self._clip is not None
        self.grad_norm = norm
        # 1e-6 as in torch.nn.utils.clip_grad_norm_
        # In this order: a norm that is not a number must stay one.
        self._factor *= min(self._clip / (norm + 1e-6), 1.0)

    def reduce(self, bucket: int) -> None:
        # The hooks have launched what was complete during backward; sealing launches the rest, in program order.
        self._seal()

    def _seal(self) -> None:
        if not self._sealed:
            self._parts.gradients.seal(empty=self._last < 0)
            self._sealed = True

    def _complete_all(self) -> None:
        for bucket in range(len(self._parts.parameters)):
            self._complete(bucket)

    def _complete(self, bucket: int) -> None:
        self._parts.transport.complete(bucket)
        self.recorder.moment(bucket, DONE)

    def _count(self) -> None:
        """Learn the totals, and what the sums are to be multiplied by to become the gradient of the mean."""
        if self.totals is not None:
            return
        self.totals = Totals(*self._parts.transport.measured(LOSS))
        if self.totals.count == 0:
            raise TrainingError(Problem("a global batch without a loss element", "at least one on one rank"))
        assert self.nominal_count is not None
        self._factor = self.nominal_count / self.totals.count

    def _scale(self) -> None:
        self._count()
        if self._factor != 1.0:
            self._complete_all()
            self._parts.transport.scale(self._factor)
        self._scaled = True

    def update(self, bucket: int) -> None:
        if not self._scaled:
            self._scale()
        # Only this bucket: others may still be on their way.
        self._complete(bucket)
        used = None if self._used is None else [bool(count) for count in self._used_in(bucket)]
        self._parts.optimizer.update(bucket, used)
        # Autograd then refuses activations saved with the old weights, instead of computing with the new ones.
        torch.autograd.graph.increment_version(self._parts.parameters[bucket])

    def _used_in(self, bucket: int) -> Sequence[float]:
        assert self._used is not None
        first = self._offsets[bucket]
        return self._used[first : first + len(self._parts.parameters[bucket])]
