"""Shard comparison: a model's forward and backward on full sequences and on one shard of the tokens, call by call.

full    the model on all tokens; each attention call is recorded: in backward, the gradients of its inputs and output
replay  the model on this rank's tokens alone; each attention call returns its rows of the recorded output, and in
        backward those of the recorded gradients of q, k and v; its own inputs are compared with the recorded ones
tap     an embedding's output, or an input of features: its gradient is compared as well
Both backwards start from the same random upstream gradients: drawn for the full outputs, of which the replay gets the
rows of its own tokens.

B samples · L length · l = L / cp
Law: a tap changes no number and no gradient. In a replay no token interacts with others: if nothing differs, each
computes what it does in a full sequence.
Law: queries, keys, values, mask and options are the same, or the difference is raised with the name of the call.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.axes.context.attach.losses import GradProjections, project_grouped_gradients
from fourfold.axes.context.attach.token_shards import TokenShard, shard_tokens
from fourfold.axes.context.rules.layout import DP_INSTEAD, heads_problem
from fourfold.axes.context.work.document_mask import DocumentMask
from fourfold.model.batch import has_token_dim
from fourfold.model.sdpa_interception import AttentionCall, AttentionHandler, intercept_attention
from fourfold.model.transformers_attention import has_transformers_model, install_attention
from fourfold.proof import random_weights
from fourfold.proof.checks import CheckConfig, CheckUnavailable, first_line, preserve_module
from fourfold.proof.float64_mode import Float64Mode
from fourfold.proof.grad_projections import (
    NOISE_FLOOR,
    Projection,
    count_gradients,
    gradient_tolerance_of,
    is_close,
    run_backward,
)
from fourfold.proof.module_trace import OUTPUT, ModuleTrace
from fourfold.proof.weight_write_check import WeightWriteTracker
from fourfold.torch_kit.grad_hooks import second_grad_problem
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.torch_kit.torch_private import is_in_backward, swapped_state
from fourfold.words.errors import FourfoldError, Problem, TaskError

# ---- rows ----------------------------------------------------------------------------------------------------------

# All ranks compute an output without tokens in the same way. A mean over tokens differs, but may be close.
REPLICATED_TOLERANCE = {torch.float64: 1e-9}
DEFAULT_REPLICATED_TOLERANCE = 1e-6


class ShardMismatch(Exception):
    """A replay differs from the full sequences. `got` says where, and whether other ranks' tokens matter there."""

    def __init__(self, what: str, *, depends_on_others: bool = True, is_in_backward: bool = False) -> None:
        self.got = f"{what} depend on other ranks' tokens" if depends_on_others else what
        self.is_in_backward = is_in_backward
        super().__init__(self.got)


def is_replicated(full: Tensor, local: Tensor) -> bool:
    """Whether an output without tokens is the same on all ranks."""
    return full.shape == local.shape and is_close(
        full, local, REPLICATED_TOLERANCE.get(full.dtype, DEFAULT_REPLICATED_TOLERANCE)
    )


def is_shard_of(full: Tensor, local: Tensor, shard: TokenShard) -> bool:
    """Whether `local` is this shard of `full`, in any dim; or equal to it, if it has no tokens."""
    for dim in range(full.dim()):
        if full.shape[dim] == shard.length and local.dim() == full.dim() and local.shape[dim] == shard.size:
            rows = shard_rows(full, shard, dim)
            if rows.shape == local.shape:
                return is_close(rows, local)
    return full.shape == local.shape and is_close(full, local)


def shard_rows(tensor: Tensor, shard: TokenShard, dim: int) -> Tensor:
    """A shard's rows of a tensor that has a row for each token."""
    return tensor.index_select(dim, _shard_positions(shard, tensor.device))


@functools.lru_cache(8)
def _shard_positions(shard: TokenShard, device: torch.device) -> Tensor:
    return shard.positions.to(device)


