"""The check of the context axis: before the first step each rank runs its shard, and all ranks judge all reports.

dry run        of one rank: the model runs on a few tokens, full and sharded
report         what one rank has found: problems, gradient projections, and the loss of all tokens and of its own shard
unchanged run  the model as it is, on all tokens of a few samples: outputs for the loss, and hand-written attention
check          full sequences against this rank's tokens alone, forward and backward, in float64 and with random
               weights (`shard_comparison.py`); if that is unavailable, the next one of `SEQUENCE_CHECKS`
Law: if the shard has the same keys, values, masks, outputs and gradients as the full sequences, call by call, then
tokens interact only in attention, and the sharded model is the model. Nothing is communicated.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.axes.context.attach.losses import (
    GradProjections,
    LossSum,
    ObservedLoss,
    gradient_problem,
    gradient_sum_problem,
    loss_sum_problem,
    non_mean_problem,
    observe_losses,
)
from fourfold.axes.context.attach.shard_comparison import ShardComparison, ShardMismatch
from fourfold.axes.context.attach.token_shards import (
    TokenShard,
    inputs_and_targets,
    packed_problems,
    sequence_length,
    token_shards,
)
from fourfold.axes.context.rules.layout import DP_INSTEAD, ContextSpec
from fourfold.comm.communicator import Communicator
from fourfold.model.batch import POSITION_KEYS, find_positions, has_token_dim, is_square_mask
from fourfold.model.batch_statistics import frozen_statistics
from fourfold.model.fixed_random import without_randomness
from fourfold.model.model_call import eval_mode
from fourfold.model.sdpa_interception import AttentionCall, intercept_attention
from fourfold.model.transformers_attention import has_transformers_model, install_attention
from fourfold.proof.checks import (
    SEQUENCE_CHECKS,
    STRICTEST_SEQUENCE_CHECK,
    WEAKEST_SEQUENCE_CHECK,
    CheckConfig,
    CheckUnavailable,
    Learned,
    MemoryFit,
    Report,
    find_memory_fit,
    first_line,
    preserve_module,
    raise_problems,
)
from fourfold.proof.digests.batches import batch_digest, batch_mismatch_problem
from fourfold.proof.grad_projections import Projection
from fourfold.proof.module_trace import ModuleTrace
from fourfold.proof.weight_write_check import EDIT_ADVICE, WeightWriteTracker, describe_trained
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import Problem, TaskError

# ---- dry run ---------------------------------------------------------------------------------------------------------

ATTENTION_ONLY = "tokens that interact only in torch.nn.functional.scaled_dot_product_attention"
NOT_CHECKED = (
    "tokens that mix in branches that the first batch does not take, or through state that is neither a parameter nor "
    "a buffer"
)
"""What a dry run cannot find."""
SOFTMAX_FUNCTIONS = {torch.softmax, torch.Tensor.softmax, F.softmax}


class DryRunResult(NamedTuple):
    """Problems; or else the number of attention calls, the outputs of the unchanged run, and gradient projections."""

    problems: list[Problem]
    num_calls: int = 0
    outputs: Any = None
    grad_projections: GradProjections | None = None
    config: CheckConfig = STRICTEST_SEQUENCE_CHECK
    fallback_reason: str = ""
    """Why the strictest check was unavailable; empty if it was made."""
    is_scale_dependent: bool = False
    """Whether backward is not linear in the upstream gradient: it clamps, say."""


class ContextDryRun:
    """The dry run of a model on full inputs (a dict) and on this rank's shard of them; `ulysses` is the plan's."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        shard: TokenShard,
        *,
        ulysses: int = 1,
        memory_fit: MemoryFit = MemoryFit(),  # noqa: B008
    ) -> None:
        self._model, self._inputs, self._shard, self._ulysses, self._memory_fit = (
            model,
            inputs,
            shard,
            ulysses,
            memory_fit,
        )
        self._tracker = ModuleTrace(model, has_events=False)
        self._manual_attention: list[str] = []
        self._num_calls = 0

    def run(self) -> DryRunResult:
        """Run the model, in its mode, and check it. An exception of the model on full inputs is raised."""
        device = find_positions(self._inputs).device
        with (
            without_randomness(device),
            frozen_statistics(self._model),
            self._tracker,
            preserve_module(self._model),
        ):
            try:
                trained = {name for name, p in self._model.named_parameters() if p.requires_grad}
                with eval_mode(self._model):  # what training writes has a check of its own
                    outputs, written = self._run_unchanged()
                if names := sorted(trained & written):
                    got = f"cp > 1 and a forward that writes {describe_trained(names)}"
                    return DryRunResult([Problem(got, "trained weights that only the optimizer writes", EDIT_ADVICE)])
                if self._model.training:
                    self._num_calls = 0
                    outputs, _ = self._run_unchanged()
                if not self._num_calls:
                    return DryRunResult([self._no_attention_problem()])
                return self._compare_shards(outputs)
            except TaskError as error:
                return DryRunResult(list(error.problems))

    def _run_unchanged(self) -> tuple[Any, set[str]]:
        """The model's outputs for full sequences, with its own weights and in its own dtype, and weights it writes."""
        writes = WeightWriteTracker(self._model)
        try:
            with torch.no_grad(), writes:
                return self._call_unchanged(), writes.written
        finally:
            writes.restore()

    def _call_unchanged(self) -> Any:

        def count_call(call: AttentionCall) -> Tensor:
            self._num_calls += 1
            return call.run_sdpa()

        def call() -> Any:
            buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
            return torch.func.functional_call(self._model, buffers, (), dict(self._inputs))

        try:
            with (
                intercept_attention(count_call, observer=self._notice_manual_attention),
                install_attention(self._model),
            ):
                return call()
        except TaskError:
            raise
        except Exception as error:
            if not has_transformers_model(self._model):
                raise
            call()  # raises if the model fails with its configured attention too
            got = f"cp > 1 and a {type(self._model).__name__} that fails with another attention function: {error}"
            need = "a transformers model that attends through its AttentionInterface"
            raise TaskError(Problem(got, need, DP_INSTEAD)) from error

    def _compare_shards(self, outputs: Any) -> DryRunResult:
        """The result of the strictest check that can be made."""
        reasons: dict[torch.dtype | None, str] = {}
        if not self._memory_fit.fits_float64:
            reasons[torch.float64] = "weights and gradients do not fit into memory in float64"
        if not self._memory_fit.fits_model_dtype:
            reasons[None] = "weights and gradients do not fit into memory"
        without_memory = set(reasons)
        for config in SEQUENCE_CHECKS:
            if config.dtype in without_memory:
                continue
            try:
                return self._run_config(outputs, config, "; ".join(reasons.values()))
            except CheckUnavailable as error:
                reasons[config.dtype] = f"{config}: {error}"
        try:
            return self._run_config(outputs, WEAKEST_SEQUENCE_CHECK, "; ".join(reasons.values()))
        except CheckUnavailable as error:
            raise error.__cause__ or error from None

    def _run_config(self, outputs: Any, config: CheckConfig, fallback_reason: str) -> DryRunResult:
        comparison = ShardComparison(
            self._model, self._inputs, self._shard, config, tracker=self._tracker, ulysses=self._ulysses
        )
        try:
            gradients = comparison.run()
        except ShardMismatch as error:
            problem = self._explain_mismatch(comparison, error)
            return DryRunResult([problem], config=config, fallback_reason=fallback_reason)
        is_scale_dependent = comparison.is_scale_dependent
        return DryRunResult([], self._num_calls, outputs, gradients, config, fallback_reason, is_scale_dependent)

    def _notice_manual_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note hand-written attention, so that a message can name it."""
        if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
            self._manual_attention.append(
                f"{self._tracker.current_label} (nn.MultiheadAttention with need_weights=True)"
            )
        elif func in SOFTMAX_FUNCTIONS and args and isinstance(args[0], Tensor):
            scores = args[0]
            if scores.dim() >= 3 and scores.shape[-1] == scores.shape[-2] == self._shard.length:
                self._manual_attention.append(f"{self._tracker.current_label} (softmax over {list(scores.shape)})")

    def _no_attention_problem(self) -> Problem:
        if self._manual_attention:
            return self._manual_attention_problem()
        got = f"cp > 1 and a model ({type(self._model).__name__}) that never calls scaled_dot_product_attention"
        return Problem(got, ATTENTION_ONLY, DP_INSTEAD)

    def _manual_attention_problem(self) -> Problem:
        attempt = "scaled_dot_product_attention(q, k, v, is_causal=…)"
        if any("need_weights" in manual for manual in self._manual_attention):
            attempt = "need_weights=False"
        return Problem(f"cp > 1 and hand-written attention at {self._manual_attention[0]}", ATTENTION_ONLY, attempt)

    def _explain_mismatch(self, comparison: ShardComparison, error: ShardMismatch) -> Problem:
        """What is wrong if the replay differs from the full sequences, with the place if it can be found."""
        if self._manual_attention:
            return self._manual_attention_problem()
        if error.is_in_backward:
            return Problem(f"cp > 1 and {error.got}", f"{ATTENTION_ONLY}, in backward too", DP_INSTEAD)
        position = next(name for name in self._inputs if name in POSITION_KEYS)
        flipped = comparison.full_outputs(**{position: self._inputs[position].flip(1)})
        if all(map(torch.equal, flipped, comparison.full_outputs())):
            need = "a model that uses the positions it is given: a rank's tokens need not start at position 0"
            attempt = f"{position} [samples, tokens] in place of positions that the model makes, as by torch.arange"
            return Problem(f"cp > 1 and a model that does not use {position}", need, attempt)
        first = comparison.find_first_difference()
        where = f", first in {first}" if first else ""
        return Problem(f"cp > 1 and {error.got}{where}", ATTENTION_ONLY, DP_INSTEAD)


def truncate_batch(tree: Any, *, length: int, num_tokens: int, num_samples: int) -> Any:
    """The first tokens of the first samples; the last token is repeated if there are fewer than `num_tokens`.

    Of a mask [B, L, L], both rows and columns are taken.
    """
    positions = torch.arange(num_tokens).clamp(max=length - 1)

    def first(tensor: Tensor) -> Tensor:
        first_samples = tensor[:num_samples]
        if not has_token_dim(tensor, length):
            return first_samples
        tokens = first_samples[:, positions.to(tensor.device)]
        return tokens[:, :, positions.to(tensor.device)] if is_square_mask(tensor) else tokens

    return tree_map(tree, first)


# ---- check -----------------------------------------------------------------------------------------------------------

DRY_RUN_TOKENS = 256
DRY_RUN_SAMPLES = 2
log = logging.getLogger("fourfold")


class ContextCheck:
    """The check of the context axis. `world` lies on the plan's mesh."""

    claim = "the model and the loss compute the same from shards of the tokens as from all tokens"
    phase: str | None = "try out"

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        spec: ContextSpec,
        world: Communicator,
    ) -> None:
        self._model, self._loss, self._spec, self._world = model, loss, spec, world
        self._cp_group = world.along("cp")
        self._finished_modes: set[bool] = set()
        self.ignored_indices: Sequence[int] | None = None
        """The targets that a scalar loss ignores; None: the loss is no scalar, or not known yet."""
        self.is_scale_dependent = False
        """Whether backward is not linear in the upstream gradient: it clamps, say."""

    def is_needed(self, *, training: bool) -> bool:
        return not {self._model.training, True} & self._finished_modes

    def memory_fits(self) -> Sequence[bool]:
        return find_memory_fit(self._model, self._world.device, num_local_ranks=self._world.world.local_size)

    def inspect(self, batch: Any, fits: Sequence[bool], *, training: bool) -> Report:
        inputs, targets = inputs_and_targets(batch)
        report: Report = {"cp_ranks": self._cp_group.ranks, "digest": batch_digest(batch)}
        if any(len(tensor) for tensor in tree_leaves(targets)):
            report |= self._run_local(inputs, targets, MemoryFit(*fits))
        return report

    def judge(self, reports: Sequence[Report], *, training: bool) -> Learned | None:
        for group in _by_cp_group(reports):
            if len({report["digest"] for report in group}) > 1:
                raise TaskError(batch_mismatch_problem("cp", group[0]["cp_ranks"]), where="the batch")
        raise_problems(reports, "the batch", "packed")
        raise_problems(reports, "the model")
        reports = [each for each in reports if "loss_sums" in each]
        self._check_gradients(reports)
        # A loss that is not finite shows nothing: the next batch is tried.
        reports = [each for each in reports if math.isfinite(each["loss_sums"][0][0])]
        self._check_losses(reports)
        if not reports:
            return None
        has_mean = any(each["has_mean"] for each in reports)
        indices = sorted({index for each in reports for index in each["ignored_indices"]})
        is_weaker = any(each["config"] != str(STRICTEST_SEQUENCE_CHECK) for each in reports)
        ignored = indices if has_mean else None
        return {
            "training": self._model.training,
            "ignored_indices": ignored,
            "is_scale_dependent": any(each["is_scale_dependent"] for each in reports),
            "is_weaker": is_weaker,
        }

    def learn(self, learned: Learned, batch: Any) -> None:
        self._finished_modes.add(learned["training"])
        if learned["ignored_indices"] is not None:
            self.ignored_indices = learned["ignored_indices"]
        self.is_scale_dependent = learned["is_scale_dependent"]

    def shortened(self, batch: Any) -> tuple[Any, Any]:
        """The first samples and tokens of a batch, as many as checks take."""
        return self._truncate(*inputs_and_targets(batch))

    def _truncate(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        length = sequence_length((inputs, targets))
        num_tokens = self._num_tokens(length, inputs, targets)
        inputs, targets = (
            truncate_batch(tree, length=length, num_tokens=num_tokens, num_samples=DRY_RUN_SAMPLES)
            for tree in (inputs, targets)
        )
        return inputs, targets

    def _num_tokens(self, length: int, inputs: Any, targets: Any) -> int:
        """How many tokens the dry run takes: a number that divides, and that is no other tensor's dim 1."""
        num_tokens = self._spec.padded_length(min(length, DRY_RUN_TOKENS))
        others = [
            t.shape[1] for t in (*tree_leaves(inputs), *tree_leaves(targets)) if t.dim() > 1 and t.shape[1] != length
        ]
        while num_tokens in others:
            num_tokens += self._spec.length_divisor
        return num_tokens

    def _run_local(self, inputs: Mapping[str, Any], targets: Any, memory_fit: MemoryFit) -> Report:
        """The report of a rank that has samples."""
        # Of all tokens: the dry run takes the first ones only.
        if packed := packed_problems(self._model, inputs):
            return {"packed": packed}
        result, losses, loss_problem = self._inspect(inputs, targets, memory_fit)
        return {
            "problems": result.problems,
            "gradients": result.grad_projections,
            "config": str(result.config),
            "fallback_reason": result.fallback_reason,
            "is_scale_dependent": result.is_scale_dependent,
            "loss_problem": loss_problem,
            "loss_sums": [each.loss_sum for each in losses],
            "has_mean": any(each.is_mean for each in losses),
            "non_mean_op": next((each.non_mean_op for each in losses if each.non_mean_op is not None), None),
            "tolerance": max((each.tolerance for each in losses), default=0.0),
            "ignored_indices": sorted({index for each in losses for index in each.ignored_indices}),
        }

    def _inspect(
        self, inputs: Mapping[str, Any], targets: Any, memory_fit: MemoryFit
    ) -> tuple[DryRunResult, list[ObservedLoss], Problem | None]:
        """The result for the model; without problems, also the loss of all tokens, this rank's, and what is wrong."""
        length = sequence_length((inputs, targets))
        inputs, targets = self._truncate(inputs, targets)
        num_tokens = sequence_length((inputs, targets))
        inputs, targets = (tree_map(tree, lambda tensor: tensor.to(self._world.device)) for tree in (inputs, targets))
        shard = token_shards(self._spec, num_tokens)[self._cp_group.rank]
        try:
            result = ContextDryRun(self._model, inputs, shard, ulysses=self._spec.ulysses, memory_fit=memory_fit).run()
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            text = first_line(error)
            if num_tokens == length:
                problem = Problem(f"a model that fails on a sample of {length} tokens: {text}", "a model that runs")
                return DryRunResult([problem]), [], None
            got = f"cp > 1 and a model that fails on {num_tokens} tokens, where a sample has {length}: {text}"
            return DryRunResult([Problem(got, "a model that takes any number of tokens")]), [], None
        if result.problems:
            return result, [], None
        with torch.no_grad(), _loss_explained():
            full, local = observe_losses(self._loss, result.outputs, targets, shard)
            return result, [full, local], gradient_problem(full, local, shard)

    def _check_gradients(self, reports: Sequence[Report]) -> None:
        """Raise TaskError if the parameter gradients of the shards do not add up; log a weaker check."""
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        for group in _by_cp_group(reports):
            configs = {report["config"] for report in group}
            if len(configs) > 1:
                got = f"cp > 1 and a dry run {' on one rank, but '.join(sorted(configs))} on another"
                raise TaskError(Problem(got, "ranks that can all run the same check"), where="the model")
            gradients = [report["gradients"] for report in group]
            if None in gradients:
                continue
            projections = [
                GradProjections([Projection(*each) for each in full], [Projection(*each) for each in shard], tolerance)
                for full, shard, tolerance in gradients
            ]
            if problem := gradient_sum_problem(names, projections):
                raise TaskError(problem, where="the model")
        weaker = next((report for report in reports if report["config"] != str(STRICTEST_SEQUENCE_CHECK)), None)
        if weaker is not None and self._world.rank == 0:
            log.warning(
                "the dry run of cp = %d computed %s instead of %s: %s",
                self._spec.size,
                weaker["config"],
                STRICTEST_SEQUENCE_CHECK,
                weaker["fallback_reason"],
            )

    def _check_losses(self, reports: Sequence[Report]) -> None:
        """Raise TaskError if the losses of the shards do not add up to the loss of all tokens."""
        for group in _by_cp_group(reports):
            shard_sums = [LossSum(*report["loss_sums"][1]) for report in group]
            full_sum, op = LossSum(*group[0]["loss_sums"][0]), group[0]["non_mean_op"]
            if op is None:
                problem = loss_sum_problem(full_sum, shard_sums, tolerance=group[0]["tolerance"])
            else:
                problem = non_mean_problem(op, len(shard_sums))
            if problem is None:
                problem = next((Problem(*each["loss_problem"]) for each in group if each["loss_problem"]), None)
            if problem is not None:
                raise TaskError(problem, where="the loss")


@contextlib.contextmanager
def _loss_explained() -> Iterator[None]:
    """Within, an error of the loss says what it is called with."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "  the dry run of cp calls the loss with outputs alone, for all tokens and for this rank's; what forward "
            "keeps in the model is not there\n    try values of each token among the outputs, or cp = 1"
        )
        raise


def _by_cp_group(reports: Sequence[Report]) -> list[list[Report]]:
    """The reports of each cp group."""
    groups = sorted({tuple(report["cp_ranks"]) for report in reports})
    return [[report for report in reports if tuple(report["cp_ranks"]) == group] for group in groups]
