"""Context parallelism: each rank holds some tokens of every sequence, and attention reaches all of them.

cp group  the ranks that hold the tokens of the same samples
check     before the first step, it shows that tokens interact only in attention; else the model is refused
call  the place of an attention call in its microbatch's forward
Law: a step over dp × cp ranks is the step of one process.
Law: a checkpoint's second forward drops what the first did.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fourfold.axes.context.attach.check import ContextCheck
from fourfold.axes.context.attach.losses import check_even_targets
from fourfold.axes.context.attach.token_shards import (
    TokenShard,
    inputs_and_targets,
    mask_padding,
    packed_problems,
    sequence_length,
    shard_tokens,
    token_shards,
)
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.context_group import ContextGroup, connect_context
from fourfold.axes.context.work.dropout import AttentionDropout
from fourfold.comm.communicator import Communicator
from fourfold.model.batch import Microbatch, has_token_dim, split_microbatches
from fourfold.model.rank_dropout import DrawSlice, DrawSlices, RankDropout, TaggedDraws, checkpoint_error
from fourfold.model.sdpa_interception import AttentionCall, intercept_attention
from fourfold.model.transformers_attention import install_attention
from fourfold.model.weights import Weights
from fourfold.orders.sample_order import BatchRange, shard_range
from fourfold.proof.attachment import AxisParts, BatchLayout, Rank, TensorCalls, no_samples
from fourfold.proof.checks import Check
from fourfold.proof.digests.batches import batch_digest, batch_mismatch_problem, is_equal_across_ranks
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.torch_kit.torch_private import is_in_backward
from fourfold.words.errors import Problem, TaskError

# ---- dropout -------------------------------------------------------------------------------------------------------

HEADS_DIM = 1


class AttentionDropoutCounter:
    """Gives each attention call with dropout its place in the step, from which its `AttentionDropout` is made."""

    def __init__(self, seed: int, draws: TaggedDraws) -> None:
        self._seed, self._draws = seed, draws

    def begin_step(self, step: int, first_sample: int, microbatch_sizes: Sequence[int]) -> None:
        """Begin a step. `first_sample`: the index of this rank's first sample, in the global batch if that is known.

        `microbatch_sizes`: the sizes of the microbatches that are not empty.
        """
        self._step, self._first_sample, self._microbatch_sizes = step, first_sample, microbatch_sizes
        self._microbatch_index, self._call_index = -1, 0
        self._dropouts: dict[int, AttentionDropout] = {}

    def next_microbatch(self, *_: Any) -> None:
        """The forward of the next microbatch begins."""
        self._microbatch_index, self._call_index = self._microbatch_index + 1, 0

    def next_dropout(self, call: AttentionCall) -> AttentionDropout:
        """The dropout of the attention call that begins now, or that a checkpoint repeats in backward."""
        what = f"attention with dropout_p = {call.dropout_p:g}"
        tag, part = self._draws.next(what, call.q)
        if tag not in self._dropouts:
            if is_in_backward():
                raise checkpoint_error(f"cp > 1 and {what}")
            start = self._first_sample + sum(self._microbatch_sizes[: self._microbatch_index])
            samples = range(start, start + self._microbatch_sizes[self._microbatch_index])
            first_head = 0 if part is None else _first_head(part, what)
            self._dropouts[tag] = AttentionDropout(
                call.dropout_p, self._seed, self._step, self._call_index, samples, first_head
            )
            self._call_index += 1
        return self._dropouts[tag]


def _first_head(part: DrawSlice, what: str) -> int:
    """The first of the heads that are here."""
    if (part.dim, len(part.ranges), part.fold) != (HEADS_DIM, 1, 1):
        got = f"cp > 1, tp > 1 and {what}, whose queries are split in dim {part.dim}"
        raise TaskError(Problem(got, "queries [B, H, L, D] that are split by heads", "dropout = 0, or cp = 1"))
    return part.start


# ---- the axis ------------------------------------------------------------------------------------------------------


class LocalBatch(NamedTuple):
    """This rank's tokens of a batch. `real_tokens` are the indices of those that are no pads; None: all."""

    batch: tuple[Any, Any]
    real_tokens: Tensor | None


