"""Trial: before the first step, the model is tried out on a few tokens, whole and cut.

whole    the model on all the tokens of a few samples, each attention call recorded
replay   the model on this rank's tokens alone; in attention the others' keys and values are those recorded
Law: where the replay has the same keys, values, masks and outputs as the whole, call by call, tokens meet in attention
only, and the cut model is the model. Nothing is communicated.

B samples · L length · l = L / sp
"""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.plan.sequence import heads_problem
from fourfold.run.batch import POSITION_NAMES, evaluating, has_tokens, leaves, mapped
from fourfold.run.sequence.hugging import installed, is_hugging
from fourfold.run.sequence.route import Call, both, routed
from fourfold.run.sequence.tokens import Share, cut_tokens
from fourfold.run.sequence.where import Names
from fourfold.words.errors import Problem, TaskError

# Largest difference, as a part of the largest number: what rounding makes is less, and what mixing makes is more.
# (Models in float64 may normalize in float32.)
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3}
CLOSE_OF_HALF = 5e-2
# What is of no token is computed by all ranks alike; a mean over tokens is not the same, but may be near.
SAME = 1e-6
ONLY = "tokens that meet in torch.nn.functional.scaled_dot_product_attention only"
SOFTMAXES = {torch.softmax, torch.Tensor.softmax, F.softmax}


class Tried(NamedTuple):
    """What a trial has found: problems; else how many calls of attention there are, and what the loss gives."""

    problems: list[Problem]
    num_calls: int = 0
    outputs: Any = None


class _Seen(NamedTuple):
    """One call of the whole model, and the module it was made in."""

    call: Call
    where: str


class _Differs(Exception):
    """The replay is not the whole; `got` says where, and whether other ranks' tokens are seen to matter."""

    def __init__(self, what: str, *, depends: bool = True) -> None:
        self.got = f"{what} depend on other ranks' tokens" if depends else what
        super().__init__(self.got)