def check_shard_rows(full: Tensor, local: Tensor, shard: TokenShard, dim: int, what: str) -> None:
    """Raise ShardMismatch unless `local` is this shard's rows of `full`."""
    if full.shape[dim] != shard.length or local.shape[dim] != shard.size:
        lengths = f"{full.shape[dim]} long for {shard.length} tokens, {local.shape[dim]} for {shard.size}"
        raise ShardMismatch(f"{what}: {lengths}", depends_on_others=False)
    rows = shard_rows(full, shard, dim)
    if rows.shape != local.shape or not is_close(rows, local):
        raise ShardMismatch(what)


# ---- attention replay ----------------------------------------------------------------------------------------------


QKV = ("q", "k", "v")
PlayBackward = Callable[[Tensor], tuple[Tensor | None, ...]]


class RecordedCall(NamedTuple):
    """One call for full sequences, the module that made it, and the gradients that backward has recorded, by name."""

    call: AttentionCall
    module_name: str
    output: Tensor
    gradients: dict[str, Tensor]


def tap_input(tensor: Tensor, gradients: dict[str, Tensor], name: str) -> Tensor:
    """A copy of an operation's input; backward stores in `gradients` the gradient that the operation gives it."""
    copy = tensor.clone()
    if copy.requires_grad:
        copy.register_hook(lambda gradient: gradients.__setitem__(name, gradient.detach()))
    return copy


def tap_output(tensor: Tensor, gradients: dict[str, Tensor], name: str) -> Tensor:
    """A copy of an operation's output; backward stores its gradient, after hooks on the copy, in `gradients`."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradients.__setitem__(name, gradient.detach()))
    return tensor.clone()


def record_call(call: AttentionCall, module_name: str) -> tuple[RecordedCall, Tensor]:
    """Make a call for full sequences. Returns its record and its output."""
    gradients: dict[str, Tensor] = {}
    raw, output = _compute_tapped(call, gradients)
    detached = call._replace(q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
    return RecordedCall(detached, module_name, raw.detach(), gradients), output


def recompute_call(call: AttentionCall, recorded: RecordedCall | None) -> Tensor:
    """Repeat a call for a checkpoint, with the same nodes for autograd. A reentrant one records gradients only now."""
    return _compute_tapped(call, {} if recorded is None else recorded.gradients)[1]


def _compute_tapped(call: AttentionCall, gradients: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k, v = (tap_input(tensor, gradients, name) for tensor, name in zip((call.q, call.k, call.v), QKV, strict=True))
    raw = call._replace(q=q, k=k, v=v).run_sdpa()
    return raw, tap_output(raw, gradients, OUTPUT)


class Playback(torch.autograd.Function):
    """One call of a replay: it returns these rows, whose gradient `play_backward` maps to those of q, k, v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, play_backward: PlayBackward) -> Tensor:
        ctx.play_backward = play_backward
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.play_backward(gradients[0]), None, None)


# ---- attention that is matched -------------------------------------------------------------------------------------


def compare_attention_calls(
    full: AttentionCall, local: AttentionCall, shard: TokenShard, name: str, *, ulysses: int
) -> None:
    """Raise ShardMismatch unless `local` is this shard of `full`; TaskError if the call cannot be sharded at all."""
    if full.q.shape[2] != full.k.shape[2]:
        got = f"cp > 1 and cross-attention at {name}: {full.q.shape[2]} queries, {full.k.shape[2]} keys"
        raise TaskError(Problem(got, "self-attention: queries and keys of the same tokens", DP_INSTEAD))
    for what in QKV:
        check_shard_rows(getattr(full, what), getattr(local, what), shard, 2, f"{what} of {name}")
    if problem := heads_problem(local.q.shape[1], local.k.shape[1], ulysses):
        raise TaskError(problem)
    options = [(call.is_causal, call.scale, call.dropout_p, call.enable_gqa) for call in (full, local)]
    if options[0] != options[1]:
        got = f"{name} with other options than for full sequences (is_causal, scale, dropout_p or enable_gqa)"
        raise ShardMismatch(got, depends_on_others=False)
    _compare_masks(full.mask, local.mask, shard, name)


