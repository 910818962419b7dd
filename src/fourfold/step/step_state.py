"""Step state: what one step knows. Made at its beginning, gone at its end.

parts          what the step was assembled of; the same in every step
totals         loss and counts, summed over all ranks and microbatches of the step
grad scale     the factor that turns reduced sums into the gradient of the mean
bad step       its global loss, or its gradient norm if one is measured, is not finite; or the global batch has no loss
               element, whose mean is NaN in torch
overflow       the norm of a scaled gradient is not finite, and a smaller loss scale may help: not a bad step
nominal count  what gradients of a split batch are divided by in backward, while the step's own count is not known yet
Law: after a bad step or an overflow, neither weights nor optimizer states have changed; local steps average weights
after a bad step too.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.axes.data.work.sharded_params import NO_UNSHARD_SINK, UnshardSink
from fourfold.axes.pipeline.work.tied import TiedWeights
from fourfold.comm.communicator import Communicator
from fourfold.comm.edge_compression import Compression, Kept
from fourfold.comm.edges import SendingEdge, StageEdges
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.scalars import ScalarReducer
from fourfold.model.batch import Microbatch
from fourfold.model.loss_sum import Loss, is_uneven, scale_problem, uneven_problem
from fourfold.model.objective import Objective
from fourfold.plan.damaged_samples import DamagedRecord
from fourfold.plan.precision import LossScale
from fourfold.proof.digests.batches import batch_mismatch_problem
from fourfold.step.grad_strategies import DividedByNominalCount, LocalSteps
from fourfold.step.stage import Stage
from fourfold.torch_kit.deferred_grads import PendingGrads
from fourfold.words.errors import FourfoldError, Problem, TaskError
from fourfold.words.program import LOSS, Action

NO_ELEMENTS = "a global batch without a loss element: all targets are ignored, or there are no samples"

ALL_DAMAGED = "all samples of the global batch are damaged"


ChunkPass = tuple[int, int]
"""A microbatch in a chunk: the number of the stage, and of the microbatch."""


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks and microbatches of a step."""

    loss: float
    count: float
    num_samples: float
    num_tokens: float
    num_targets: float
    num_stop_requests: float
    """On how many ranks a stop was requested."""
    num_mismatches: float
    """How many ranks have another batch than the ranks of their sequence: see `proof/digests/batches.py`."""
    other_count: float
    other_square: float
    """Of a loss that is made of several means: see `loss_sum`."""
    num_damaged: float
    """How many samples ranks have left out because they are damaged; ranks that share samples count each of them."""


TOTALS = [each.name for each in dataclasses.fields(StepTotals)]
COUNTED_BY_EACH_RANK = ("num_stop_requests", "num_mismatches", "num_damaged")
"""Of the other totals, one of the ranks that have the same samples adds its own."""


class StepParts(NamedTuple):
    """What the steps of one rank work with."""

    stage: Stage
    pp: int
    scalars: ScalarReducer
    """Of all ranks of the world."""
    meter: CommMeter
    objective: Objective
    local: LocalSteps
    division: DividedByNominalCount
    loss_scale: LossScale
    added_totals: Sequence[str]
    """Which of its totals this rank adds to those over all ranks; of ranks that have the same samples, one adds all."""
    edges: StageEdges
    """To the stages before and behind this rank's."""
    senders: Sequence[SendingEdge]
    """Where this rank sends to other stages: over these edges, and tied weights."""
    compression: Compression
    """Of the messages over these edges."""
    tied: TiedWeights
    """What the first and the last place of the pipeline use together."""
    count_ranks: Communicator
    """The ranks that know together how many loss elements a microbatch has: those of one tensor place."""
    max_norm: float
    """The bound of the gradient norm; infinite without clip."""
    device: torch.device


