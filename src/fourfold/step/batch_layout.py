"""Batch layout: which part of a batch each rank computes with: all of its samples' tokens, or a shard of them.

Law: the microbatches of the ranks that share samples tile these samples and their tokens.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.row_exchange import RowExchange
from fourfold.plan.rng import microbatch_seed
from fourfold.plan.sample_order import BatchRange
from fourfold.step.batch import Microbatch, split_microbatches, unpack_batch
from fourfold.step.digests.batches import batch_digest, batch_mismatch_problem
from fourfold.step.pipeline.dry_run import PipelineDryRun
from fourfold.step.rank_dropout import SplitDropout
from fourfold.step.sequence.sequence_parallel import SequenceParallel
from fourfold.step.tensor.collective_dry_run import CollectiveTensorDryRun
from fourfold.step.tensor.tensor_calls import TensorCalls
from fourfold.step.tensor_tree import tree_map
from fourfold.words.errors import Problem

Unsharded = Callable[[str], AbstractContextManager[None]]


class BatchLayout(Protocol):
    """How batches are laid over the ranks that share samples."""

    @property
    def needs_dry_run(self) -> bool:
        """Whether no batch has shown yet that the model can be laid out so."""
        ...

    def compare(self, batch: Any) -> tuple[Any, Problem | None]:
        """The batch; if ranks that share it have different batches, an empty one and the problem. Collective."""
        ...

    def microbatches(
        self, batch: Any, count: int, *, step: int, samples: BatchRange | None
    ) -> AbstractContextManager[list[Microbatch]]:
        """This rank's microbatches of a batch that has been compared; inside, attention reaches all its tokens."""
        ...

    def dry_run(self, batch: Any, unsharded: Unsharded) -> None:
        """Show on a batch that the model can be laid out so. Collective."""
        ...

    def dry_run_batch(self, batch: Any) -> Any:
        """As much of a batch as a dry run takes."""
        ...


class WholeSamples:
    """A rank has all tokens of its samples."""

    needs_dry_run = False

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

    def dry_run(self, batch: Any, unsharded: Unsharded) -> None:
        pass

    def dry_run_batch(self, batch: Any) -> Any:
        return batch


class SharedByTensorRanks:
    """The tensor ranks of a place need the same samples; `inner` lays these out, and `rules` shows the cut is right."""

    def __init__(self, inner: BatchLayout, calls: TensorCalls, rules: CollectiveTensorDryRun) -> None:
        self._inner, self._calls, self._rules = inner, calls, rules

    @property
    def needs_dry_run(self) -> bool:
        return self._rules.is_needed or self._inner.needs_dry_run

    def compare(self, batch: Any) -> tuple[Any, Problem | None]:
        batch, problem = self._inner.compare(batch)
        # A rank that has found a problem on another axis says so here: its peers must leave the batch out as well.
        digest = -1 if problem is not None else batch_digest(batch)
        if len(set(self._calls.agree(digest))) == 1:
            return batch, problem
        return no_samples(batch), problem or batch_mismatch_problem("tp", self._calls.ranks.ranks)

    @contextlib.contextmanager
    def microbatches(
        self, batch: Any, count: int, *, step: int, samples: BatchRange | None
    ) -> Iterator[list[Microbatch]]:
        with self._inner.microbatches(batch, count, step=step, samples=samples) as microbatches:
            yield microbatches

    def dry_run(self, batch: Any, unsharded: Unsharded) -> None:
        if self._rules.is_needed:
            self._rules.run(batch, unsharded("try out"))
        if self._inner.needs_dry_run:
            self._inner.dry_run(batch, unsharded)

    def dry_run_batch(self, batch: Any) -> Any:
        return self._inner.dry_run_batch(batch)


class SharedByStages:
    """The stages of a pipeline need the same batch; `inner` lays it out, `stages` shows how the model is divided.

    `ranks` have the stages of one model, and exchange `rows`. `seeds`: the run's seed and the data index.
    """

    def __init__(
        self,
        inner: BatchLayout,
        calls: TensorCalls,
        ranks: Communicator,
        rows: RowExchange,
        stages: PipelineDryRun,
        seeds: tuple[int, int],
    ) -> None:
        self._inner, self._calls, self._ranks, self._rows, self._stages = inner, calls, ranks, rows, stages
        self._seeds = seeds

    @property
    def needs_dry_run(self) -> bool:
        return not self._stages.has_ended or self._inner.needs_dry_run

    def compare(self, batch: Any) -> tuple[Any, Problem | None]:
        batch, problem = self._inner.compare(batch)
        digest = -1 if problem is not None else batch_digest(batch)
        if len(set(self._calls.agree_with_stages(self._rows, self._ranks, digest))) == 1:
            return batch, problem
        return no_samples(batch), problem or batch_mismatch_problem("pp", self._ranks.ranks)

    @contextlib.contextmanager
    def microbatches(
        self, batch: Any, count: int, *, step: int, samples: BatchRange | None
    ) -> Iterator[list[Microbatch]]:
        seed, dp_index = self._seeds
        with self._inner.microbatches(batch, count, step=step, samples=samples) as parts:
            yield [p._replace(draw_seed=microbatch_seed(seed, dp_index, step, i)) for i, p in enumerate(parts)]

    def dry_run(self, batch: Any, unsharded: Unsharded) -> None:
        if not self._stages.has_ended:
            self._stages.run(batch)
        if self._inner.needs_dry_run:
            self._inner.dry_run(batch, unsharded)

    def dry_run_batch(self, batch: Any) -> Any:
        return self._inner.dry_run_batch(batch)


def no_samples(batch: Any) -> Any:
    """A batch without its samples."""
    return tree_map(unpack_batch(batch), lambda tensor: tensor[:0])


class TokenShards:
    """The ranks that differ on sp have shards of the tokens of the same samples."""

    def __init__(self, sequence_parallel: SequenceParallel, device: torch.device) -> None:
        self._sequence_parallel, self._device = sequence_parallel, device

    @property
    def needs_dry_run(self) -> bool:
        return not self._sequence_parallel.has_dry_run

    def compare(self, batch: Any) -> tuple[Any, Problem | None]:
        problem = self._sequence_parallel.batch_mismatch(batch)
        return (batch if problem is None else no_samples(batch)), problem

    @contextlib.contextmanager
    def microbatches(
        self, batch: Any, count: int, *, step: int, samples: BatchRange | None
    ) -> Iterator[list[Microbatch]]:
        shard, real_tokens = self._sequence_parallel.shard_batch(batch)
        microbatches = split_microbatches(shard, count, self._device, real_tokens=real_tokens)
        with self._sequence_parallel.distribute_attention(microbatches, step, samples):
            yield microbatches

    def dry_run(self, batch: Any, unsharded: Unsharded) -> None:
        self._sequence_parallel.dry_run(batch, unsharded("try out"))

    def dry_run_batch(self, batch: Any) -> Any:
        return self._sequence_parallel.dry_run_batch(batch)
