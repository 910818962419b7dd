"""Gates: the model's own forward, of which only one stage is computed.

gate     what a module of an earlier stage does in place of its forward: it returns what it returned there, if that was
         sent, else stand-ins (`stand_in.py`)
carried  values that a stage is sent besides the output of the block before its first one, because it needs them
metadata what a message says of all values in front of a stage: shapes, numbers. It is the last tensor of the message,
         without elements if it is as in the message before
Law: a stage computes what the whole model computes between the outputs of the block before its first one and of its
last one. What it needs and is not sent raises StandInUsed.

The forward runs as the user wrote it. After its last block a stage leaves it.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.work.backward_hooks import hooks_inside, without_hooks
from fourfold.axes.pipeline.work.chain import Chain
from fourfold.axes.pipeline.work.knowledge import Knowledge, is_of
from fourfold.axes.pipeline.work.stand_in import (
    ATTRIBUTE,
    BUFFER,
    OUTPUT,
    WEIGHT,
    Source,
    StandIn,
    StandInUsed,
    UnknownValue,
    sources_of,
)
from fourfold.axes.pipeline.work.values import (
    TENSOR,
    ArgumentStates,
    Described,
    Form,
    Known,
    Replacements,
    are_written,
    argument_states,
    attribute_of,
    attributes_of,
    copies,
    decode,
    describe,
    encode,
    is_of_torch,
    replaced,
    stand_in_of,
    take_apart,
    tensors_among,
    writable,
    written_attributes,
)
from fourfold.torch_kit.recompute import current_checkpoint
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import own_buffers, own_parameters
from fourfold.words.errors import Problem, TaskError


class StageEnd(BaseException):
    """A stage has ended within the model's forward. Not an Exception: a model may catch these."""

    def __init__(self, outputs: Sequence[Tensor], message: Sequence[Tensor]) -> None:
        self.outputs, self.message = outputs, message


class Carried(NamedTuple):
    """The values that a stage receives, and those that it sends, besides its own input and output."""

    received: frozenset[Source] = frozenset()
    sent: frozenset[Source] = frozenset()


NOTHING_CARRIED = Carried()
WEIGHT_FORM = Form("*", next)


class SplitTokens(NamedTuple):
    """Where tensor ranks begin to hold some tokens of hidden tensors: the modules at whose entry; empty: nowhere.

    Stages send each other these tokens only. How many there are altogether, a stage sees of the stand-ins.

    region  of the tensor axis: a pass of this stage begins and ends there
    """

    entries: frozenset[str]
    region: Any