class StepRequest(NamedTuple):
    """What a step is begun with.

    nominal_count   None in the first step: a measure finds it
    stop_requested  whether this rank has been asked to stop; the step sums this over the ranks
    batch_mismatch  what is wrong if the ranks of one sequence have different batches; the step sums this over the ranks
    damaged         the samples that this rank's batch leaves out; the step sums their number over the ranks
    num_targets     of the whole samples of this rank's batch
    """

    microbatches: Sequence[Microbatch]
    nominal_count: float | None = None
    stop_requested: bool = False
    batch_mismatch: Problem | None = None
    damaged: Sequence[DamagedRecord] = ()
    num_targets: int = 0


class UpdateArgs(NamedTuple):
    """What the updates of one step depend on: see `FlatOptimizer.update`."""

    grad_scale: float
    num_ranks_with_grad: Sequence[float] | None
    """By slot of all buckets: how many ranks have a gradient; None: all."""
    squared_norms: Mapping[int, Tensor]
    """By bucket, if the update needs them."""


@dataclass
class StepState:
    """One step of this rank. `bad_reason`: why the step is bad, the same on every rank."""

    parts: StepParts
    request: StepRequest
    nominal_count: float | None = None
    losses: dict[int, Loss] = field(default_factory=dict)
    """By microbatch, from forward to backward."""
    empty_losses: dict[int, Tensor] = field(default_factory=dict)
    """Of microbatches without samples, where other ranks need their backward."""
    received: dict[ChunkPass, list[Tensor]] = field(default_factory=dict)
    """The activations that stages before have sent, from forward to the end of backward."""
    boundary: dict[ChunkPass, list[Tensor]] = field(default_factory=dict)
    """The outputs of stages before the last, from forward to backward."""
    upstream: dict[ChunkPass, list[Tensor]] = field(default_factory=dict)
    """The gradients of these, from the stages behind."""
    kept: dict[ChunkPass, Kept] = field(default_factory=dict)
    """By the stage that sends activations, and microbatch: what both ends remember of them until their gradients."""
    pending: dict[ChunkPass, PendingGrads] = field(default_factory=dict)
    """What first halves of backwards have left to the second ones."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """By microbatch; training keeps none."""
    local_count: float | Tensor = 0.0
    """This rank's loss elements so far."""
    loss_totals: list[tuple[int, Tensor]] = field(default_factory=list)
    """By microbatch: this rank's sum of the loss."""
    totals: StepTotals | None = None
    trained_count: float = 0.0
    """The loss elements that this rank's gradient is of; known with the totals."""
    grad_scale: float = 1.0
    grad_norm: float | None = None
    bad_reason: str | None = None
    overflowed: bool = False
    num_ranks_with_grad: Sequence[float] | None = None
    squared_norms: Mapping[int, Tensor] = field(default_factory=dict)
    has_called_hooks: bool = False
    """Whether the step has called the optimizer's step hooks."""
    has_begun_updates: bool = False
    has_pulled: bool = False
    """Whether all ranks have the same weights again, with local steps."""
    unshard_sink: UnshardSink = NO_UNSHARD_SINK
    """Called before this rank's shard of a bucket is read in forward."""
    done_early: set[Action] = field(default_factory=set)
    """Actions that have run within another one, and that the executor skips."""

    def __post_init__(self) -> None:
        self.stage = self.parts.stage
        """What the actions of this rank work with."""
        self.nominal_count = self.request.nominal_count
        self._host_totals = dict.fromkeys(TOTALS, 0.0)
        """This rank's totals."""
        self._host_totals["num_stop_requests"] = float(self.request.stop_requested)
        self._host_totals["num_mismatches"] = float(self.request.batch_mismatch is not None)
        self._host_totals["num_targets"] = float(self.request.num_targets)
        self._host_totals["num_damaged"] = float(len(self.request.damaged))
        self._refusal: FourfoldError | None = None
        """Why the totals are refused."""
        self._device_totals: list[tuple[str, Tensor]] = []
        """Totals that a device may still be computing; added when the totals are reduced."""

    @property
    def microbatches(self) -> Sequence[Microbatch]:
        return self.request.microbatches

    @property
    def is_skipped(self) -> bool:
        """Whether the step changes no weight; known with the totals, and with the norm if it is measured."""
        return self.bad_reason is not None or self.overflowed

    @property
    def last_nonempty(self) -> int:
        """The last microbatch of this rank with samples; −1 if there is none."""
        return max((index for index, part in enumerate(self.microbatches) if part.num_samples), default=-1)

    def add_loss(self, index: int, loss: Loss) -> None:
        """Add a microbatch to this rank's totals, without waiting for the device."""
        part = self.microbatches[index]
        self.losses[index] = loss
        self.loss_totals.append((index, loss.total.detach()))
        self.local_count = self.local_count + loss.count
        sums = {
            "loss": loss.total.detach(),
            "count": loss.count,
            "num_samples": part.num_samples,
            "num_tokens": part.num_tokens,
            "other_count": loss.other_count,
            "other_square": loss.other_square,
        }
        for name, value in sums.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                self._device_totals.append((name, value))
            else:
                self._host_totals[name] += float(value)

    def local_totals(self) -> Tensor:
        """This rank's totals, float64 [len(TOTALS)] on its device."""
        added = self.parts.added_totals
        host = [value if name in added else 0.0 for name, value in self._host_totals.items()]
        local = torch.tensor(host, dtype=torch.float64, device=self.parts.device)
        for name, value in self._device_totals:
            if name in added:
                local[TOTALS.index(name)] += value
        return local

    def poll_grad_scale(self) -> float | None:
        """The grad scale, or None while the totals are not known or are refused.

        Neither waits nor raises: within a backward, a peer may wait for this rank's tokens or weights.
        """
        is_open = self.totals is None and self._refusal is None
        if is_open and self.parts.local.scope.is_count_ready(self.parts.scalars):
            self._receive_totals()
        return None if self.totals is None else self.grad_scale

    def read_totals(self) -> StepTotals:
        """The totals. Waits for them; raises TaskError or DivergenceError if they are refused."""
        if self.totals is None and self._refusal is None:
            self._receive_totals()
        if self._refusal is not None:
            raise self._refusal
        assert self.totals is not None
        return self.totals

    def _receive_totals(self) -> None:
        """Decide from the totals whether the step is bad, and compute the grad scale."""
        try:
            totals = wait_totals(self)
        except FourfoldError as error:
            self._refusal = error
            return
        self.totals = totals
        if totals.num_damaged > 0 and totals.num_samples == 0:
            self.bad_reason = ALL_DAMAGED
        elif totals.count == 0:
            self.bad_reason = NO_ELEMENTS
        elif not math.isfinite(mean := totals.loss / totals.count):
            self.bad_reason = f"the loss is {mean}"
        self.trained_count = self.parts.local.scope.loss_count(totals.count, self.local_count)
        # Without elements the gradient is zero: any scale will do.
        nominal = self.parts.division.divisor(self.nominal_count, self.trained_count)
        if self.parts.objective.is_scale_dependent and self.trained_count not in (0, nominal):
            self._refusal = TaskError(scale_problem(self.trained_count, nominal), where="the model")
        self.grad_scale = nominal / (self.trained_count or nominal) / self.parts.loss_scale.value

    def nonfinite_microbatches(self) -> list[range]:
        """The sample ranges of this rank's microbatches whose loss is not finite."""
        stops = list(itertools.accumulate(part.num_samples for part in self.microbatches))
        bad = [index for index, total in self.loss_totals if not math.isfinite(total.item())]
        return [range(stops[index] - self.microbatches[index].num_samples, stops[index]) for index in bad]

    @property
    def update_args(self) -> UpdateArgs:
        """What the updates depend on."""
        return UpdateArgs(self.grad_scale, self.num_ranks_with_grad, self.squared_norms)


def wait_totals(step: StepState) -> StepTotals:
    """The totals of a step or of an evaluation. Raises TaskError for batches and losses that cannot be summed."""
    totals = StepTotals(*step.parts.scalars.wait(LOSS))
    if totals.num_mismatches:
        raise TaskError(step.request.batch_mismatch or batch_mismatch_problem(), where="the batch")
    if is_uneven(totals.count, totals.other_count, totals.other_square):
        raise TaskError(uneven_problem(step.parts.objective.loss_names), where="the loss")
    return totals