class Trial:
    """The trial of a model on whole inputs (a dict), of which `share` is this rank's; `ulysses` is the plan's."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], share: Share, *, ulysses: int = 1) -> None:
        self._model, self._inputs, self._share, self._ulysses = model, inputs, share, ulysses
        self._names = Names(model)
        self._seen: list[_Seen] = []
        self._manual: list[str] = []
        self._state = _state(model)

    @torch.no_grad()
    def run(self) -> Tried:
        """Try the model out. What the model raises itself on whole inputs is raised."""
        with evaluating(self._model), self._names:
            try:
                outputs = self._whole()
                if not self._seen:
                    return Tried([self._without_attention()])
                if is_hugging(self._model):
                    self._compare_with_its_own(outputs)
                self._replay(outputs)
            except _Differs as error:
                return Tried([self._explained(error.got)])
            except TaskError as error:
                return Tried(list(error.problems))
        return Tried([], len(self._seen), outputs)

    def _call(self, inputs: Mapping[str, Any]) -> Any:
        return torch.func.functional_call(self._model, self._state, (), dict(inputs))

    def _whole(self) -> Any:
        def target(call: Call) -> Tensor:
            self._seen.append(_Seen(call, self._names.here))
            return call.plain()

        with routed(target, watch=self._watch), installed(self._model):
            return self._call(self._inputs)

    def _compare_with_its_own(self, outputs: Any) -> None:
        """A transformers model must be the same with our attention and masks as with those it is configured for."""
        theirs = self._call(self._inputs)
        if not all(map(_close, leaves(theirs), leaves(outputs))):
            kind = f"a {type(self._model).__name__} that attends otherwise than its masks and modules say"
            raise TaskError(Problem(f"sp > 1 and {kind}", "plain or causal attention, with a mask of keys"))

    def _watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notice attention that is made by hand: it is what a message should speak of."""
        if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
            self._manual.append(f"{self._names.here} (nn.MultiheadAttention with need_weights=True)")
        elif func in SOFTMAXES and args and isinstance(args[0], Tensor):
            scores = args[0]
            if scores.dim() >= 3 and scores.shape[-1] == scores.shape[-2] == self._share.length:
                self._manual.append(f"{self._names.here} (softmax over {list(scores.shape)})")

    def _replay(self, outputs: Any) -> None:
        number = 0

        def target(call: Call) -> Tensor:
            nonlocal number
            if number == len(self._seen):
                raise _Differs(f"{number + 1} calls of attention, {number} with whole sequences", depends=False)
            number += 1
            return self._attend(number, call)

        with routed(target), installed(self._model):
            try:
                own = self._call(cut_tokens(dict(self._inputs), self._share))
            except (RuntimeError, IndexError, ValueError) as error:
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise _Differs(
                    f"with {self._share.size} of {self._share.length} tokens: {said}", depends=False
                ) from error
        if number < len(self._seen):
            raise _Differs(f"{number} calls of attention, {len(self._seen)} with whole sequences", depends=False)
        self._compare(outputs, own)

    def _attend(self, number: int, call: Call) -> Tensor:
        """What the whole's call gives to this rank's queries, once its keys and values are seen to be the same."""
        whole, where = self._seen[number - 1]
        name = f"attention call {number} ({where})"
        if whole.q.shape[2] != whole.k.shape[2]:
            got = f"sp > 1 and cross-attention at {name}: {whole.q.shape[2]} queries, {whole.k.shape[2]} keys"
            raise TaskError(Problem(got, "attention among one sequence's own tokens", "sp = 1, and dp instead"))
        for what in ("q", "k", "v"):
            self._same(getattr(whole, what), getattr(call, what), 2, f"{what} of {name}")
        if problem := heads_problem(call.q.shape[1], call.k.shape[1], self._ulysses):
            raise TaskError(problem)
        options = [(one.causal, one.scale, one.dropout, one.grouped) for one in (whole, call)]
        if options[0] != options[1]:
            raise _Differs(f"{name} with other options", depends=False)
        rows = self._share.places.to(call.q.device)
        mask = self._mask(whole, call, rows, name)
        if whole.causal:
            columns = torch.arange(whole.k.shape[2], device=call.q.device)
            causal = columns <= rows[:, None]
            mask = causal if mask is None else both(mask, causal)
        return call._replace(k=whole.k, v=whole.v, mask=mask, causal=False).plain()

    def _mask(self, whole: Call, call: Call, rows: Tensor, name: str) -> Tensor | None:
        """The whole's mask in this rank's rows, once the call's own is seen to be a part of it."""
        if whole.mask is None and call.mask is None:
            return None
        if whole.mask is None or call.mask is None:
            raise _Differs(f"a mask of {name} that is not always there", depends=False)
        expected = whole.mask if whole.mask.dim() < 2 or whole.mask.shape[-2] == 1 else whole.mask[..., rows, :]
        own = call.mask
        if own.shape[-1] == self._share.size and (own.dim() < 2 or own.shape[-2] == 1):
            self._same(whole.mask, own, own.dim() - 1, f"masks of {name}")
        elif own.shape == expected.shape:
            if not torch.equal(own, expected):
                raise _Differs(f"masks of {name}")
        else:
            raise TaskError(mask_problem(own, self._share, name))
        return expected

    def _compare(self, outputs: Any, own: Any) -> None:
        theirs, ours = list(leaves(outputs)), list(leaves(own))
        if len(theirs) != len(ours):
            raise _Differs(f"{len(ours)} outputs, {len(theirs)} with whole sequences", depends=False)
        pairs = list(zip(theirs, ours, strict=True))
        for whole, mine in pairs:
            if has_tokens(whole, self._share.length):
                self._same(whole, mine, 1, "the outputs")
            elif whole.shape != mine.shape or not _close(whole, mine, SAME):
                raise _Differs(f"an output {list(whole.shape)} that is not each token's own", depends=False)
        if not any(has_tokens(whole, self._share.length) for whole, _ in pairs):
            raise _Differs(
                f"no output for each token, but {', '.join(str(list(w.shape)) for w, _ in pairs)}", depends=False
            )

    def _same(self, whole: Tensor, own: Tensor, dim: int, what: str) -> None:
        if whole.shape[dim] != self._share.length or own.shape[dim] != self._share.size:
            lengths = (
                f"{whole.shape[dim]} long with {self._share.length} tokens, {own.shape[dim]} with {self._share.size}"
            )
            raise _Differs(f"{what}: {lengths}", depends=False)
        mine = whole.index_select(dim, self._share.places.to(whole.device))
        if mine.shape != own.shape or not _close(mine, own):
            raise _Differs(what)

    def _without_attention(self) -> Problem:
        if self._manual:
            return self._by_hand()
        got = f"a model that never calls scaled_dot_product_attention ({type(self._model).__name__})"
        return Problem(f"sp > 1 and {got}", ONLY, "sp = 1, and dp instead")

    def _by_hand(self) -> Problem:
        attempt = "scaled_dot_product_attention(q, k, v, is_causal=…)"
        if any("need_weights" in manual for manual in self._manual):
            attempt = "need_weights=False"
        return Problem(f"sp > 1 and attention made by hand at {self._manual[0]}", ONLY, attempt)

    def _explained(self, got: str) -> Problem:
        """Why the replay is not the whole, as far as can be found out by looking closer."""
        if self._manual:
            return self._by_hand()
        if self._ignores_positions():
            need = "positions that are given: each rank has other tokens than the first"
            attempt = f"{self._position} [samples, tokens] where the model counts places itself, as by torch.arange"
            return Problem(f"sp > 1 and a model that does not use {self._position}", need, attempt)
        first = self._first_difference()
        at = f", first in {first}" if first else ""
        return Problem(f"sp > 1 and {got}{at}", ONLY, "sp = 1, and dp instead")

    @property
    def _position(self) -> str:
        return next(name for name in self._inputs if name in POSITION_NAMES)

    def _ignores_positions(self) -> bool:
        given = self._inputs[self._position]
        with routed(Call.plain), installed(self._model):
            turned = self._call({**self._inputs, self._position: given.flip(1)})
            straight = self._call(self._inputs)
        return all(map(torch.equal, leaves(turned), leaves(straight)))

    def _first_difference(self) -> str | None:
        """The first module whose outputs for this rank's tokens are not those it has among all tokens."""
        with self._names.recording() as whole, routed(Call.plain), installed(self._model):
            outputs = self._call(self._inputs)
        # It ends as it did before; what was recorded until then tells where.
        with self._names.recording() as own, contextlib.suppress(_Differs):
            self._replay(outputs)
        for (name, kind, result), (_, _, mine) in zip(whole, own, strict=False):
            if not self._is_part(result, mine):
                return f"{name} ({kind})"
        return None

    def _is_part(self, whole: Tensor, own: Tensor) -> bool:
        share = self._share
        for dim in range(whole.dim()):
            if whole.shape[dim] == share.length and own.dim() == whole.dim() and own.shape[dim] == share.size:
                part = whole.index_select(dim, share.places.to(whole.device))
                if part.shape == own.shape:
                    return _close(part, own)
        return whole.shape == own.shape and _close(whole, own)


