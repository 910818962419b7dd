"""Recording: what the modules of a whole model return and keep in one run, for the rehearsals of its stages.

Law: autograd's graph is cut behind each module that is recorded, so that gradients can be followed from any place to
any other one.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.work.backward_hooks import hooks_inside
from fourfold.axes.pipeline.work.knowledge import Knowledge, is_of
from fourfold.axes.pipeline.work.stand_in import ATTRIBUTE, OUTPUT, WEIGHT, Source
from fourfold.axes.pipeline.work.values import (
    Described,
    Replacements,
    attributes_of,
    describe,
    replaced,
    take_apart,
    tensors_among,
    written_attributes,
)
from fourfold.torch_kit.recompute import current_checkpoint
from fourfold.torch_kit.torch_private import are_transforms_active
from fourfold.words.errors import Problem, TaskError


@dataclass
class Recording:
    """What one run of the skeleton has shown, by source and leaf.

    leaves      values as the model went on with them; tensors are leaves of autograd's graph
    raw         the same as the modules made them, with their graph
    losses      the tensors of the loss; outputs: of the model
    calls       the modules in the order of their calls
    attributes  of modules, that the run has written
    checkpoints by module: the call of the checkpoint that it ran in
    kept        the attributes as the run has left them: where, and what
    buffers     as the run has left them, by name
    """

    leaves: dict[Source, list[Any]] = field(default_factory=dict)
    raw: dict[Source, list[Any]] = field(default_factory=dict)
    described: dict[Source, tuple[Described, ...]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    attributes: set[Source] = field(default_factory=set)
    checkpoints: dict[str, FrameType | None] = field(default_factory=dict)
    kept: Replacements = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Recorder:
    """Records one run of the skeleton. It cuts autograd's graph behind each module that it records."""

    def __init__(
        self, skeleton: nn.Module, known: Knowledge, trained: set[nn.Parameter], own: Collection[int] = ()
    ) -> None:
        """`trained`: the parameters that are trained, of all ranks. `own`: the stages whose graph is kept; that of the
        others would take memory.
        """
        self._skeleton, self._known, self._trained, self._own = skeleton, known, trained, own
        self._is_trained = self._is_on = False
        self._recording = Recording(attributes=set(known.attributes))
        self._before: dict[nn.Module, dict[str, list[Any]]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        hooks, inside, chain = [], Replacements(), self._known.stages.chain
        for name in (*chain.before, *chain.blocks):

            def record(module: nn.Module, args: Any, output: Any, name: str = name) -> Any:
                return self._record(name, module, output) if self._is_on else None

            # The user's hooks get what is recorded: they run on each stage, as those of its own modules do.
            hooks.append(self._skeleton.get_submodule(name).register_forward_hook(record, prepend=True))
            inside += hooks_inside(self._skeleton.get_submodule(name))
        self._is_on = True  # not in the second forward of a checkpoint
        for name in chain.own:
            source, weight = Source(WEIGHT, name), self._skeleton.get_parameter(name)
            self._recording.leaves[source], self._recording.described[source] = [weight], (describe(weight),)
        try:
            with replaced(inside):
                self._before = {each: attributes_of(each) for each in self._skeleton.modules()}
                yield self._recording
            written = self._recording.attributes
            places = [(vars(self._skeleton.get_submodule(each.module)), each.key) for each in written]
            self._recording.kept = [(place, key, place[key]) for place, key in places if key in place]
        finally:
            self._is_on = False
            for hook in hooks:
                hook.remove()

    def _record(self, name: str, module: nn.Module, output: Any) -> Any:
        if are_transforms_active():
            got = f"{name}, called inside of a transform of torch.func, such as vmap or grad"
            need = "blocks, and modules in front of them, that are called outside of transforms"
            raise TaskError(Problem(got, need, "a transform inside of one block, or pp = 1"), where="the pipeline")
        is_own = self._known.stages.stage_of(name) in self._own
        self._is_trained = self._is_trained or any(p in self._trained for p in module.parameters())
        for path, each in module.named_modules(prefix=name):
            for key in written_attributes(each, self._before[each]):
                self._recording.attributes.add(Source(ATTRIBUTE, f"{path}.{key}"))
        for source in self._recording.attributes:
            if is_of(source, name) and source.key in (attributes := vars(self._skeleton.get_submodule(source.module))):
                attributes[source.key] = self._keep(source, attributes[source.key], is_own=is_own)
        source = Source(OUTPUT, name, self._recording.calls.count(name))
        self._recording.calls.append(name)
        self._recording.checkpoints[name] = current_checkpoint()
        return self._keep(source, output, is_own=is_own)

    def _keep(self, source: Source, value: Any, *, is_own: bool) -> Any:
        """Record a value; returns it with tensors that begin a graph."""
        form, leaves = take_apart(value)
        self._known.forms.setdefault(source, form)
        cut = [self._cut(each) if isinstance(each, Tensor) else each for each in leaves]
        self._recording.leaves[source] = cut
        if is_own and any(each.requires_grad for each in tensors_among(leaves)):
            self._recording.raw[source] = leaves
        self._recording.described[source] = tuple(map(describe, cut))
        return form.build(iter([each.clone() if isinstance(each, Tensor) else each for each in cut]))

    def _cut(self, tensor: Tensor) -> Tensor:
        needs = tensor.requires_grad or (self._is_trained and torch.is_grad_enabled() and tensor.is_floating_point())
        return tensor.detach().clone().requires_grad_(needs)
