"""Sequence: a rank's tokens, and attention that reaches all of them.

line     the ranks that hold the tokens of the same samples
trial    before the first batch it is shown that tokens meet in attention only (`trial.py`), or the model is refused
Law: a step over dp × sp ranks is the step of one process.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.parts.comm import transports
from fourfold.parts.sequence import attention
from fourfold.plan.plan import Plan
from fourfold.plan.sample_order import BatchRange
from fourfold.plan.sample_order import shard_range as between
from fourfold.plan.sequence import length_divisor, length_problem
from fourfold.step.batch import Microbatch, has_token_dim, unpack_batch
from fourfold.step.dry_run.grad_projections import Projection
from fourfold.step.dry_run.random_weights import STRICTEST_CHECK, MemoryFit, find_memory_fit
from fourfold.step.sequence import grad_sum_check
from fourfold.step.sequence.batch_consistency import batch_digest, batch_mismatch_problem, is_equal_across_ranks
from fourfold.step.sequence.dropout import AttentionDropoutCounter, per_rank_dropouts
from fourfold.step.sequence.dry_run import DryRunResult, SequenceDryRun, truncate_batch
from fourfold.step.sequence.grad_sum_check import GradProjections
from fourfold.step.sequence.losses import (
    LossSum,
    ObservedLoss,
    check_even_targets,
    loss_sum_problem,
    non_mean_problem,
    observe_loss,
)
from fourfold.step.sequence.sdpa_interception import AttentionCall, intercept_attention
from fourfold.step.sequence.token_shards import TokenShard, mask_padding, sequence_length, shard_tokens, token_shard
from fourfold.step.sequence.transformers import check_not_packed, has_transformers_model, install_attention
from fourfold.step.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import Problem, TaskError

DRY_RUN_TOKENS = 256
DRY_RUN_SAMPLES = 2
log = logging.getLogger("fourfold")


class LocalBatch(NamedTuple):
    """This rank's part of a batch; `kept`: which of its tokens are no pads, None: all."""

    batch: tuple[Any, Any]
    real_tokens: Tensor | None