def _compare_masks(full: Tensor | None, local: Tensor | None, shard: TokenShard, name: str) -> None:
    if full is None and local is None:
        return
    if local is not None and local.requires_grad:
        got = f"cp > 1 and a mask {list(local.shape)} at {name} that requires a gradient"
        raise TaskError(Problem(got, "a mask that does not require one", "mask.detach()"))
    if full is None or local is None:
        which = "a shard of the tokens" if full is None else "full sequences"
        raise ShardMismatch(f"{name} with a mask for {which} only", depends_on_others=False)
    if isinstance(full, DocumentMask) and isinstance(local, DocumentMask):
        check_shard_rows(full.starts, local.starts, shard, 1, f"document starts of {name}")
        return
    if local.shape[-1] == shard.size and (local.dim() < 2 or local.shape[-2] == 1):
        check_shard_rows(full, local, shard, local.dim() - 1, f"masks of {name}")
        return
    is_key_mask = full.dim() < 2 or full.shape[-2] == 1
    expected = full if is_key_mask else shard_rows(full, shard, full.dim() - 2)
    if local.shape != expected.shape:
        raise TaskError(mask_problem(local, shard, name))
    if not torch.equal(local, expected):
        raise ShardMismatch(f"masks of {name}")


def mask_problem(mask: Tensor, shard: TokenShard, name: str) -> Problem:
    """What is wrong with a mask that is no part of the mask of the full sequence."""
    got = f"cp > 1 and a mask {list(mask.shape)} at {name}, made of this rank's {shard.size} tokens"
    need = "is_causal=True, or a key mask [B, 1, 1, l], or this rank's rows of the full mask, [B, 1, l, L]"
    return Problem(got, need, "is_causal=True in place of a causal mask")


# ---- taps of gradients ---------------------------------------------------------------------------------------------


class GradTap(NamedTuple):
    """One tensor, the module that made it, and the gradients that backward has recorded."""

    module_name: str
    output: Tensor
    gradients: dict[str, Tensor]