class Gates:
    """The gates of one stage of a model.

    elsewhere   parameters and buffers of other stages, which stand-ins take the place of: hooks of the modules of
                earlier stages run on this one too
    """

    def __init__(
        self,
        model: nn.Module,
        known: Knowledge,
        stage: int,
        split_tokens: SplitTokens,
        device: torch.device,
        *,
        elsewhere: Mapping[Source, Tensor] | None = None,
    ) -> None:
        stages = known.stages
        self.stage, self._model, self._learned = stage, model, known
        self._split_tokens, self._device = split_tokens, device
        blocks, names = stages.blocks[stage], stages.chain.blocks
        own = [*([] if stage else stages.chain.before), *names[blocks.start : blocks.stop]]
        modules = {name: model.get_submodule(name).named_modules(prefix=name) for name in own}
        self._own = {name: [each for each in inside if not is_of_torch(each[1])] for name, inside in modules.items()}
        """The modules whose outputs this stage makes, each with those of the user's classes in it."""
        self._input = Source(OUTPUT, names[blocks.start - 1]) if stage else None
        self.exit = Source(OUTPUT, names[blocks.stop - 1]) if stage < stages.num_stages - 1 else None
        """The output of the stage's last block; None: the stage is the last."""
        self._elsewhere = {
            each: StandIn.like(like.shape, like.dtype, device, each) for each, like in (elsewhere or {}).items()
        }
        self._known: Known = {}
        """The metadata of the last message that was received."""
        self._sent_metadata: Known = {}
        """The metadata of the last message that was sent."""
        self._shown: Replacements = []
        """Weights, buffers and attributes of other stages as they are in the last forward: where, and what."""
        self._recomputed: Replacements = []
        """The gates that the last forward has gone through within checkpoints, which compute again in backward."""
        self._later = set[Source]()
        """Attributes that this stage's modules have written, and did not in the first batch: those behind raise."""
        self._in_backward = contextlib.ExitStack()

    @property
    def chain(self) -> Chain:
        return self._learned.stages.chain

    def set_metadata(self, known: Known) -> None:
        """Give the metadata to a stage that gets no messages."""
        self._known = known

    @contextlib.contextmanager
    def closed(self, received: Sequence[Tensor], carried: Carried = NOTHING_CARRIED) -> Iterator[None]:
        """Within, a call of the model computes this stage, from what the stage before has sent.

        Unless it is the last stage, the call raises StageEnd with the tensors to send.
        """
        given, calls = self._given(received, carried.received), dict[str, int]()
        self._shown, self._recomputed = self._show(given), []
        described: dict[Source, Sequence[Described]] = {}
        before: dict[str, dict[str, list[Any]]] = {}
        arguments: dict[str, ArgumentStates] = {}
        sent = {
            source: copies(leaves)  # before the model writes into them
            for source, leaves in given.items()
            if any(self.travels(source, self._known[source], carried.sent))
        }
        if not self.stage:
            # Copies, made in forward: between forwards a parameter may be a placeholder.
            named = dict(self._model.named_parameters())
            weights = {each: [named[each.name].clone()] for each in carried.sent if each.kind == WEIGHT}
            sent |= weights
            described |= {each: (describe(weight),) for each, (weight,) in weights.items()}

        def look(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            arguments[name] = argument_states(args, kwargs)

        def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
            self._check_arguments(name, arguments.pop(name, []))
            for source, value in self._values(name, output, calls, before):
                form, leaves = take_apart(value)
                if not self._has_known_form(source, form, carried.sent):
                    continue
                described[source] = tuple(map(describe, leaves))
                if source == self.exit:
                    sent[source] = leaves
                    raise StageEnd(tensors_among(leaves), self._message(sent, described, carried.sent))
                if any(self.travels(source, described[source], carried.sent)):
                    sent[source] = copies(leaves)

        hooks = []
        for name in self._own:
            module = self._model.get_submodule(name)
            # Before the user's hooks: these run on later stages too, where the gate returns what is sent.
            hooks.append(module.register_forward_hook(functools.partial(keep, name), prepend=True))
            hooks.append(module.register_forward_pre_hook(functools.partial(look, name), with_kwargs=True))
        try:
            with replaced(self._gates(given, calls)), self.shown():
                before |= {path: attributes_of(each) for inside in self._own.values() for path, each in inside}
                yield
                self._check_is_last()
        finally:
            self.end_tokens()
            for hook in hooks:
                hook.remove()

    def _check_is_last(self) -> None:
        """Raise TaskError unless this is the stage whose forward returns."""
        if self.exit is not None:
            got = f"a forward that does not call {self.exit.name}, which ends stage {self.stage}"
            problem = Problem(got, "a block that each forward calls", "other stages, or pp = 1")
            raise TaskError(problem, where="the pipeline")

    def _check_arguments(self, name: str, before: ArgumentStates) -> None:
        """Raise TaskError if a module has written into its arguments, and did not in the first batch: what it wrote is
        not there on later stages.
        """
        if name in self._learned.writers or not are_written(before):
            return
        if self._learned.is_complete:
            got = f"{name}, which writes into one of its arguments (a list, a dict, an object or a tensor in place)"
            need = "what the first batch has shown: it did not write there"
            raise TaskError(Problem(got, need, "values that it returns, or attributes"), where="the pipeline")
        self._learned.writers.add(name)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within, weights, buffers and attributes of other stages are those of the last forward, or stand-ins."""
        with replaced(self._shown):
            yield

    # ---- backward: what a checkpoint computes again reads what its first forward read -----------------------------

    def keep_for_backward(self, roots: Iterable[Tensor]) -> None:
        """Keep what is shown, and the attributes of this stage's modules, for the backward that begins with these."""
        attributes = [each for name in self._own for each in self._attributes(name)]
        kept = [*self._shown, *self._recomputed, *(attribute_of(self._model, each) for each in attributes)]

        def show(_: Tensor) -> None:
            self._in_backward.enter_context(replaced(kept))

        for root in roots:
            if kept and root.requires_grad:
                root.register_hook(show)

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around a backward: in it, attributes are as its microbatch has left them."""
        with contextlib.ExitStack() as self._in_backward:
            yield

    # ---- what comes in ------------------------------------------------------------------------------------------

    def _given(self, received: Sequence[Tensor], carried: Collection[Source]) -> dict[Source, list[Any]]:
        """By source of which something has been sent: its leaves."""
        if self._input is None:
            return {}
        *sent, metadata = received
        if metadata.numel():
            self._known = decode(metadata)
        tensors, given = iter([writable(each) for each in sent]), {}
        for source, described in self._known.items():
            travels = self.travels(source, described, {self._input, *carried})
            if any(travels) or source == self._input or source in carried:
                pairs = zip(described, travels, strict=True)
                given[source] = [next(tensors) if sent else self._stand_in(source, each) for each, sent in pairs]
        return given

    def travels(self, source: Source, described: Sequence[Described], carried: Collection[Source | None]) -> list[bool]:
        """Which leaves of a value are sent: the tensors, of one that is carried; of another one those that were none in
        the first batch, as of a mask that some batches do not need."""
        first = self._learned.first.get(source, described)
        was_tensor = [index >= len(first) or first[index][0] == TENSOR for index in range(len(described))]
        is_carried = source in carried
        return [each[0] == TENSOR and (is_carried or not was) for each, was in zip(described, was_tensor, strict=True)]

    def _stand_in(self, source: Source, described: Described) -> Any:
        return stand_in_of(described, self._device, source)

    def _filled(self, source: Source, leaves: Sequence[Any] | None = None) -> Any:
        """A value of an earlier stage, of these leaves; None: of stand-ins."""
        form = WEIGHT_FORM if source.kind == WEIGHT else self._learned.forms.get(source)
        if form is None or (leaves is None and source not in self._known):
            raise StandInUsed([source])
        if leaves is None:
            leaves = [self._stand_in(source, each) for each in self._known[source]]
        return form.build(iter(leaves))

    def _gates(self, given: Mapping[Source, Sequence[Any]], calls: dict[str, int]) -> Replacements:
        """What is another one within: forwards, and the backward hooks around them."""
        own = [self._model.get_submodule(name) for name in self._own]
        gates = [each for module in own for each in hooks_inside(module)]
        for name in self._learned.stages.modules_in_front(self.stage):
            module = self._model.get_submodule(name)
            gates += [(vars(module), "forward", self._gate(name, given, calls)), *without_hooks(module)]
        return gates

    def _gate(self, name: str, given: Mapping[Source, Sequence[Any]], calls: dict[str, int]) -> Callable[..., Any]:
        """What a module of an earlier stage does in place of its forward."""

        def gate(*args: Any, **kwargs: Any) -> Any:
            source = Source(OUTPUT, name, calls.get(name, 0))
            calls[name] = source.call + 1
            give = functools.partial(self._give, name, self._filled(source, given.get(source)))
            if current_checkpoint() is not None:
                module = self._model.get_submodule(name)
                self._recomputed += [(vars(module), "forward", give), *without_hooks(module)]
            return give(*args, **kwargs)

        return gate

    def _give(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name in self._split_tokens.entries:
            hidden = next(each for each in tree_leaves((args, kwargs)) if each.is_floating_point())
            self._split_tokens.region.begin_tokens(hidden)
        return value

    def _show(self, given: Mapping[Source, Sequence[Any]]) -> Replacements:
        shown: Replacements = []
        at_hand = self._learned.needs.get(self.stage, ())
        for source, stand_in in self._elsewhere.items():
            if source.kind == BUFFER and source in at_hand:
                continue
            module, (value,) = self._model.get_submodule(source.module), given.get(source, [stand_in])
            place = own_buffers(module) if source.kind == BUFFER else own_parameters(module)
            is_around = source.name in self.chain.own  # the forward of the module around the chain reads it
            shown.append((vars(module) if is_around else place, source.key, value))
        for source in self._learned.attributes:
            if self._learned.is_in_front(self.stage, source):
                is_known = source in self._known and source in self._learned.forms  # or other ranks' samples wrote it
                value = self._filled(source, given.get(source)) if is_known else UnknownValue(source)
                shown.append((vars(self._model.get_submodule(source.module)), source.key, value))
        for source in self._known:
            if source.kind == ATTRIBUTE and source not in self._learned.attributes:
                shown.append((vars(self._model.get_submodule(source.module)), source.key, UnknownValue(source)))
        return shown

    # ---- what goes out ------------------------------------------------------------------------------------------

    def _values(
        self, name: str, output: Any, calls: dict[str, int], before: Mapping[str, Mapping[str, list[Any]]]
    ) -> Iterator[tuple[Source, Any]]:
        """What a module of this stage keeps and returns. `before`: the attributes before this forward, by module."""
        for path, each in self._own[name]:
            written = written_attributes(each, before[path])
            self._later |= {Source(ATTRIBUTE, f"{path}.{key}") for key in written} - {*self._learned.attributes}
        for source in self._attributes(name):
            yield source, attribute_of(self._model, source)[-1]
        index = calls.get(name, 0)
        calls[name] = index + 1
        yield Source(OUTPUT, name, index), output

    def _attributes(self, name: str) -> list[Source]:
        """Those that a module, or one inside it, has."""
        of_module = [source for source in (*self._learned.attributes, *self._later) if is_of(source, name)]
        return [each for each in of_module if each.key in vars(self._model.get_submodule(each.module))]

    def _has_known_form(self, source: Source, form: Form, carried: Collection[Source]) -> bool:
        """Whether a value has the form that later stages know. Raises TaskError if it has not, and one needs it."""
        known = self._learned.forms.get(source)
        is_known = known is None or known.text == form.text
        if known is not None and not is_known and (source.kind == OUTPUT or source in carried):
            got = f"{source}: {form.text}, and {known.text} in the first batch"
            need = "dicts, lists and tuples of one form in all batches"
            raise TaskError(Problem(got, need, "None in place of what is left out"), where="the pipeline")
        return is_known

    def _message(
        self, sent: Mapping[Source, Sequence[Any]], described: Known, carried: Collection[Source]
    ) -> list[Tensor]:
        """What the next stage is sent."""
        known = {**self._known, **described}
        tensors = [
            sent[source][index] if source in sent else self._stand_in(source, leaves[index])
            for source, leaves in known.items()
            for index, travels in enumerate(self.travels(source, leaves, {self.exit, *carried}))
            if travels
        ]
        if missing := sources_of(tensors):
            raise StandInUsed(missing, place="")
        is_news = known != self._sent_metadata
        self._sent_metadata = known
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return [*tensors, encode(known, self._device) if is_news else empty]

    def end_tokens(self) -> None:
        """A forward or a backward of this stage has ended: the next one may have other tokens."""
        self._split_tokens.region.end_tokens()
