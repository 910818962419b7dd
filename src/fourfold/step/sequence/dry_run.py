"""Trial: before the first step, the model is tried out on a few tokens, whole and cut.

as it is   the model on all the tokens of a few samples: what the loss will be given, what attention is made by hand
judged     the model on whole sequences and on this rank's tokens alone, forward and backward, in float64 and with
           random weights (`judge.py`); where that cannot be, in the next best way of `random_weights.JUDGEMENTS`
Law: where the replay has the same keys, values, masks and outputs as the whole, call by call, and the same gradients,
tokens meet in attention only, and the cut model is the model. Nothing is communicated.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.step.batch import POSITION_KEYS, has_token_dim
from fourfold.step.dry_run.forward_state import EDIT_ADVICE, describe_trained
from fourfold.step.dry_run.preserve_module import preserve_module
from fourfold.step.dry_run.random_weights import CHECK_CONFIGS, STRICTEST_CHECK, WEAKEST_CHECK, CheckConfig, MemoryFit
from fourfold.step.dry_run.weight_write_tracker import WeightWriteTracker
from fourfold.step.model_call import eval_mode
from fourfold.step.sequence.grad_sum_check import GradProjections
from fourfold.step.sequence.module_tracker import ModuleTracker
from fourfold.step.sequence.sdpa_interception import AttentionCall, intercept_attention
from fourfold.step.sequence.shard_comparison import CheckUnavailable, ShardComparison
from fourfold.step.sequence.token_shards import TokenShard
from fourfold.step.sequence.tolerance import ShardMismatch
from fourfold.step.sequence.transformers import has_transformers_model, install_attention
from fourfold.step.tensor_tree import tree_map
from fourfold.words.errors import Problem, TaskError

ATTENTION_ONLY = "tokens that meet in torch.nn.functional.scaled_dot_product_attention only"
NOT_CHECKED = (
    "tokens that mix in training mode only, in branches that the first batch does not take, or through state that is "
    "neither a parameter nor a buffer"
)
"""What a dry run does not see."""
SOFTMAX_FUNCTIONS = {torch.softmax, torch.Tensor.softmax, F.softmax}


class DryRunResult(NamedTuple):
    """What a trial has found: problems; else how many calls of attention there are, and what the loss gives."""

    problems: list[Problem]
    num_calls: int = 0
    outputs: Any = None
    grad_projections: GradProjections | None = None
    config: CheckConfig = STRICTEST_CHECK
    fallback_reason: str = ""
    """Why the best judgement could not be had; empty where it was."""


class SequenceDryRun:
    """The trial of a model on whole inputs (a dict), of which `share` is this rank's; `ulysses` is the plan's."""

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
        self._tracker = ModuleTracker(model)
        self._manual_attention: list[str] = []
        self._num_calls = 0

    def run(self) -> DryRunResult:
        """Try the model out. What the model raises itself on whole inputs is raised."""
        with eval_mode(self._model), self._tracker, preserve_module(self._model):
            try:
                trained = {name for name, p in self._model.named_parameters() if p.requires_grad}
                with WeightWriteTracker(self._model, not_restored=trained) as writes:
                    outputs = self._run_unchanged()
                if names := sorted(trained & writes.written):
                    got = f"sp > 1 and a forward that writes {describe_trained(names)}"
                    return DryRunResult([Problem(got, "weights that only the update writes", EDIT_ADVICE)])
                if not self._num_calls:
                    return DryRunResult([self._no_attention_problem()])
                return self._compare_shards(outputs)
            except TaskError as error:
                return DryRunResult(list(error.problems))

    @torch.no_grad()
    def _run_unchanged(self) -> Any:
        """What the model, with its own weights and in its own dtype, gives for whole sequences."""

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
            call()  # what it raises as it is configured is its own
            got = f"sp > 1 and a {type(self._model).__name__} that fails with another attention function: {error}"
            need = "a model of transformers that attends through its AttentionInterface"
            raise TaskError(Problem(got, need, "sp = 1, and dp instead")) from error

    def _compare_shards(self, outputs: Any) -> DryRunResult:
        """The verdict of the first judgement that can be had."""
        reasons: dict[torch.dtype | None, str] = {}
        if not self._memory_fit.fits_float64:
            reasons[torch.float64] = "weights and gradients do not fit into memory in float64"
        if not self._memory_fit.fits_model_dtype:
            reasons[None] = "weights and gradients do not fit into memory"
        given_up = dict(reasons)
        for judgement in CHECK_CONFIGS:
            if judgement.dtype in given_up:
                continue
            try:
                return self._run_config(outputs, judgement, "; ".join(reasons.values()))
            except CheckUnavailable as error:
                reasons[judgement.dtype] = f"{judgement}: {error}"
        try:
            return self._run_config(outputs, WEAKEST_CHECK, "; ".join(reasons.values()))
        except CheckUnavailable as error:
            raise error.__cause__ or error from None

    def _run_config(self, outputs: Any, config: CheckConfig, fallback_reason: str) -> DryRunResult:
        options = {"tracker": self._tracker, "ulysses": self._ulysses}
        judge = ShardComparison(self._model, self._inputs, self._shard, config, **options)
        try:
            gradients = judge.run()
        except ShardMismatch as error:
            return DryRunResult([self._explain_mismatch(judge, error)], config=config, fallback_reason=fallback_reason)
        return DryRunResult([], self._num_calls, outputs, gradients, config, fallback_reason)

    def _notice_manual_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notice attention that is made by hand: it is what a message should speak of."""
        if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
            self._manual_attention.append(
                f"{self._tracker.current_module_name} (nn.MultiheadAttention with need_weights=True)"
            )
        elif func in SOFTMAX_FUNCTIONS and args and isinstance(args[0], Tensor):
            scores = args[0]
            if scores.dim() >= 3 and scores.shape[-1] == scores.shape[-2] == self._shard.length:
                self._manual_attention.append(
                    f"{self._tracker.current_module_name} (softmax over {list(scores.shape)})"
                )

    def _no_attention_problem(self) -> Problem:
        if self._manual_attention:
            return self._manual_attention_problem()
        got = f"a model that never calls scaled_dot_product_attention ({type(self._model).__name__})"
        return Problem(f"sp > 1 and {got}", ATTENTION_ONLY, "sp = 1, and dp instead")

    def _manual_attention_problem(self) -> Problem:
        attempt = "scaled_dot_product_attention(q, k, v, is_causal=…)"
        if any("need_weights" in manual for manual in self._manual_attention):
            attempt = "need_weights=False"
        return Problem(f"sp > 1 and attention made by hand at {self._manual_attention[0]}", ATTENTION_ONLY, attempt)

    def _explain_mismatch(self, judge: ShardComparison, error: ShardMismatch) -> Problem:
        """Why the replay is not the whole, as far as can be found out by looking closer."""
        if self._manual_attention:
            return self._manual_attention_problem()
        if error.is_in_backward:
            return Problem(f"sp > 1 and {error.got}", ATTENTION_ONLY + ", in backward too", "sp = 1, and dp instead")
        position = next(name for name in self._inputs if name in POSITION_KEYS)
        turned = judge.whole_outputs(**{position: self._inputs[position].flip(1)})
        if all(map(torch.equal, turned, judge.whole_outputs())):
            need = "positions that are given: each rank has other tokens than the first"
            attempt = f"{position} [samples, tokens] where the model counts places itself, as by torch.arange"
            return Problem(f"sp > 1 and a model that does not use {position}", need, attempt)
        first = judge.find_first_difference()
        at = f", first in {first}" if first else ""
        return Problem(f"sp > 1 and {error.got}{at}", ATTENTION_ONLY, "sp = 1, and dp instead")


def truncate_batch(tree: Any, *, length: int, num_tokens: int, num_samples: int) -> Any:
    """The first `few` tokens of the first samples, the last token again where there are not so many.

    Of a mask [B, L, L] they are rows and columns.
    """
    places = torch.arange(num_tokens).clamp(max=length - 1)

    def first(tensor: Tensor) -> Tensor:
        some = tensor[:num_samples]
        if not has_token_dim(tensor, length):
            return some
        some = some[:, places.to(tensor.device)]
        return some[:, :, places.to(tensor.device)] if _is_square_mask(tensor) else some

    return tree_map(tree, first)


def _is_square_mask(tensor: Tensor) -> bool:
    """Whether a token tensor is a mask of all tokens by all, [B, L, L]. Features may be as many: but no mask adds."""
    if tensor.dim() != 3 or tensor.shape[1] != tensor.shape[2]:
        return False
    return tensor.dtype == torch.bool or (tensor.is_floating_point() and not bool((tensor > 0).any()))