def mask_problem(mask: Tensor, share: Share, name: str) -> Problem:
    """What is wrong with a mask that is no part of the whole sequence's."""
    got = f"sp > 1 and a mask {list(mask.shape)} at {name}, made of this rank's {share.size} tokens"
    need = "is_causal=True, or a mask of keys [B, 1, 1, l], or of this rank's rows by all columns [B, 1, l, L]"
    return Problem(got, need, "is_causal=True instead of a causal mask")


def smaller(tree: Any, *, length: int, few: int, samples: int) -> Any:
    """The first `few` tokens of the first samples, the last token again where there are not so many.

    Of a mask [B, L, L] they are rows and columns.
    """
    places = torch.arange(few).clamp(max=length - 1)

    def first(tensor: Tensor) -> Tensor:
        some = tensor[:samples]
        if not has_tokens(tensor, length):
            return some
        some = some[:, places.to(tensor.device)]
        return some[:, :, places.to(tensor.device)] if _is_square(tensor) else some

    return mapped(tree, first)


def _is_square(tensor: Tensor) -> bool:
    """Whether a token tensor is a mask of all tokens by all, [B, L, L]. Features may be as many: but no mask adds."""
    if tensor.dim() != 3 or tensor.shape[1] != tensor.shape[2]:
        return False
    return tensor.dtype == torch.bool or (tensor.is_floating_point() and not bool((tensor > 0).any()))


def _close(whole: Tensor, own: Tensor, bound: float | None = None) -> bool:
    if not whole.is_floating_point():
        return torch.equal(whole, own)
    if not torch.equal(whole.isnan(), own.isnan()):
        return False
    if not whole.numel():
        return True
    bound = CLOSE.get(whole.dtype, CLOSE_OF_HALF) if bound is None else bound
    whole, own = (torch.nan_to_num(tensor, posinf=0.0, neginf=0.0).double() for tensor in (whole, own))
    return (whole - own).abs().max().item() <= bound * max(whole.abs().max().item(), 1e-30)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """What the model is tried with: its weights, and where they are 0 small numbers, which hide nothing.

    Buffers are copies: what a forward writes there is forgotten.
    """
    generator = torch.Generator().manual_seed(0)
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, p in model.named_parameters():
        zeros = p == 0
        if p.is_floating_point() and bool(zeros.any()):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p) * 0.1
            state[name] = torch.where(zeros, noise, p.detach())
    return state
