"""Dry run of the context axis, on one rank: before the first step, a model runs on a few tokens, full and sharded.

unchanged run  the model as it is, on all tokens of a few samples: outputs for the loss, and hand-written attention
check          full sequences against this rank's tokens alone, forward and backward, in float64 and with random
               weights (`shard_comparison.py`); if that is unavailable, the next one of `SEQUENCE_CHECKS`
Law: if the shard has the same keys, values, masks, outputs and gradients as the full sequences, call by call, then
tokens interact only in attention, and the sharded model is the model. Nothing is communicated.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.axes.context.attach.attention_replay import ModuleTracker
from fourfold.axes.context.attach.losses import GradProjections
from fourfold.axes.context.attach.shard_comparison import ShardComparison, ShardMismatch
from fourfold.axes.context.attach.token_shards import TokenShard
from fourfold.axes.context.rules.layout import DP_INSTEAD
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
    MemoryFit,
    preserve_module,
)
from fourfold.proof.weight_write_check import EDIT_ADVICE, WeightWriteTracker, describe_trained
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.words.errors import Problem, TaskError

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
        self._tracker = ModuleTracker(model)
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