class ContextParallel:
    """See `BatchLayout`: ranks that differ on cp have shards of the tokens of the same samples.

    `seed` is that of attention dropout, the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        context_group: ContextGroup,
        world: Communicator,
        *,
        num_microbatches: int,
        draw_slices: DrawSlices,
        check: ContextCheck,
        seed: int = 0,
    ) -> None:
        """`world` lies on the plan's mesh; `context_group` are its ranks along "cp"."""
        self._model, self._context_group, self._world = model, context_group, world
        self._spec, self._num_microbatches = context_group.spec, num_microbatches
        self._dp_index = world.along("dp").rank
        self._draws = TaggedDraws(draw_slices)
        self._dropout = RankDropout(self._draws, context_group.index, context_group.size)
        self._dropout_counter = AttentionDropoutCounter(seed, self._draws)
        self._check = check
        self._shard: TokenShard | None = None

    def _shard_batch(self, batch: Any) -> LocalBatch:
        """This rank's tokens of a batch. Raises TaskError if the batch has no tokens that can be sharded."""
        inputs, targets = inputs_and_targets(batch)
        length = sequence_length((inputs, targets))
        if problems := packed_problems(self._model, inputs):
            raise TaskError(problems, where="the batch")
        self._check_even_targets(targets, length)
        shard = self._shard = token_shards(self._spec, length)[self._context_group.index]
        real_tokens = shard.real_tokens
        local_targets = shard_tokens(targets, shard)
        if real_tokens is not None:
            local_targets = tree_map(
                local_targets, lambda tensor: tensor[:, real_tokens] if has_token_dim(tensor, shard.size) else tensor
            )
        return LocalBatch((shard_tokens(inputs, shard), local_targets), real_tokens)

    def compare(self, batch: Any) -> tuple[Any, Problem | None]:
        """See `BatchLayout`."""
        if is_equal_across_ranks(batch_digest(batch), self._context_group.groups, self._world.device):
            return batch, None
        return no_samples(batch), batch_mismatch_problem("cp", self._world.along("cp").ranks)

    @contextlib.contextmanager
    def microbatches(
        self, batch: Any, count: int, *, step: int, samples: BatchRange | None
    ) -> Iterator[list[Microbatch]]:
        """See `BatchLayout`."""
        shard, real_tokens = self._shard_batch(batch)
        microbatches = split_microbatches(shard, count, self._world.device, real_tokens=real_tokens)
        with self._attention_across_ranks(microbatches, step, samples):
            yield microbatches

    def _check_even_targets(self, targets: Any, length: int) -> None:
        if (ignored_indices := self._check.ignored_indices) is None:
            return
        problem, shards = self._spec.length_problem(length), token_shards(self._spec, length)
        lengths = "" if problem is None else problem.attempt
        num_samples = len(next(tree_leaves(targets)))
        # A scalar loss is the mean of a microbatch, so each microbatch is checked.
        for index in range(self._num_microbatches):
            samples = slice(*shard_range(0, num_samples, self._num_microbatches, index))
            part = tree_map(targets, lambda tensor, samples=samples: tensor[samples])
            check_even_targets(part, shards, ignored_indices, lengths=lengths)

    @contextlib.contextmanager
    def _attention_across_ranks(
        self, microbatches: Sequence[Microbatch], step: int, sample_range: BatchRange | None
    ) -> Iterator[None]:
        """Within, attention reaches all tokens of the sequences. `sample_range`: where the batch is in the epoch."""
        # Without a sample range, indices of different data ranks are far apart, so no two samples share a dropout mask.
        first = self._dp_index << 32 if sample_range is None else sample_range.local_start - sample_range.start
        self._dropout_counter.begin_step(step, first, [part.num_samples for part in microbatches if part.num_samples])
        self._draws.begin_step()
        hook = self._model.register_forward_pre_hook(self._dropout_counter.next_microbatch)
        try:
            with (
                self._draws.slices.numbering(self._model),
                intercept_attention(self._attend, overrides=self._dropout.overrides),
                install_attention(self._model),
            ):
                yield
        finally:
            hook.remove()

    def _attend(self, call: AttentionCall) -> Tensor:
        assert self._shard is not None
        return context_attention(
            call.q,
            call.k,
            call.v,
            self._context_group,
            mask=mask_padding(call, self._shard),
            is_causal=call.is_causal,
            scale=call.scale,
            dropout=self._dropout_counter.next_dropout(call) if call.dropout_p else None,
            enable_gqa=call.enable_gqa,
        )


def attach(rank: Rank) -> AxisParts[None]:
    """Nothing of the model is cut: ranks divide the tokens of a batch."""
    plan, loss = rank.plan, rank.loss
    if loss is None or plan.cp == 1:
        return AxisParts(rank, None)
    check = ContextCheck(rank.skeleton, loss, plan.context_spec, rank.world)

    def checks(rank: Rank, weights: Weights) -> Sequence[Check]:
        return [check]

    def lay_out(rank: Rank, layout: BatchLayout, calls: TensorCalls) -> BatchLayout:
        ranks = rank.world.along("cp")
        group = connect_context(ranks, rank.meter, ring=plan.ring, ulysses=plan.ulysses, transport=plan.transport)
        return ContextParallel(
            rank.model,
            group,
            rank.world,
            check=check,
            num_microbatches=plan.microbatches,
            draw_slices=rank.draws,
            seed=rank.seed,
        )

    rank = rank._replace(shortened=check.shortened, is_scale_dependent=lambda: check.is_scale_dependent)
    return AxisParts(rank, None, checks, lay_out, divides_samples=True)
