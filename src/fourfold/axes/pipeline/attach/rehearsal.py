"""Rehearsal: one stage of the real model, forward and backward, with what was recorded in front of it.

Law: the stage sends what was recorded behind it, or returns the recorded outputs and loss; and with the same gradients
behind it, it has the recorded gradients of what it received and of its weights.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.work.chain import StageMap
from fourfold.axes.pipeline.work.gates import Carried, Gates, StageEnd
from fourfold.axes.pipeline.work.knowledge import Knowledge, is_of
from fourfold.axes.pipeline.work.recording import Recording
from fourfold.axes.pipeline.work.reentrant import ReentrantCheck
from fourfold.axes.pipeline.work.stand_in import BUFFER, OUTPUT, WEIGHT, Source, StandIn, StandInUsed, sources_of
from fourfold.axes.pipeline.work.tied import aliases_of
from fourfold.axes.pipeline.work.values import (
    OBJECT,
    Replacements,
    replaced,
    take_apart,
    tensors_among,
    without_caches,
    written_attributes,
)
from fourfold.model.batch import Microbatch
from fourfold.model.fixed_random import without_randomness
from fourfold.model.model_call import call_model
from fourfold.model.objective import Objective
from fourfold.proof.checks import summarize_error
from fourfold.proof.grad_projections import is_close
from fourfold.torch_kit.grad_hooks import check_dense
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import own_buffers, own_parameters, swapped_state
from fourfold.words.errors import FourfoldError, Problem, TaskError

NEED = "blocks that are called once each, in order, and need only what modules before them returned and the batch"
RTOL, ATOL = 1e-5, 1e-6  # of outputs: both runs do the same operations on the same numbers
GRADIENT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # their addends may come in another order
HALF_GRADIENT_TOLERANCE = 5e-2
ROUNDINGS = 16  # of the largest gradient: what is not larger may be the rest of a sum that is 0
Roots = Sequence[tuple[Tensor, Tensor]]
"""Tensors, and the gradients that a backward begins with."""


class DividedModel(NamedTuple):
    """A model of which this rank has the stages `own`, and its skeleton, which has all of them."""

    model: nn.Module
    skeleton: nn.Module
    objective: Objective
    stages: StageMap
    own: range
    device: torch.device

    def is_own(self, parameter: str) -> bool:
        """Whether this rank's stages compute with a parameter, by this name or as a tied one."""
        names = [parameter, *(alias for alias, name in aliases_of(self.stages.ties).items() if name == parameter)]
        return any(self.stages.stage_of(name) in self.own for name in names)

    @contextlib.contextmanager
    def computing(self, model: nn.Module, buffers: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Within, one of the two models computes with the skeleton's weights and copies of these buffers; None: its."""
        named = dict(self.skeleton.named_parameters(remove_duplicate=False))
        state = {name: named[name] for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {**dict(self.skeleton.named_buffers()), **(buffers or {})}
        state |= {name: buffers[name].detach().clone() for name, _ in model.named_buffers()}
        copies: Replacements = []
        for alias in aliases_of(self.stages.ties):  # which are in no list of parameters
            path, _, key = alias.rpartition(".")
            attributes = vars(model.get_submodule(path))
            copies += [(attributes, key, named[alias])] if key in attributes else []
        running = swapped_state(model, state), without_randomness(self.device), self.objective.force_eager(model)
        with running[0], running[1], running[2], replaced(copies):
            yield

    def shown_whole(self, before: Mapping[nn.Module, Mapping[str, list[Any]]]) -> AbstractContextManager[None]:
        """Within, the real model has the weights, buffers and new attributes of the skeleton: a loss may read them.

        Attributes that are as `before` stay: a hook may have written those of the real model.
        """
        shown: Replacements = []
        for module, like in zip(self.model.modules(), self.skeleton.modules(), strict=True):
            for key, value in {**own_parameters(like), **own_buffers(like)}.items():
                places = (own_parameters(module), own_buffers(module), vars(module))
                shown += [(place, key, value) for place in places if key in place]
            shown += [(vars(module), key, vars(like)[key]) for key in written_attributes(like, before[like])]
        return replaced(shown)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's buffers, by name."""
    return {name: each.detach().clone() for name, each in model.named_buffers()}


class Rehearsal:
    """One stage on one part of a batch.

    buffers  of the stage, as its forward begins; then as it has left them
    """

    def __init__(
        self,
        divided: DividedModel,
        known: Knowledge,
        gates: Gates,
        part: Microbatch,
        recorded: Recording,
        buffers: Mapping[str, Tensor],
    ) -> None:
        """`gates`: of the stage, and of this rehearsal only. `buffers`: those that a forward before has left."""
        self.buffers = buffers
        self._divided, self._known, self._gates = divided, known, gates
        self._stage, self._part, self._recorded = gates.stage, part, recorded
        self._exit = gates.exit

    def run(self) -> Problem | None:
        """Find what the stage needs, and compare; a problem if something differs, or cannot be carried."""
        while True:
            try:
                return self._compare()
            except StandInUsed as used:
                if (refused := self._known.note_needs(self._stage, used.sources)) is not None:
                    return self._used_problem(refused, used.place)

    def _used_problem(self, source: Source, place: str) -> Problem:
        got = f"{self._where} needs {source}{place}"
        behind = [name for name in self._divided.stages.chain.behind if source.name.startswith(f"{name}.")]
        if source.kind == WEIGHT and behind and self._exit is not None:
            got = f"{behind[0]}, which has weights and is defined behind the blocks, called in front of them"
            return Problem(
                got, "modules defined where they are called", "a model that defines it in front of the blocks"
            )
        if source.kind == WEIGHT:
            need = "a forward and a loss that read only weights of the stage that they run on"
            return Problem(got, need, "weight_decay of the optimizer in place of a penalty in the loss, or pp = 1")
        if source.kind == BUFFER:
            return Problem(got, "buffers that only the stage reads that has their module", "pp = 1")
        if objects := [each[1] for each in self._recorded.described.get(source, ()) if each[0] == OBJECT]:
            need = "tensors, numbers, texts, and tuples, lists, dicts and dataclasses of these"
            return Problem(f"{got}: {objects[0]}, an object", need, f"{objects[0]} as a dataclass, or pp = 1")
        return Problem(got, NEED, "pp = 1")

    @property
    def _where(self) -> str:
        blocks, names = self._divided.stages.blocks[self._stage], self._divided.stages.chain.blocks
        return f"stage {self._stage} ({names[blocks.start]} to {names[blocks.stop - 1]})"

    def _compare(self) -> Problem | None:
        with self._divided.computing(self._divided.model, self.buffers):  # in backward too: checkpoints compute again
            return self._difference()

    def _difference(self) -> Problem | None:
        received, origins = self._message()
        outputs, losses = self._forward(received)
        left = buffers_of(self._divided.model)
        wrong = self._wrong_buffers(left)
        wanted = self._recorded.outputs if self._exit is None else tensors_among(self._recorded.leaves[self._exit])
        if not _are_close(outputs, wanted):
            return self._problem("other outputs", wrong)
        if self._exit is None and not _are_close(losses, self._recorded.losses):
            return self._problem("another loss", wrong)
        if saved := [name for name in wrong if self._saves(name)]:
            return self._problem("another buffer", saved)
        if torch.is_grad_enabled() and not self._has_same_gradients(outputs, losses, received, origins):
            return self._problem("other gradients")
        self.buffers = left
        return None

    def _wrong_buffers(self, left: Mapping[str, Tensor]) -> list[str]:
        """The buffers that the whole model has left with other values."""
        wanted = self._recorded.buffers
        known = [name for name, each in left.items() if name in wanted and not isinstance(each, StandIn)]
        return [name for name in known if not _is_close(left[name], wanted[name])]

    def _saves(self, buffer: str) -> bool:
        """Whether a buffer is of a module in front of the blocks or in them, and this stage has it."""
        modules = (*self._divided.stages.chain.before, *self._divided.stages.chain.blocks)
        is_inside = any(buffer.startswith(f"{module}.") for module in modules)
        return is_inside and self._divided.stages.stage_of(buffer) == self._stage

    def _problem(self, what: str, buffers: Sequence[str] = ()) -> Problem:
        got = f"{what} of {self._where} by itself than in the whole model"
        if buffers:
            got, need = f"{got}: {buffers[0]}, which other stages write", "buffers that no later stage writes"
            return Problem(got, need, "a buffer of one block, or written in front of the blocks; or pp = 1")
        if self._known.writers:
            writer = min(self._known.writers)
            return Problem(
                f"{got}: {writer} writes into one of its arguments", NEED, "values that it returns; or pp = 1"
            )
        attempt = "no weights that two stages use, but for an embedding tied to a head; nothing that forwards leave "
        return Problem(got, NEED, f"{attempt}outside of modules; or pp = 1")

    # ---- forward --------------------------------------------------------------------------------------------

    def _message(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the stage before would send, and the recorded tensor that each of it is."""
        if not self._stage:
            return [], []
        recorded, tensors, origins = self._recorded, [], []
        front = Source(OUTPUT, self._divided.stages.boundaries()[self._stage - 1])
        described = {
            source: each for source, each in recorded.described.items() if self._known.is_in_front(self._stage, source)
        }
        self._gates.set_metadata(described)
        carried = {front, *self._known.received_by(self._stage)}
        for source, leaves in described.items():
            for leaf, is_sent in zip(
                recorded.leaves[source], self._gates.travels(source, leaves, carried), strict=True
            ):
                if is_sent:
                    tensors.append(leaf.detach().clone().requires_grad_(leaf.requires_grad and torch.is_grad_enabled()))
                    origins.append(leaf)
        return tensors, origins

    def _forward(self, received: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
        """The output of the stage's last block; or of the last stage what the model returns, and its loss."""
        divided, gates, model = self._divided, self._gates, self._divided.model
        carried = Carried(self._known.received_by(self._stage))
        try:
            with ReentrantCheck(model).looking():
                try:
                    with gates.closed([*received, torch.empty(0)], carried):
                        returned = call_model(model, self._part.inputs)
                except StageEnd as end:
                    gates.keep_for_backward(end.outputs)
                    return end.outputs, []
                with gates.shown():
                    losses = list(tree_leaves(divided.objective.raw_loss(returned, self._part)))
                self._note_late_buffers()
        except FourfoldError:
            raise
        except Exception as error:
            problem = Problem(f"{self._where} fails by itself: {summarize_error(error)}", NEED, "pp = 1")
            raise TaskError(problem, where="the pipeline") from error
        if missing := sources_of(losses):
            raise StandInUsed(missing, place="")
        gates.keep_for_backward(losses)
        return tensors_among(take_apart(without_caches(returned))[1]), losses

    def _note_late_buffers(self) -> None:
        """Note the buffers of no module of the chain that this stage has just written."""
        chain, before = self._divided.stages.chain, dict(self._divided.skeleton.named_buffers())
        modules = (*chain.before, *chain.blocks, *chain.behind)
        self._known.late_buffers |= {
            name
            for name, each in self._divided.model.named_buffers()
            if not any(name.startswith(f"{module}.") for module in modules) and not torch.equal(each, before[name])
        }

    # ---- backward -------------------------------------------------------------------------------------------

    def _has_same_gradients(
        self, outputs: Sequence[Tensor], losses: list[Tensor], received: Sequence[Tensor], origins: Sequence[Tensor]
    ) -> bool:
        divided, recorded = self._divided, self._recorded
        named = divided.skeleton.named_parameters()
        around = [name for name in divided.stages.chain.own if divided.stages.stage_of(name) != self._stage]
        own_names = {p: name for name, p in named if p.requires_grad and divided.is_own(name) and name not in around}
        own = list(own_names)
        leaves = [each for values in recorded.leaves.values() for each in tensors_among(values)]
        if self._exit is None:
            roots, expected = _total(losses), _total(recorded.losses)
        else:
            upstream = [_numbers(each) for each in outputs]
            raw = tensors_among(recorded.raw.get(self._exit, recorded.leaves[self._exit]))
            roots, expected = list(zip(outputs, upstream, strict=True)), list(zip(raw, upstream, strict=True))
        with _new_gradients([*received, *own]), self._gates.in_backward():
            _backward(roots)
            for p, name in own_names.items():
                check_dense(p.grad, name)
            got = [each.grad for each in (*received, *own)]
        with _new_gradients([*leaves, *own]), divided.computing(divided.skeleton), replaced(recorded.kept):
            self._backward_recorded(expected)
            wanted = [each.grad for each in (*origins, *own)]
        largest = max((float(each.abs().max()) for each in wanted if each is not None and each.numel()), default=0.0)
        return all(_is_close_gradient(a, b, largest) for a, b in zip(got, wanted, strict=True))

    def _backward_recorded(self, roots: Roots) -> None:
        """The backward of this stage in the run of the whole model, module by module."""
        chain, recorded = self._divided.stages.chain, self._recorded
        blocks = [chain.blocks[index] for index in self._divided.stages.blocks[self._stage]]
        inside = blocks if self._stage else [*chain.before, *blocks]
        _backward(roots)
        for source, raw in reversed(recorded.raw.items()):
            if source != self._exit and any(is_of(source, name) for name in inside):
                pairs = zip(raw, recorded.leaves[source], strict=True)
                _backward([(a, leaf.grad) for a, leaf in pairs if isinstance(a, Tensor) and leaf.grad is not None])


def _backward(roots: Roots) -> None:
    known = [(root, upstream) for root, upstream in roots if root.requires_grad]
    if known:
        tensors, gradients = map(list, zip(*known, strict=True))
        torch.autograd.backward(tensors, gradients, retain_graph=True)


@contextlib.contextmanager
def _new_gradients(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Within, gradients of these begin with None; afterwards they are None."""
    for each in leaves:
        each.grad = None
    try:
        yield
    finally:
        for each in leaves:
            each.grad = None


def _total(losses: Sequence[Tensor]) -> Roots:
    """The loss, with gradients of 1: unreduced values, the sum of a sum and a count, or a scalar."""
    return [(losses[0], torch.ones_like(losses[0]))] if losses else []


def _numbers(like: Tensor) -> Tensor:
    """A gradient that differs by element."""
    numbers = torch.cos(1 + torch.arange(like.numel(), device=like.device, dtype=torch.float64))
    return numbers.to(like.dtype).view(like.shape)


def _are_close(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(_is_close, got, wanted))


def _is_close(got: Tensor, wanted: Tensor) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    return torch.allclose(got.detach(), wanted.detach(), rtol=RTOL, atol=ATOL, equal_nan=True)


def _is_close_gradient(got: Tensor | None, wanted: Tensor | None, largest: float) -> bool:
    """`largest`: number in any gradient. One that is 0 but for rounding, as of a bias in front of a batch
    normalization, shows nothing."""
    if got is None or wanted is None:
        rest = wanted if got is None else got
        return rest is None or not bool((rest != 0).any())
    tolerance = GRADIENT_TOLERANCE.get(got.dtype.to_real(), HALF_GRADIENT_TOLERANCE)
    floor = ROUNDINGS * torch.finfo(got.dtype).eps * largest / tolerance
    return got.shape == wanted.shape and is_close(wanted, got, tolerance, floor=floor)