class SequenceParallel:
    """The sequence axis of a step. Collective to build. `seed` is that of dropout in attention: one for all ranks."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        plan: Plan,
        ranks: transports.Communicator,
        *,
        seed: int = 0,
    ) -> None:
        self._model, self._loss, self._plan, self._ranks = model, loss, plan, ranks
        self._coords = plan.mesh.coordinates(ranks.rank)
        lines = plan.mesh.groups("sp")
        self._sp_ranks = next(line for line in lines if ranks.rank in line)
        self._axis = attention.connect_sequence(
            ranks, lines, ring=plan.ring, ulysses=plan.ulysses, transport=plan.transport
        )
        self._dropout_overrides = per_rank_dropouts(self._coords["sp"])
        self._dropout_counter = AttentionDropoutCounter(seed)
        self._shard: TokenShard | None = None
        self._ignored_indices: list[int] | None = None
        self.has_dry_run = False

    @property
    def ring_groups(self) -> Sequence[transports.RingGroup]:
        """What attention travels over."""
        return self._axis.groups

    def token_shards(self, length: int) -> list[TokenShard]:
        """What each rank of the line keeps of sequences of this length."""
        return [token_shard(self._plan, length, index) for index in range(self._plan.sp)]

    def shard_batch(self, batch: Any) -> LocalBatch:
        """This rank's tokens of a batch. Raises TaskError where a batch has none that can be cut."""
        inputs, targets = inputs_and_targets(batch)
        length = sequence_length((inputs, targets))
        if has_transformers_model(self._model):
            check_not_packed(inputs)
        shares = self.token_shards(length)
        if self._ignored_indices is not None:
            self._check_even_targets(targets, length)
        mine = self._shard = shares[self._coords["sp"]]
        kept = mine.real_tokens
        parts = shard_tokens(targets, mine)
        if kept is not None:
            parts = tree_map(parts, lambda tensor: tensor[:, kept] if has_token_dim(tensor, mine.size) else tensor)
        return LocalBatch((shard_tokens(inputs, mine), parts), kept)

    def batch_mismatch(self, batch: Any) -> Problem | None:
        """What is wrong where the ranks of this line have other batches. Collective among them."""
        return (
            None
            if is_equal_across_ranks(batch_digest(batch), self.ring_groups, self._ranks.device)
            else batch_mismatch_problem(self._sp_ranks)
        )

    def _check_even_targets(self, targets: Any, length: int) -> None:
        assert self._ignored_indices is not None
        problem = length_problem(length, self._plan.sp, self._plan.ring, self._plan.ulysses)
        lengths = "" if problem is None else problem.attempt
        samples = len(next(tree_leaves(targets)))
        # A mean is taken of each microbatch.
        for index in range(self._plan.microbatches):
            some = slice(*between(0, samples, self._plan.microbatches, index))
            part = tree_map(targets, lambda tensor, some=some: tensor[some])
            check_even_targets(part, self.token_shards(length), self._ignored_indices, lengths=lengths)

    @contextlib.contextmanager
    def distribute_attention(
        self, microbatches: Sequence[Microbatch], step: int, sample_range: BatchRange | None
    ) -> Iterator[None]:
        """Within, attention reaches the tokens of the whole line. `samples`: the batch's place in the feed's order."""
        # Without a place in the order, samples of other data ranks are far away: no two are drawn alike.
        first = self._coords["dp"] << 32 if sample_range is None else sample_range.local_start - sample_range.start
        self._dropout_counter.begin_step(step, first, [part.num_samples for part in microbatches if part.num_samples])
        hook = self._model.register_forward_pre_hook(self._dropout_counter.next_microbatch)
        try:
            with intercept_attention(self._attend, overrides=self._dropout_overrides), install_attention(self._model):
                yield
        finally:
            hook.remove()

    def _attend(self, call: AttentionCall) -> Tensor:
        assert self._shard is not None
        mask = mask_padding(call, self._shard)
        dropout = self._dropout_counter.next_dropout(call.dropout_p) if call.dropout_p else None
        options = {"causal": call.is_causal, "scale": call.scale, "grouped": call.enable_gqa}
        return attention.sequence_attention(call.q, call.k, call.v, self._axis, mask=mask, dropout=dropout, **options)

    def dry_run(self, batch: Any, unsharded: contextlib.AbstractContextManager[None]) -> None:
        """Show that the model can be cut, by the first tokens of this batch. Collective.

        `reading`: within, the model may be called. Raises TaskError, on every rank, where it cannot be cut.
        """
        inputs, targets = inputs_and_targets(batch)
        length = sequence_length((inputs, targets))
        told: dict[str, Any] = {"line": self._coords["dp"], "problems": [], "digest": batch_digest(batch)}
        values: list[ObservedLoss] = []
        tried = DryRunResult([])
        room = self._find_memory_fit()
        # Its end is collective where weights rest split. Nobody may meet within: who has no samples is there at once.
        with unsharded:
            tries = any(len(tensor) for tensor in tree_leaves(targets))
            if tries:
                tried, values = self._run_dry_run(inputs, targets, length, room)
        if tries:
            told["problems"] = tried.problems
            told["gradients"] = tried.grad_projections
            told["judgement"], told["fell_back"] = str(tried.config), tried.fallback_reason
            told["values"] = [value.loss_sum for value in values]
            told["means"] = any(value.is_mean for value in values)
            told["odd"] = next((value.non_mean_op for value in values if value.non_mean_op is not None), None)
            told["close"] = max((value.tolerance for value in values), default=0.0)
            told["ignored"] = sorted({index for value in values for index in value.ignored_indices})
        everyone = self._ranks.all_gather_json(told)
        self._apply_reports(everyone)
        if self._ignored_indices is not None:
            self._check_even_targets(targets, length)
        # A batch that is empty everywhere has shown nothing.
        self.has_dry_run = any("values" in told for told in everyone)

    def _find_memory_fit(self) -> MemoryFit:
        """What of the dry run fits into memory on every rank. Collective."""
        mine = find_memory_fit(self._model, self._ranks.device, num_local_ranks=self._ranks.world.local_size)
        return MemoryFit(*(all(each) for each in zip(*self._ranks.all_gather_json(mine), strict=True)))

    def _run_dry_run(
        self, inputs: Mapping[str, Any], targets: Any, length: int, memory_fit: MemoryFit
    ) -> tuple[DryRunResult, list[ObservedLoss]]:
        """What a trial finds; without problems also the values of the loss for all tokens, and for this rank's."""
        inputs, targets = self.dry_run_batch((inputs, targets))
        few = sequence_length((inputs, targets))
        inputs, targets = (tree_map(tree, lambda tensor: tensor.to(self._ranks.device)) for tree in (inputs, targets))
        mine = token_shard(self._plan, few, self._coords["sp"])
        try:
            tried = SequenceDryRun(self._model, inputs, mine, ulysses=self._plan.ulysses, memory_fit=memory_fit).run()
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            if few == length:
                problem = Problem(f"a model that fails on a sample of {length} tokens: {said}", "one that does not")
                return DryRunResult([problem]), []
            got = f"sp > 1 and a model that fails with {few} tokens, where a sample has {length}: {said}"
            return DryRunResult([Problem(got, "a model of any number of tokens")]), []
        if tried.problems:
            return tried, []
        samples = len(next(tree_leaves(targets)))
        with torch.no_grad():
            whole = observe_loss(self._loss, tried.outputs, targets, samples)
            # Of the same outputs: no difference but that of the loss itself.
            part = shard_tokens(tried.outputs, mine)
            return tried, [whole, observe_loss(self._loss, part, shard_tokens(targets, mine), samples)]

    def dry_run_batch(self, batch: Any) -> tuple[Any, Any]:
        """The first samples and tokens of a batch, as many as the model is tried with."""
        inputs, targets = inputs_and_targets(batch)
        length = sequence_length((inputs, targets))
        options = {
            "length": length,
            "num_tokens": self._dry_run_length(length, inputs, targets),
            "num_samples": DRY_RUN_SAMPLES,
        }
        return truncate_batch(inputs, **options), truncate_batch(targets, **options)

    def _dry_run_length(self, length: int, inputs: Any, targets: Any) -> int:
        """How many tokens the model is tried with: such a number as no other dim 1 has."""
        step = length_divisor(self._plan.sp, self._plan.ring, self._plan.ulysses)
        few = -(-min(length, DRY_RUN_TOKENS) // step) * step
        others = [
            t.shape[1] for t in (*tree_leaves(inputs), *tree_leaves(targets)) if t.dim() > 1 and t.shape[1] != length
        ]
        while few in others:
            few += step
        return few

    def _apply_reports(self, reports: list[dict[str, Any]]) -> None:
        """Raise TaskError for what any rank has found; learn whether the loss is a mean."""
        for line in {told["line"] for told in reports}:
            those = [rank for rank, told in enumerate(reports) if told["line"] == line]
            if len({reports[rank]["digest"] for rank in those}) > 1:
                raise TaskError(batch_mismatch_problem(those), where="the batch")
        problems = [Problem(*problem) for told in reports for problem in told["problems"]]
        if problems:
            raise TaskError(list(dict.fromkeys(problems)), where="the model")
        tried = [told for told in reports if "values" in told]
        self._check_gradients(tried)
        if any(told["means"] for told in tried):
            self._ignored_indices = sorted({index for told in tried for index in told["ignored"]})
        for line in {told["line"] for told in tried}:
            those = [told for told in tried if told["line"] == line]
            parts = [LossSum(*told["values"][1]) for told in those]
            problem = loss_sum_problem(LossSum(*those[0]["values"][0]), parts, tolerance=those[0]["close"])
            odd = those[0]["odd"]
            problem = problem if odd is None else non_mean_problem(odd, len(parts))
            if problem is not None:
                raise TaskError(problem, where="the loss")

    def _check_gradients(self, reports: list[dict[str, Any]]) -> None:
        """Raise TaskError where the parameter gradients of the ranks' tokens do not add up; log what was not judged."""
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        for line in {told["line"] for told in reports}:
            those = [told["gradients"] for told in reports if told["line"] == line]
            judgements = {told["judgement"] for told in reports if told["line"] == line}
            if len(judgements) > 1:
                got = f"a model whose dry run is {' on one rank, and '.join(sorted(judgements))} on another"
                raise TaskError(Problem(got, "ranks that can compute the same"), where="the model")
            if None in those:
                continue
            parts = [
                GradProjections([Projection(*each) for each in whole], [Projection(*each) for each in part], close)
                for whole, part, close in those
            ]
            problem = grad_sum_check.gradient_sum_problem(names, parts)
            if problem is not None:
                raise TaskError(problem, where="the model")
        weaker = next((told for told in reports if told["judgement"] != str(STRICTEST_CHECK)), None)
        if weaker is not None and self._ranks.rank == 0:
            log.warning(
                "the dry run of sp = %d computed %s instead of %s: %s",
                self._plan.sp,
                weaker["judgement"],
                STRICTEST_CHECK,
                weaker["fell_back"],
            )


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """The inputs and targets of a batch. Raises TaskError for anything else."""
    inputs, targets = unpack_batch(batch)
    if targets is None:
        got = f"sp > 1, and a batch of {', '.join(map(str, inputs))} without targets"
        raise TaskError(Problem(got, "a pair (inputs, targets)"), where="the batch")
    return inputs, targets
