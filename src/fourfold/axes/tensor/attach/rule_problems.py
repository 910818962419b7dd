"""Rule problems: what is wrong with a set of tensor rules, told from where a model that is cut differs from the whole.

before  the last layer with a rule whose output is split, in the order of the model's computation
Law: a message names the module, what differs there, and the rule to look at, as a pattern.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from fourfold.axes.tensor.attach.axis import TensorAxis
from fourfold.axes.tensor.attach.split_randomness import Draw
from fourfold.axes.tensor.rules.layers import generalized
from fourfold.axes.tensor.rules.styles import Style
from fourfold.axes.tensor.work.layers import SplitLayer
from fourfold.model.batch_statistics import uses_batch_stats
from fourfold.plan.param_spec import TensorShard
from fourfold.proof.checks import first_line
from fourfold.proof.module_trace import INPUT, OUTPUT, Event, ModuleTrace
from fourfold.words.error_notes import format_names
from fourfold.words.errors import Problem

NEED = "rules by which a model that is cut computes what the whole model does"
TOKENWISE = "what works on each token independently, except in modules that contain column layers"
RATIO_TOLERANCE = 1e-6


class GradMismatch(NamedTuple):
    """A parameter whose gradient is not that of the whole model.

    value, whole_value  the projections of this rank's gradient, and of the same part of the whole model's
    ratio               this rank's gradient is so many times the whole model's; 0: no number of times
    """

    name: str
    is_whole: bool
    value: float
    whole_value: float
    ratio: float


def split_dims(model: nn.Module) -> dict[tuple[str, str], TensorShard]:
    """By module and kind of event: the shard of the weight which splits the last dim of what is got or returned."""
    kinds = {Style.COLUMN: OUTPUT, Style.ROW: INPUT}
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, SplitLayer) and module.split_style in kinds:
            found[name, kinds[module.split_style]] = module.shards["weight"]
    return found


class RuleProblems:
    """Problems of a model that has been cut."""

    def __init__(self, model: nn.Module, axis: TensorAxis) -> None:
        self._model, self._structure, self._size = model, axis.structure, axis.group.size
        self._splits_tokens = axis.splits_tokens

    def failure(self, whole: ModuleTrace, local: ModuleTrace, error: Exception) -> Problem:
        """The model that is cut raises, where the whole one does not."""
        name, text = local.failed_module or "", first_line(error)
        got, full = local.find(name, INPUT), whole.find(name, INPUT)
        before = self._layer_before(local.events)
        if got is None or full is None or not name:
            return Problem(f"{self._named(name)} fails where the model is cut: {text}", NEED, self._look_at(before))
        shapes = f"{list(got.shape)} of {list(full.shape)}"
        if self._style(name) is Style.ROW and got.shape == full.shape:
            need = "the output of column layers, this rank's part of the features"
            attempt = f'"column" for the layer that makes its input, or no rule for "{generalized(name)}"'
            return Problem(f'{self._named(name)} is "row", and its input {list(got.shape)} is whole', need, attempt)
        has_part = got.shape[-1:] != full.shape[-1:] if self._splits_tokens else got.shape != full.shape
        if has_part and not self._style(name):
            is_linear = isinstance(self._model.get_submodule(name), nn.Linear)
            attempt = self._no_rule(before)
            if is_linear:
                attempt = f'"{generalized(name)}" = "row", or {attempt}'
            got_text = f"{self._named(name)} gets split features, {shapes}, and fails: {text}"
            return Problem(got_text, "whole features, or a rule for it", attempt)
        got_text = f"{self._named(name)} fails where the model is cut: {text}"
        return Problem(got_text, NEED, self._look_at(before))

    def output(self, event: Event | None, events: Sequence[Event], ratio: float, outside: Iterable[str]) -> Problem:
        """Its outputs are others. `event`: the first one that is not the whole model's; None: there is none."""
        if used := next(iter(outside), None):
            got = f"{used} is used outside of its layer, where only a part of it is here"
            need = "weights that are split to be used by their own layers only"
            owner = used.rpartition(".")[0]
            return Problem(got, need, f'no rule for "{generalized(owner)}"')
        if event is None:
            before = self._layer_before(events)
            got = "the outputs are not the whole model's, and no module's before them are"
            return Problem(got, NEED, self._look_at(before))
        before = self._layer_before(events[: _position(events, event)])
        times = f", but {_number(ratio)} times them" if ratio else ""
        if event.kind == INPUT and before is not None:
            got = f"what is computed between {before} and {event.name} is not the whole model's{times}"
            return Problem(got, "features that do not mix between the two", self._look_at(before, event.name))
        what = "gets inputs that are" if event.kind == INPUT else "returns outputs that are"
        got = f"{self._named(event.name)} {what} not the whole model's{times}"
        need = "no softmax, norm or sum over features that are split"
        if before is None:
            need = TOKENWISE if self._splits_tokens else NEED
        return Problem(got, need, self._look_at(before, event.name))

    def gradients(self, by_rank: Sequence[Sequence[GradMismatch]]) -> Problem | None:
        """The first parameter that backward reaches whose gradient is another one, on any rank."""
        names = {each.name for found in by_rank for each in found}
        name = next((name for name, _ in reversed(list(self._model.named_parameters())) if name in names), None)
        if name is None:
            return None
        found = [each for mismatches in by_rank for each in mismatches if each.name == name]
        module, more = name.rpartition(".")[0], f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
        total, first = sum(each.value for each in found), found[0]
        scale = max(abs(each.value) for each in found) + abs(first.whole_value)
        is_sum = abs(total - first.whole_value) <= RATIO_TOLERANCE * scale
        if first.is_whole and len(found) == len(by_rank) and is_sum:
            got = f"the gradient of {name} is missing its sum over the {self._size} tensor ranks{more}"
            need = "gradients of whole weights that work on split features to be summed"
            return Problem(got, need, f'"{generalized(module)}" = "{Style.REPLICATED}"')
        if first.ratio:
            got = f"the gradient of {name} is {_number(first.ratio)} times the whole model's{more}"
            is_replicated = self._style(module) is Style.REPLICATED
            attempt = f'no rule that makes {module} "{Style.REPLICATED}"' if is_replicated else self._look_at(module)
            return Problem(got, "a gradient that is summed over the tensor ranks once, where it has addends", attempt)
        got = f"the gradient of {name} is not the whole model's{more}"
        return Problem(got, NEED, self._look_at(module))

    def loss(self, error: str = "") -> Problem:
        """The loss is another one, of the same outputs; or it fails with this error."""
        what = f"fails where the model is cut ({error})" if error else "is not the whole model's"
        got = f"a loss that {what}, though the outputs are the same: it reads weights or features that are split"
        need = "a loss of outputs, targets, and what whole layers return"
        tokens = "sequence_parallel = false if it reads tokens, " if self._splits_tokens else ""
        return Problem(got, need, f"{tokens}no rule for the layers that it reads, or tp = 1")

    def state(self, buffers: Sequence[str]) -> Problem:
        """A forward keeps something else than the whole model's: values of split features, in these buffers."""
        kept = format_names(buffers) if buffers else "something that the next forward reads"
        got = f"forward keeps {kept}, and it is not what the whole model keeps"
        attempt = f"{self._other_plan}, or {self._no_rule(None)}"
        return Problem(got, "state that does not depend on which features or tokens are here", attempt)

    def hook(self, name: str) -> Problem:
        """A gradient hook of a weight that is split does something else with a part of its gradient."""
        got = f"a hook of {name}, whose gradient each of the {self._size} tensor ranks has a part of"
        need = "hooks that do the same with each part, such as scaling"
        attempt = f'clip=… to limit the norm, or no rule for "{generalized(name.rpartition(".")[0])}"'
        return Problem(got, need, attempt)

    def draw(self, draw: Draw) -> Problem:
        """Random numbers for split features or tokens, which would repeat on each tensor rank."""
        split = "features or tokens" if self._splits_tokens else "features"
        got = f"tp = {self._size} and {draw.what} in {self._named(draw.module)}, on {split} that are split"
        need = f"random numbers for whole {split}, or dropout of {split} that are one slice of the whole model's"
        return Problem(got, need, f"dropout = 0 in {self._named(draw.module)}, or {self._other_plan}")

    def statistics(self, whole: ModuleTrace, local: ModuleTrace) -> Problem | None:
        """A batch normalization whose statistics would be of a part of its samples or positions."""
        norms = {name for name, module in self._structure.named_modules() if uses_batch_stats(module)}
        full_shapes = {each[:3]: each.tensor.shape for each in whole.events}
        for event in local.events:
            full, got = full_shapes.get(event[:3]), event.tensor.shape
            # Split channels are right: each has all of its values here.
            if event.kind == INPUT and event.name in norms and full and (got[:1], got[2:]) != (full[:1], full[2:]):
                what = f"{self._named(event.name)} gets {list(got)} of {list(full)}"
                need = "all values of a channel on one tensor rank, for the channel's statistics"
                return Problem(what, need, self._no_rule(self._layer_before(local.events)))
        return None

    # ---- words --------------------------------------------------------------------------------------

    def _named(self, name: str) -> str:
        type_name = type(self._structure.get_submodule(name)).__name__
        return f"{name} ({type_name})" if name else f"the model ({type_name})"

    def _style(self, name: str) -> Style | None:
        """The style by which a module has been split; None: it has no rule."""
        module = self._model.get_submodule(name)
        return module.split_style if isinstance(module, SplitLayer) else None

    def _layer_before(self, events: Sequence[Event]) -> str | None:
        """The last layer with split outputs whose region no row layer has ended yet."""
        before: str | None = None
        for event in events:
            style = self._style(event.name)
            if event.kind == OUTPUT and style in (Style.COLUMN, Style.ROW):
                before = event.name if style is Style.COLUMN else None
        return before

    def _look_at(self, *names: str | None) -> str:
        patterns = " and ".join(f'"{generalized(name)}"' for name in names if name and self._style(name))
        rules = f"other rules for {patterns}, with the counts of what they split"
        if self._splits_tokens:
            return f"{rules}, or {self._other_plan}" if patterns else self._other_plan
        return rules if patterns else self._other_plan

    @property
    def _other_plan(self) -> str:
        """What makes the split go away that may be wrong."""
        return "sequence_parallel = false" if self._splits_tokens else "tp = 1"

    def _no_rule(self, before: str | None) -> str:
        return f'no rule for "{generalized(before)}"' if before else "no rule for the layers before it"


def _position(events: Sequence[Event], event: Event) -> int:
    return next(index for index, each in enumerate(events) if each is event)


def _number(ratio: float) -> str:
    return f"{ratio:.4g}"
