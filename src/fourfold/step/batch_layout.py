"""Batch layout: which part of a batch each rank computes with: all of its samples' tokens, or a shard of them.

Law: the microbatches of the ranks that share samples tile these samples and their tokens.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fourfold.axes.context.attach.axis import ContextParallel
from fourfold.comm.communicator import Communicator
from fourfold.model.batch import Microbatch, split_microbatches, unpack_batch
from fourfold.model.rank_dropout import SplitDropout
from fourfold.orders.sample_order import BatchRange
from fourfold.plan.rng import microbatch_seed
from fourfold.proof.digests.batches import batch_digest, batch_mismatch_problem
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.words.errors import Problem


class BatchLayout(Protocol):
    """How batches are laid over the ranks that share samples."""

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


class TokenShards:
    """The ranks that differ on cp have shards of the tokens of the same samples."""

    def __init__(self, context_parallel: ContextParallel, device: torch.device) -> None:
        self._context_parallel, self._device = context_parallel, device

    def compare(self, batch: Any) -> tuple[Any, Problem | None]:
        problem = self._context_parallel.batch_mismatch(batch)
        return (batch if problem is None else no_samples(batch)), problem

    @contextlib.contextmanager
    def microbatches(
        self, batch: Any, count: int, *, step: int, samples: BatchRange | None
    ) -> Iterator[list[Microbatch]]:
        shard, real_tokens = self._context_parallel.shard_batch(batch)
        microbatches = split_microbatches(shard, count, self._device, real_tokens=real_tokens)
        with self._context_parallel.distribute_attention(microbatches, step, samples):
            yield microbatches
