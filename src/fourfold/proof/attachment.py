"""Attachment: what an axis is given of a rank, and what it gives to the step that is assembled there.

attach   each axis has one such function, in `axes/NAME/attach`: it cuts the model, and gives the rest as `AxisParts`
shared   a batch that several ranks need: they hold parts of one model
Law: an axis of one index attaches nothing: the model, the batches and the checks are as without it.
Law: the microbatches of the ranks that share samples tile these samples and their tokens.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from fourfold.axes.pipeline.work.chain import StageMap
from fourfold.axes.pipeline.work.gates import SplitTokens
from fourfold.comm.channel import Channel
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.scalars import CallChecker
from fourfold.comm.tensor_group import NO_DIGEST, TensorGroup, compare_calls, compare_calls_of_stages
from fourfold.model.batch import Microbatch, split_microbatches, unpack_batch
from fourfold.model.batch_statistics import BatchStatistics
from fourfold.model.objective import Objective
from fourfold.model.rank_dropout import DrawSlices, SplitDropout
from fourfold.model.weights import Weights
from fourfold.orders.sample_order import BatchRange
from fourfold.plan.plan import Plan
from fourfold.plan.rng import microbatch_seed
from fourfold.proof.checks import Check
from fourfold.proof.digests.batches import batch_digest, batch_mismatch_problem
from fourfold.torch_kit.deferred_init import InitialModel
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.words.errors import Problem

# ---- calls ---------------------------------------------------------------------------------------------------------


class TensorCalls:
    """See `CallChecker`: the tensor ranks of a place compare their calls before all ranks of the world do.

    The first collective of every call in a tensor group is the same, whatever the call is. So ranks in different calls
    meet in it, over shared memory and over messages, and raise DivergenceError; none waits for another in a layer.
    """

    def __init__(self, world_calls: CallChecker, group: TensorGroup, ranks: Communicator) -> None:
        self._world_calls, self._group, self.ranks = world_calls, group, ranks
        self._call = ""

    def begin(self, call: str) -> None:
        self._call = call
        self._world_calls.begin(call)

    def check_same(self) -> None:
        self.meet()
        self._world_calls.check_same()

    def check_begun(self, waited_seconds: float | None) -> None:
        self._world_calls.check_begun(waited_seconds)

    def meet(self, part: str = "") -> None:
        """Wait until the tensor ranks of this place are in the same call, and in this part of it.

        Raises DivergenceError.
        """
        if self._group.size > 1:
            self.agree(NO_DIGEST, part)

    def agree(self, digest: int, part: str = "") -> list[int]:
        """As `meet`. Returns the digests of all tensor ranks."""
        return compare_calls(self._group, self.ranks, self._text(part), digest)

    def agree_with_stages(self, rows: Channel, stages: Communicator, digest: int) -> list[int]:
        """The same of the ranks that differ from this one on the pipeline axis only; `rows`: their exchange."""
        return compare_calls_of_stages(rows, stages, self._text(), digest)

    def _text(self, part: str = "") -> str:
        name, newline, options = self._call.partition("\n")
        return f"{part and f'{part} of '}{name}{newline}{options}"


# ---- batches -------------------------------------------------------------------------------------------------------


class BatchLayout(Protocol):
    """Which part of a batch each rank computes with."""

    def compare(self, batch: Any) -> tuple[Any, Problem | None]:
        """The batch; if ranks that share it have different batches, an empty one and the problem. Collective."""
        ...

    def microbatches(
        self, batch: Any, count: int, *, step: int, samples: BatchRange | None
    ) -> AbstractContextManager[list[Microbatch]]:
        """This rank's microbatches of a batch that has been compared; inside, attention reaches all its tokens."""
        ...


class WholeSamples:
    """A rank has all tokens of its samples."""

    def __init__(self, device: torch.device, dropout: SplitDropout) -> None:
        self._device, self._dropout = device, dropout

    def compare(self, batch: Any) -> tuple[Any, Problem | None]:
        return batch, None

    @contextlib.contextmanager
    def microbatches(
        self, batch: Any, count: int, *, step: int, samples: BatchRange | None
    ) -> Iterator[list[Microbatch]]:
        with self._dropout.installed():
            yield split_microbatches(batch, count, self._device)


