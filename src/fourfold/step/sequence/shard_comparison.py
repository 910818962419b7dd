"""Judge: the model's forward and backward on whole sequences and on one rank's tokens, compared call by call.

whole    the model on all tokens, each attention call recorded, its gradients too
replay   the model on this rank's tokens alone, which get from each attention call what was recorded for them
weight   the scalar that is differentiated is the sum of all outputs times fixed random weights, by global token
tap      an embedding's output, or an input of floats: its gradient is compared as well

B samples · L length · l = L / sp
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.parts.data.grad_checks import second_grad_problem
from fourfold.parts.torch_private import is_in_backward, swapped_state
from fourfold.step.batch import has_token_dim
from fourfold.step.dry_run import random_weights
from fourfold.step.dry_run.backward import count_gradients, run_backward
from fourfold.step.dry_run.float64_mode import Float64Mode
from fourfold.step.dry_run.grad_projections import Projection
from fourfold.step.dry_run.preserve_module import copy_tensor_attributes
from fourfold.step.dry_run.random_weights import CheckConfig
from fourfold.step.sequence import grad_sum_check
from fourfold.step.sequence.attention_match import compare_attention_calls
from fourfold.step.sequence.attention_replay import (
    OUTPUT,
    QKV,
    Playback,
    RecordedCall,
    recompute_call,
    record_call,
)
from fourfold.step.sequence.grad_sum_check import NOISE_FLOOR, GradProjections
from fourfold.step.sequence.grad_taps import GradTaps, shard_shape
from fourfold.step.sequence.module_tracker import ModuleTracker
from fourfold.step.sequence.sdpa_interception import AttentionCall, AttentionHandler, intercept_attention
from fourfold.step.sequence.token_shards import TokenShard, shard_tokens
from fourfold.step.sequence.tolerance import (
    ShardMismatch,
    check_shard_rows,
    gradient_tolerance_of,
    is_close,
    is_replicated,
    shard_rows,
)
from fourfold.step.sequence.transformers import has_transformers_model, install_attention
from fourfold.step.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import FourfoldError, Problem, TaskError

SEED = 11


class CheckUnavailable(Exception):
    """The model cannot be judged in this way; it may be in another."""


class ShardComparison:
    """One judgement of a model on whole inputs (a dict), of which `share` is this rank's; `ulysses` is the plan's."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        shard: TokenShard,
        config: CheckConfig,
        *,
        tracker: ModuleTracker,
        ulysses: int,
    ) -> None:
        self._model, self._shard, self._config, self._tracker, self._ulysses = model, shard, config, tracker, ulysses
        self._inputs = tree_map(dict(inputs), lambda tensor: random_weights.cast_real(tensor, config.dtype))
        with _raise_unavailable():
            self._state = random_weights.make_state(model, config)
        self._recorded_calls: list[RecordedCall] = []
        self._taps = GradTaps(tracker, shard)
        self._mismatches: list[str] = []

    # ---- both passes --------------------------------------------------------------------------------

    def run(self) -> GradProjections | None:
        """Compare the passes. Raises Differs or TaskError where tokens mix, Unfit where the model cannot be run so."""
        with self._patched_model(self._record_attention, self._taps), _raise_unavailable():
            whole = self._call_model(self._taps.tap_inputs(self._inputs))
        if self._config.weights != "own" and not _is_finite(whole):
            raise CheckUnavailable("outputs that are not finite")
        if has_transformers_model(self._model):
            self._compare_with_own_attention(whole)
        taps = GradTaps(self._tracker, self._shard)
        own = self._replay_forward(taps)
        self._compare_outputs(whole, own)
        if not self._config.has_gradients:
            return None
        parameters = {name: self._state[name] for name, p in self._model.named_parameters() if p.requires_grad}
        weights = self._random_grad_tensors(whole)
        with (
            self._patched_model(self._record_attention, self._taps),
            count_gradients(parameters) as counts,
            _raise_unavailable(),
        ):
            run_backward(whole, weights)
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise TaskError(second_grad_problem(twice))
        total = grad_sum_check.project_grouped_gradients(parameters)
        self._check_finite(total)
        self._replay_backward(own, whole, weights, taps)
        self._compare_taps(taps)
        return GradProjections(total, grad_sum_check.project_grouped_gradients(parameters), self._gradient_tolerance)

    @property
    def num_calls(self) -> int:
        return len(self._recorded_calls)

    @contextlib.contextmanager
    def _patched_model(self, handler: AttentionHandler, taps: GradTaps | None = None) -> Iterator[None]:
        exact = Float64Mode(new_tensors=True) if self._config.dtype is not None else contextlib.nullcontext()
        instead = {} if taps is None else {F.embedding: taps.tap_embedding}
        grad = torch.set_grad_enabled(self._config.has_gradients and taps is not None)
        weights = swapped_state(self._model, self._state)
        constants = copy_tensor_attributes(self._model, self._config.dtype)
        with (
            grad,
            exact,
            weights,
            constants,
            intercept_attention(handler, overrides=instead),
            install_attention(self._model),
        ):
            yield

    def _call_model(self, inputs: Mapping[str, Any]) -> Any:
        return self._model(**inputs)

    def _record_attention(self, call: AttentionCall) -> Tensor:
        if is_in_backward():
            number = self._find_recomputed_call(call, is_whole=True)
            return recompute_call(call, None if number is None else self._recorded_calls[number - 1])
        one, output = record_call(call, self._tracker.current_module_name)
        self._recorded_calls.append(one)
        return output

    def _replay_forward(self, taps: GradTaps | None) -> Any:
        """The model's outputs for this rank's tokens alone."""
        number, share = 0, self._shard

        def play_next(call: AttentionCall) -> Tensor:
            nonlocal number
            if number == len(self._recorded_calls):
                raise ShardMismatch(
                    f"{number + 1} calls of attention, {number} with whole sequences", depends_on_others=False
                )
            number += 1
            compare_attention_calls(
                self._recorded_calls[number - 1].call, call, self._shard, self._call_name(number), ulysses=self._ulysses
            )
            return self._play_back(number, call)

        with self._patched_model(play_next, taps):
            try:
                inputs = shard_tokens(dict(self._inputs), share)
                own = self._call_model(inputs if taps is None else taps.tap_inputs(inputs))
            except (RuntimeError, IndexError, ValueError) as error:
                got = f"with {share.size} of {share.length} tokens: {_first_line(error)}"
                raise ShardMismatch(got, depends_on_others=False) from error
        if number < len(self._recorded_calls):
            raise ShardMismatch(
                f"{number} calls of attention, {len(self._recorded_calls)} with whole sequences",
                depends_on_others=False,
            )
        return own

    def _replay_backward(self, own: Any, whole: Any, grad_tensors: list[Tensor | None], taps: GradTaps) -> None:
        share = self._shard
        parts: list[Tensor | None] = []
        for tensor, weight in zip(tree_leaves(whole), grad_tensors, strict=True):
            if weight is not None:
                # Outputs of no token are the same on all ranks, and each has its part of the gradient.
                is_tokens = has_token_dim(tensor, share.length)
                weight = shard_rows(weight, share, 1) if is_tokens else weight * (share.size / share.padded_length)
            parts.append(weight)

        def play_recomputed(call: AttentionCall) -> Tensor:
            number = self._find_recomputed_call(call, is_whole=False)
            if number is None:
                got = "sp > 1 and a checkpoint whose second forward computes something else than its first"
                raise TaskError(Problem(got, "the same both times", "use_reentrant=False, which torch checks"))
            return self._play_back(number, call)

        with self._patched_model(play_recomputed, taps):
            try:
                run_backward(own, parts)
            except (RuntimeError, IndexError, ValueError) as error:
                got = f"with {share.size} of {share.length} tokens, in backward: {_first_line(error)}"
                raise ShardMismatch(got, depends_on_others=False, is_in_backward=True) from error
        if self._mismatches:
            raise ShardMismatch(self._mismatches[0], is_in_backward=True)

    def _random_grad_tensors(self, outputs: Any) -> list[Tensor | None]:
        """The random weights of each output that can be differentiated."""
        generator = torch.Generator().manual_seed(SEED)
        return [
            random_weights.random_tiled(output.detach(), generator).to(output.dtype)
            if output.requires_grad and output.is_floating_point()
            else None
            for output in tree_leaves(outputs)
        ]

    # ---- calls of attention -------------------------------------------------------------------------

    def _call_name(self, call_number: int) -> str:
        return f"attention call {call_number} ({self._recorded_calls[call_number - 1].module_name})"

    def _find_recomputed_call(self, call: AttentionCall, *, is_whole: bool) -> int | None:
        """Which call a checkpoint makes again."""
        for number in range(len(self._recorded_calls), 0, -1):
            known = self._recorded_calls[number - 1].call
            pairs = [(getattr(known, name), getattr(call, name)) for name in QKV]
            if not is_whole:
                pairs = [(shard_rows(one, self._shard, 2), other) for one, other in pairs]
            if all(one.shape == other.shape and is_close(one, other.detach()) for one, other in pairs):
                return number
        return None

    def _play_back(self, number: int, call: AttentionCall) -> Tensor:
        output = shard_rows(self._recorded_calls[number - 1].output, self._shard, 2)
        return Playback(output, lambda gradient: self._play_back_gradients(number, gradient))(call)

    def _play_back_gradients(self, number: int, gradient: Tensor) -> tuple[Tensor | None, ...]:
        known = self._recorded_calls[number - 1]
        self._check_gradient_rows(
            known.gradients.get(OUTPUT), gradient, 2, f"gradients of the output of {self._call_name(number)}"
        )
        recorded = [known.gradients.get(name) for name in QKV]
        return tuple(None if one is None else shard_rows(one, self._shard, 2) for one in recorded)

    # ---- comparison ---------------------------------------------------------------------------------

    def _compare_outputs(self, outputs: Any, own: Any) -> None:
        theirs, ours = list(tree_leaves(outputs)), list(tree_leaves(own))
        if len(theirs) != len(ours):
            raise ShardMismatch(f"{len(ours)} outputs, {len(theirs)} with whole sequences", depends_on_others=False)
        pairs = [(whole.detach(), mine.detach()) for whole, mine in zip(theirs, ours, strict=True)]
        for whole, mine in pairs:
            if has_token_dim(whole, self._shard.length):
                check_shard_rows(whole, mine, self._shard, 1, "the outputs")
            elif not is_replicated(whole, mine):
                raise ShardMismatch(
                    f"an output {list(whole.shape)} that is not each token's own", depends_on_others=False
                )
        if not any(has_token_dim(whole, self._shard.length) for whole, _ in pairs):
            shapes = ", ".join(str(list(whole.shape)) for whole, _ in pairs)
            raise ShardMismatch(f"no output for each token, but {shapes}", depends_on_others=False)

    def _compare_with_own_attention(self, outputs: Any) -> None:
        """A transformers model must be the same with our attention and masks as with those it is configured for."""
        exact = Float64Mode(new_tensors=True) if self._config.dtype is not None else contextlib.nullcontext()
        with _raise_unavailable(), torch.no_grad(), exact, copy_tensor_attributes(self._model, self._config.dtype):
            theirs = torch.func.functional_call(self._model, self._state, (), self._inputs)
        if not all(
            is_close(one, other.detach()) for one, other in zip(tree_leaves(theirs), tree_leaves(outputs), strict=True)
        ):
            kind = f"a {type(self._model).__name__} that attends otherwise than its masks and modules say"
            raise TaskError(Problem(f"sp > 1 and {kind}", "plain or causal attention, with a mask of keys"))

    def _compare_taps(self, taps: GradTaps) -> None:
        for whole, own in zip(self._taps.taps, taps.taps, strict=False):
            if whole.output.dim() >= 2 and own.output.shape == shard_shape(whole.output, self._shard):
                gradient = own.gradients.get(OUTPUT)
                gradient = torch.zeros_like(own.output) if gradient is None else gradient
                self._check_gradient_rows(
                    whole.gradients.get(OUTPUT), gradient, 1, f"gradients of the output of {whole.module_name}"
                )
        if self._mismatches:
            raise ShardMismatch(self._mismatches[0], is_in_backward=True)

    def _check_gradient_rows(self, whole: Tensor | None, own: Tensor, dim: int, what: str) -> None:
        """Note what is wrong unless a gradient is this rank's rows of the whole's (None: zeros)."""
        expected = torch.zeros_like(own) if whole is None else shard_rows(whole, self._shard, dim)
        bound, floor = gradient_tolerance_of(own.dtype), NOISE_FLOOR * self._max_gradient
        if expected.shape != own.shape or not is_close(expected, own, bound, floor=floor):
            self._mismatches.append(what)

    @functools.cached_property
    def _max_gradient(self) -> float:
        """The largest number among all gradients that were recorded for whole sequences."""
        found = [*(call.gradients for call in self._recorded_calls), *(tap.gradients for tap in self._taps.taps)]
        return max((g.abs().max().item() for each in found for g in each.values() if g.numel()), default=0.0)

    @property
    def _gradient_tolerance(self) -> float:
        dtypes = {tensor.dtype for tensor in self._state.values() if tensor.requires_grad}
        return max(map(gradient_tolerance_of, dtypes), default=0.0)

    def _check_finite(self, total: list[Projection]) -> None:
        if not all(torch.isfinite(torch.tensor([one.norm for one in total], dtype=torch.float64))):
            raise CheckUnavailable("gradients that are not finite")

    # ---- to explain a difference --------------------------------------------------------------------

    def whole_outputs(self, **changed_inputs: Tensor) -> list[Tensor]:
        """The outputs for whole sequences with some inputs changed."""
        with self._patched_model(AttentionCall.run_sdpa):
            return list(tree_leaves(self._call_model({**self._inputs, **changed_inputs})))

    def find_first_difference(self) -> str | None:
        """The first module whose outputs for this rank's tokens are not those it has among all tokens."""
        with self._tracker.record_outputs() as whole:
            self.whole_outputs()
        # It ends as it did before; what was recorded until then tells where.
        with self._tracker.record_outputs() as own, contextlib.suppress(ShardMismatch):
            self._replay_forward(None)
        for (name, kind, result), (_, _, mine) in zip(whole, own, strict=False):
            if not self._is_shard_of(result, mine):
                return f"{name} ({kind})"
        return None

    def _is_shard_of(self, whole: Tensor, own: Tensor) -> bool:
        share = self._shard
        for dim in range(whole.dim()):
            if whole.shape[dim] == share.length and own.dim() == whole.dim() and own.shape[dim] == share.size:
                part = shard_rows(whole, share, dim)
                if part.shape == own.shape:
                    return is_close(part, own)
        return whole.shape == own.shape and is_close(whole, own)


def _is_finite(outputs: Any) -> bool:
    """Whether outputs are numbers; minus infinity is the logit of what cannot be."""
    real = [output.detach() for output in tree_leaves(outputs) if output.is_floating_point()]
    return not any(bool((output.isnan() | output.isposinf()).any()) for output in real)


@contextlib.contextmanager
def _raise_unavailable() -> Iterator[None]:
    """Within, what the model raises for whole sequences is raised as Unfit."""
    try:
        yield
    except (FourfoldError, ShardMismatch, CheckUnavailable):
        raise
    except Exception as error:
        raise CheckUnavailable(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