class GradTaps:
    """The taps of one pass, in forward order."""

    def __init__(self, tracker: ModuleTrace, shard: TokenShard) -> None:
        self._tracker, self._shard = tracker, shard
        self.taps: list[GradTap] = []

    def tap_inputs(self, inputs: Mapping[str, Any]) -> Any:
        """The model's inputs, with a tap on each that holds features of tokens."""

        def tapped(tensor: Tensor) -> Tensor:
            is_tokens = tensor.dim() == 3 and tensor.shape[1] in (self._shard.length, self._shard.size)
            # A square tensor may be a mask, whose gradient belongs to no token.
            if not is_tokens or not tensor.is_floating_point() or tensor.shape[2] == self._shard.length:
                return tensor
            return self._tap(tensor.detach().clone().requires_grad_(torch.is_grad_enabled()), "the inputs")

        return tree_map(inputs, tapped)

    def tap_embedding(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Replaces torch's embedding function."""
        output = func(*args, **kwargs)
        # The second forward of a checkpoint is not tapped again.
        return output.clone() if is_in_backward() else self._tap(output, self._tracker.current_label)

    def _tap(self, tensor: Tensor, module_name: str) -> Tensor:
        self.taps.append(GradTap(module_name, tensor.detach(), {}))
        return tap_output(tensor, self.taps[-1].gradients, OUTPUT)


def shard_shape(full: Tensor, shard: TokenShard) -> torch.Size | None:
    """The shape of a shard of a token tensor; None for a tensor without tokens."""
    if not has_token_dim(full, shard.length):
        return None
    return torch.Size((full.shape[0], shard.size, *full.shape[2:]))


# ---- comparison ----------------------------------------------------------------------------------------------------


SEED = 11
SCALE = 2.0**30  # of upstream gradients. A power of two: a backward that is linear gives the same, bit for bit
# What a model raises for a shard if it expects another number of tokens.
_SIZE_ERRORS = (RuntimeError, IndexError, ValueError)


class ShardComparison:
    """One check of a model on full inputs (a dict), against this rank's shard of them; `ulysses` is the plan's."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        shard: TokenShard,
        config: CheckConfig,
        *,
        tracker: ModuleTrace,
        ulysses: int,
    ) -> None:
        self._model, self._shard, self._config, self._tracker, self._ulysses = model, shard, config, tracker, ulysses
        self._inputs = tree_map(dict(inputs), lambda tensor: random_weights.cast_real(tensor, config.dtype))
        with _raise_unavailable():
            self._state = random_weights.make_state(model, config)
        self._recorded_calls: list[RecordedCall] = []
        self._taps = GradTaps(tracker, shard)
        self._mismatches: list[str] = []
        self.is_scale_dependent = False
        """Whether backward is not linear in the upstream gradient: it clamps, say."""

    # ---- both passes --------------------------------------------------------------------------------

    def run(self) -> GradProjections | None:
        """Compare the passes; None without gradients.

        Raises ShardMismatch or TaskError if tokens mix, CheckUnavailable if the model cannot be run like this.
        """
        grad_tensors, projections = [], None
        with preserve_module(self._model):
            with self._patched_model(self._record_attention, self._taps), _raise_unavailable():
                full = self._call_model(self._taps.tap_inputs(self._inputs))
            if self._config.weights != "own" and not _is_finite(full):
                raise CheckUnavailable("outputs that are not finite")
            if self._config.has_gradients:
                grad_tensors = self._random_grad_tensors(full)
                projections = self._run_full_backward(full, grad_tensors)
        if has_transformers_model(self._model):
            self._compare_with_configured_attention(full)
        taps = GradTaps(self._tracker, self._shard)
        with preserve_module(self._model):
            local = self._replay_forward(taps)
            self._compare_outputs(full, local)
            if projections is None:
                return None
            self._replay_backward(local, full, grad_tensors, taps)
        self._compare_taps(taps)
        local_projections = project_grouped_gradients(self._parameters)
        self.is_scale_dependent = self._find_scale_dependence(projections, grad_tensors)
        return GradProjections(projections, local_projections, self._gradient_tolerance)

    def _run_full_backward(self, full: Any, grad_tensors: list[Tensor | None]) -> list[Projection]:
        """The gradients of the parameters for full sequences."""
        with (
            self._patched_model(self._record_attention, self._taps),
            count_gradients(self._parameters) as counts,
            _raise_unavailable(),
        ):
            run_backward(full, grad_tensors)
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise TaskError(second_grad_problem(twice))
        projections = project_grouped_gradients(self._parameters)
        if not all(math.isfinite(each.norm) for each in projections):
            raise CheckUnavailable("gradients that are not finite")
        return projections

    def _find_scale_dependence(self, projections: list[Projection], grad_tensors: list[Tensor | None]) -> bool:
        """Whether much larger upstream gradients give other gradients of the parameters, each divided by its size."""
        if self._config.dtype is None:
            return False
        taps = GradTaps(self._tracker, self._shard)
        with contextlib.suppress(CheckUnavailable), preserve_module(self._model):
            with self._patched_model(AttentionCall.run_sdpa, taps), _raise_unavailable():
                outputs = self._call_model(taps.tap_inputs(self._inputs))
                run_backward(outputs, [None if each is None else each * SCALE for each in grad_tensors])
            large = project_grouped_gradients(self._parameters)
            floor = NOISE_FLOOR * max((each.norm for each in projections), default=0.0)
            return any(
                abs(b.value / SCALE - a.value) > self._gradient_tolerance * max(a.norm, b.norm / SCALE, floor)
                for a, b in zip(projections, large, strict=True)
            )
        return False

    @property
    def _parameters(self) -> dict[str, Tensor]:
        return {name: self._state[name] for name, p in self._model.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def _patched_model(self, handler: AttentionHandler, taps: GradTaps | None = None) -> Iterator[None]:
        overrides = {} if taps is None else {F.embedding: taps.tap_embedding}
        grad_mode = torch.set_grad_enabled(self._config.has_gradients and taps is not None)
        # Not `torch.func.functional_call`: a checkpoint's second forward, in backward, needs these weights too.
        # Each pass has the same state at its start: what the first one writes is not what the other reads.
        buffers = {name: self._state[name].clone() for name, _ in self._model.named_buffers()}
        weights = swapped_state(self._model, {**self._state, **buffers})
        attributes = random_weights.copy_tensor_attributes(self._model, self._config.dtype)
        with (
            grad_mode,
            self._float64_mode(),
            weights,
            attributes,
            intercept_attention(handler, overrides=overrides),
            install_attention(self._model),
        ):
            yield

    def _float64_mode(self) -> contextlib.AbstractContextManager[Any]:
        return Float64Mode(new_tensors=True) if self._config.dtype is not None else contextlib.nullcontext()

    def _call_model(self, inputs: Mapping[str, Any]) -> Any:
        writes = WeightWriteTracker(self._model)
        try:
            with writes:
                return self._model(**inputs)
        finally:
            writes.restore()

    def _record_attention(self, call: AttentionCall) -> Tensor:
        if is_in_backward():
            number = self._find_recomputed_call(call, is_full=True)
            return recompute_call(call, None if number is None else self._recorded_calls[number - 1])
        recorded, output = record_call(call, self._tracker.current_label)
        self._recorded_calls.append(recorded)
        return output

    def _replay_forward(self, taps: GradTaps | None) -> Any:
        """The model's outputs for this rank's tokens alone."""
        number, shard = 0, self._shard

        def play_next(call: AttentionCall) -> Tensor:
            nonlocal number
            if number == len(self._recorded_calls):
                raise _num_calls_mismatch(number + 1, number)
            number += 1
            recorded, name = self._recorded_calls[number - 1].call, self._call_name(number)
            compare_attention_calls(recorded, call, shard, name, ulysses=self._ulysses)
            return self._play_back(number, call)

        with self._patched_model(play_next, taps):
            try:
                inputs = shard_tokens(dict(self._inputs), shard)
                outputs = self._call_model(inputs if taps is None else taps.tap_inputs(inputs))
            except _SIZE_ERRORS as error:
                got = f"a model that fails on a shard of {shard.size} of {shard.length} tokens: {first_line(error)}"
                raise ShardMismatch(got, depends_on_others=False) from error
        if number < len(self._recorded_calls):
            raise _num_calls_mismatch(number, len(self._recorded_calls))
        return outputs

    def _replay_backward(self, local: Any, full: Any, grad_tensors: list[Tensor | None], taps: GradTaps) -> None:
        shard = self._shard
        local_grads: list[Tensor | None] = []
        for tensor, gradient in zip(tree_leaves(full), grad_tensors, strict=True):
            if gradient is not None:
                # Outputs without tokens are the same on all ranks, and each rank has its fraction of their gradient.
                is_tokens = has_token_dim(tensor, shard.length)
                fraction = shard.size / shard.padded_length
                gradient = shard_rows(gradient, shard, 1) if is_tokens else gradient * fraction
            local_grads.append(gradient)

        def play_recomputed(call: AttentionCall) -> Tensor:
            number = self._find_recomputed_call(call, is_full=False)
            if number is None:
                got = "cp > 1 and a checkpoint whose second forward computes something else than its first"
                attempt = "checkpoint(…, use_reentrant=False), with which torch compares the two"
                raise TaskError(Problem(got, "the same forward both times", attempt))
            return self._play_back(number, call)

        with self._patched_model(play_recomputed, taps):
            try:
                run_backward(local, local_grads)
            except _SIZE_ERRORS as error:
                got = f"a backward that fails on a shard of {shard.size} of {shard.length} tokens: {first_line(error)}"
                raise ShardMismatch(got, depends_on_others=False, is_in_backward=True) from error
        if self._mismatches:
            raise ShardMismatch(self._mismatches[0], is_in_backward=True)

    def _random_grad_tensors(self, outputs: Any) -> list[Tensor | None]:
        """Random upstream gradients, one for each output that can be differentiated."""
        generator = torch.Generator().manual_seed(SEED)
        return [
            random_weights.random_tiled(output.detach(), generator).to(output.dtype)
            if output.requires_grad and output.is_floating_point()
            else None
            for output in tree_leaves(outputs)
        ]

    # ---- attention calls ----------------------------------------------------------------------------

    def _call_name(self, call_number: int) -> str:
        return f"attention call {call_number} ({self._recorded_calls[call_number - 1].module_name})"

    def _find_recomputed_call(self, call: AttentionCall, *, is_full: bool) -> int | None:
        """The number of the call that a checkpoint repeats; None if there is none like it."""
        for number in range(len(self._recorded_calls), 0, -1):
            recorded = self._recorded_calls[number - 1].call
            pairs = [(getattr(recorded, name), getattr(call, name)) for name in QKV]
            if not is_full:
                pairs = [(shard_rows(full, self._shard, 2), local) for full, local in pairs]
            if all(a.shape == b.shape and is_close(a, b.detach()) for a, b in pairs):
                return number
        return None

    def _play_back(self, number: int, call: AttentionCall) -> Tensor:
        rows, play = shard_rows(self._recorded_calls[number - 1].output, self._shard, 2), self._play_back_gradients
        return Playback.apply(call.q, call.k, call.v, rows, functools.partial(play, number))  # pyright: ignore[reportReturnType]

    def _play_back_gradients(self, number: int, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = self._recorded_calls[number - 1].gradients
        what = f"gradients of the output of {self._call_name(number)}"
        self._check_gradient_rows(gradients.get(OUTPUT), gradient, 2, what)
        recorded = [gradients.get(name) for name in QKV]
        return tuple(None if full is None else shard_rows(full, self._shard, 2) for full in recorded)

    # ---- comparison ---------------------------------------------------------------------------------

    def _compare_outputs(self, full_outputs: Any, local_outputs: Any) -> None:
        full_leaves, local_leaves = list(tree_leaves(full_outputs)), list(tree_leaves(local_outputs))
        if len(full_leaves) != len(local_leaves):
            got = f"{len(local_leaves)} outputs for a shard of the tokens, {len(full_leaves)} for full sequences"
            raise ShardMismatch(got, depends_on_others=False)
        pairs = [(full.detach(), local.detach()) for full, local in zip(full_leaves, local_leaves, strict=True)]
        for full, local in pairs:
            if has_token_dim(full, self._shard.length):
                check_shard_rows(full, local, self._shard, 1, "the outputs")
            elif not is_replicated(full, local):
                got = f"an output {list(full.shape)} that is neither per token nor the same on every rank"
                raise ShardMismatch(got, depends_on_others=False)
        if not any(has_token_dim(full, self._shard.length) for full, _ in pairs):
            shapes = ", ".join(str(list(full.shape)) for full, _ in pairs)
            raise ShardMismatch(f"outputs {shapes}, none of them per token", depends_on_others=False)

    def _compare_with_configured_attention(self, outputs: Any) -> None:
        """Check that a transformers model computes the same with our attention and masks as with its own."""
        attributes = random_weights.copy_tensor_attributes(self._model, self._config.dtype)
        with _raise_unavailable(), torch.no_grad(), self._float64_mode(), attributes:
            configured = torch.func.functional_call(self._model, self._state, (), self._inputs)
        pairs = zip(tree_leaves(configured), tree_leaves(outputs), strict=True)
        if not all(is_close(a, b.detach()) for a, b in pairs):
            got = f"cp > 1 and a {type(self._model).__name__} that does not compute plain attention with its mask"
            raise TaskError(Problem(got, "plain or causal attention, with a mask of keys"))

    def _compare_taps(self, taps: GradTaps) -> None:
        for full, local in zip(self._taps.taps, taps.taps, strict=False):
            if full.output.dim() >= 2 and local.output.shape == shard_shape(full.output, self._shard):
                gradient = local.gradients.get(OUTPUT)
                gradient = torch.zeros_like(local.output) if gradient is None else gradient
                what = f"gradients of the output of {full.module_name}"
                self._check_gradient_rows(full.gradients.get(OUTPUT), gradient, 1, what)
        if self._mismatches:
            raise ShardMismatch(self._mismatches[0], is_in_backward=True)

    def _check_gradient_rows(self, full: Tensor | None, local: Tensor, dim: int, what: str) -> None:
        """Record a mismatch unless `local` is this rank's rows of the full gradient (None: zeros)."""
        expected = torch.zeros_like(local) if full is None else shard_rows(full, self._shard, dim)
        tolerance, floor = gradient_tolerance_of(local.dtype), NOISE_FLOOR * self._max_gradient
        if expected.shape != local.shape or not is_close(expected, local, tolerance, floor=floor):
            self._mismatches.append(what)

    @functools.cached_property
    def _max_gradient(self) -> float:
        """The largest number in all gradients that were recorded for full sequences."""
        recorded = [*(call.gradients for call in self._recorded_calls), *(tap.gradients for tap in self._taps.taps)]
        return max((g.abs().max().item() for each in recorded for g in each.values() if g.numel()), default=0.0)

    @property
    def _gradient_tolerance(self) -> float:
        dtypes = {tensor.dtype for tensor in self._state.values() if tensor.requires_grad}
        return max(map(gradient_tolerance_of, dtypes), default=0.0)

    # ---- explaining a mismatch ----------------------------------------------------------------------

    def full_outputs(self, **changed_inputs: Tensor) -> list[Tensor]:
        """The outputs for full sequences, with some inputs changed."""
        with preserve_module(self._model), self._patched_model(AttentionCall.run_sdpa):
            return list(tree_leaves(self._call_model({**self._inputs, **changed_inputs})))

    def find_first_difference(self) -> str | None:
        """The first module whose outputs for this rank's tokens are not those for full sequences."""
        with ModuleTrace(self._model) as full:
            self.full_outputs()
        # The replay fails as it did before; the outputs recorded until then show where.
        with ModuleTrace(self._model) as local, contextlib.suppress(ShardMismatch):
            self._replay_forward(None)
        inner = {name for name, module in self._model.named_modules() if not any(True for _ in module.children())}
        outputs = (
            [each for each in trace.events if each.kind == OUTPUT and each.name in inner] for trace in (full, local)
        )
        for (name, _, _, tensor), (_, _, _, part) in zip(*outputs, strict=False):
            if not is_shard_of(tensor, part, self._shard):
                type_name = type(self._model.get_submodule(name)).__name__
                return f"{name or type_name} ({type_name})"
        return None


def _num_calls_mismatch(num_local: int, num_full: int) -> ShardMismatch:
    got = f"{num_local} attention calls for a shard of the tokens, {num_full} for full sequences"
    return ShardMismatch(got, depends_on_others=False)


def _is_finite(outputs: Any) -> bool:
    """Whether outputs are numbers. Minus infinity counts: it is the logit of an impossible class."""
    floats = [output.detach() for output in tree_leaves(outputs) if output.is_floating_point()]
    return not any(bool((output.isnan() | output.isposinf()).any()) for output in floats)


@contextlib.contextmanager
def _raise_unavailable() -> Iterator[None]:
    """Within, what the model raises for full sequences becomes CheckUnavailable."""
    try:
        yield
    except (FourfoldError, ShardMismatch, CheckUnavailable):
        raise
    except Exception as error:
        raise CheckUnavailable(first_line(error)) from error