class SharedSamples:
    """Ranks that differ on an axis need the same samples; `inner` lays these out.

    agree  collective among `ranks`: the digests that all of them have given
    seeds  the run's seed and the data index, of what the stages of a model draw; None: they need none
    """

    def __init__(
        self,
        inner: BatchLayout,
        axis: str,
        ranks: Communicator,
        agree: Callable[[int], Sequence[int]],
        seeds: tuple[int, int] | None = None,
    ) -> None:
        self._inner, self._axis, self._ranks, self._agree, self._seeds = inner, axis, ranks, agree, seeds

    def compare(self, batch: Any) -> tuple[Any, Problem | None]:
        batch, problem = self._inner.compare(batch)
        # A rank that has found a problem on another axis says so here: its peers must leave the batch out as well.
        digest = -1 if problem is not None else batch_digest(batch)
        if len(set(self._agree(digest))) == 1:
            return batch, problem
        return no_samples(batch), problem or batch_mismatch_problem(self._axis, self._ranks.ranks)

    @contextlib.contextmanager
    def microbatches(
        self, batch: Any, count: int, *, step: int, samples: BatchRange | None
    ) -> Iterator[list[Microbatch]]:
        with self._inner.microbatches(batch, count, step=step, samples=samples) as parts:
            if self._seeds is not None:
                seed, dp_index = self._seeds
                seeds = [microbatch_seed(seed, dp_index, step, index) for index in range(len(parts))]
                parts = [part._replace(draw_seed=each) for part, each in zip(parts, seeds, strict=True)]
            yield parts


def no_samples(batch: Any) -> Any:
    """A batch without its samples."""
    return tree_map(unpack_batch(batch), lambda tensor: tensor[:0])


A = TypeVar("A")

# ---- axes ----------------------------------------------------------------------------------------------------------


class Rank(NamedTuple):
    """What an axis is given of a rank. Axes are attached in turn, and each is given what those before it have made.

    initial             the model, of which each axis leaves this rank's part, and its weights
    stages              which stage of the pipeline each parameter has
    rules               how modules are split, on the tensor axis
    draws               which slices random draws of the model are
    split_tokens        where tensor ranks hold some tokens of hidden tensors
    skeleton            the whole model, for dry runs
    whole_shown_to_loss within, a loss that reads the model finds the whole one
    statistics          of the model's batch normalizations
    shortened           the part of a batch that is checked
    is_scale_dependent  what a check has shown of this: see `Objective`
    """

    initial: InitialModel
    optimizer: Optimizer
    loss: Callable[[Any, Any], Any] | None
    objective: Objective
    plan: Plan
    rules: Any
    seed: int
    world: Communicator
    meter: CommMeter
    stages: StageMap
    draws: DrawSlices
    split_tokens: SplitTokens
    skeleton: nn.Module
    statistics: BatchStatistics
    whole_shown_to_loss: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    shortened: Callable[[Any], tuple[Any, Any]] = unpack_batch
    is_scale_dependent: Callable[[], bool] = bool

    @property
    def model(self) -> nn.Module:
        return self.initial.model

    @property
    def transport(self) -> str:
        """The plan's."""
        return self.plan.transport


def _no_checks(rank: Rank, weights: Weights) -> Sequence[Check]:
    return ()


def _unchanged(rank: Rank, layout: BatchLayout, calls: TensorCalls) -> BatchLayout:
    return layout


class AxisParts(NamedTuple, Generic[A]):
    """What an axis gives to a step.

    rank            as the axes after this one are given it
    axis            what this rank holds on the axis, and with whom
    checks          what a first batch must show; made when all axes are attached, and given the weights of the stage
    lay_out         how its ranks divide or share a batch that is laid out on the axes before; collective
    transport_name  what joins its ranks, in words; empty: nothing
    divides_samples whether its ranks have parts of one sample; on the other axes they share all that is left of it
    """

    rank: Rank
    axis: A
    checks: Callable[[Rank, Weights], Sequence[Check]] = _no_checks
    lay_out: Callable[[Rank, BatchLayout, TensorCalls], BatchLayout] = _unchanged
    transport_name: str = ""
    divides_samples: bool = False
