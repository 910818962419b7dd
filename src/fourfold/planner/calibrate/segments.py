"""Segments: seconds of the segments of a task, in every way in which plans of these ranks cut samples.

segment  the first end, a block of the chain, the last end; those with one signature are one: their times are means
mark     a moment at which one segment ends and the next one begins: a block is entered or left, or the gradient of
         what it was given is complete
turn     one forward and one backward, on all ranks at once
halves   a backward as zero-bubble schedules divide it, and the forward that prepares it
cold     before a turn, memory is read and written as an update would: a step finds other data in the caches
Law: every way to divide a sample that a plan of this model may have is among the cuts; one that the model does not
allow is left out, with the reason. Every rank takes the same turns, and the seconds of the segments add up to those of
the whole pass. Gradients are taken from autograd as a step takes them, and dropped.

probe      a model and the parts of a step on the mesh of a plan; its programs are never run
shortened  a model with a few blocks of each kind of its chain: the blocks are measured, not the plan
kind       blocks that compute alike: of one class, with weights of the same shapes and the same rules for tp
Law: what a probe computes and sends, a step of the plan computes and sends in the same way.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.work.chain import Chain, find_chain
from fourfold.axes.tensor.rules.styles import matches
from fourfold.comm.communicator import Communicator
from fourfold.feed.data_input import open_data
from fourfold.feed.feed import Feed
from fourfold.model.batch import Microbatch
from fourfold.plan.lowering import Blueprint
from fourfold.plan.plan import Plan
from fourfold.planner.calibrate.timing import Turns, now, of_slowest_rank
from fourfold.planner.predict.calibration import Curve, Cut, SegmentRecord, signature
from fourfold.planner.predict.facts import FactsSource, ModelFacts, SegmentFacts
from fourfold.planner.predict.prices import GroupShape
from fourfold.planner.search.space import divisors
from fourfold.step.argument_checks import StepOptions
from fourfold.step.assembly import Assembly, assemble
from fourfold.step.initial_model import build_meta_model, make_initial_model
from fourfold.step.model_checks import check_plan_on_ranks
from fourfold.step.stage import Stage
from fourfold.torch_kit.deferred_grads import DeferredGrads, WholeBackward
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import PlanError, TaskError
from fourfold.words.task import Task

# ---- Probes: parts of a training that are measured by themselves, made as a step of a plan makes them ---------------

BLOCKS_OF_A_KIND = 3


class Probe(NamedTuple):
    """A model on the mesh of a plan, the parts of its steps, and the ranks."""

    model: nn.Module
    assembly: Assembly
    world: Communicator

    @property
    def stage(self) -> Stage:
        """This rank's, of its place on the pipeline axis."""
        return self.assembly.parts.stage

    @property
    def blueprint(self) -> Blueprint:
        """What lowering has decided."""
        return self.assembly.programs.blueprint

    @property
    def group(self) -> GroupShape:
        """The ranks that sum this rank's gradients."""
        hosts = self.blueprint.group_of(self.world.global_rank).hosts
        return GroupShape(hosts.ranks_per_host, hosts.num_hosts, hosts.shares_memory)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all buckets, as gradient hooks number them."""
        return [parameter for bucket in self.stage.parameters for parameter in bucket]


def make_probe(task: Task, plan: Plan, ranks: Communicator) -> Probe:
    """The parts of a task's step by a plan. Collective. Raises PlanError or TaskError."""
    initial = make_initial_model(task.model, ranks.device, defers=plan.tp > 1 or plan.pp > 1, is_log_rank=False)
    check_plan_on_ranks(initial.model, plan, ranks, clip=task.clip)
    world = ranks.on_mesh(plan.mesh)
    options = StepOptions(clip=task.clip, tensor=task.tensor)
    return Probe(initial.model, assemble(initial, task.loss, task.optimizer, plan, world, options), world)


class Shortened(NamedTuple):
    """A task whose model has some of the blocks of its chain. `kept`: their indices in the whole chain."""

    task: Task
    kept: tuple[int, ...]


def shorten(task: Task, model: nn.Module) -> Shortened:
    """The task with a few blocks of each kind. `model`: the task's, which may be on the meta device."""
    chain = find_chain(model)
    kept = _kept_blocks(model, chain, task.tensor)
    if len(kept) == len(chain.blocks):
        return Shortened(task, kept)
    make, dropped = task.model, [name for index, name in enumerate(chain.blocks) if index not in kept]

    def make_shortened() -> nn.Module:
        made = make()
        for name in reversed(dropped):
            _drop_block(made, name)
        return made

    renamed = {chain.blocks[index]: chain.blocks[place] for place, index in enumerate(kept)}
    rules = _rules_left(model, task.tensor, renamed)
    return Shortened(dataclasses.replace(task, model=make_shortened, tensor=rules), kept)


def _rules_left(model: nn.Module, rules: Mapping[str, str], renamed: Mapping[str, str]) -> dict[str, str]:
    """The rules by the names of modules. `renamed`: by block that is kept, its name among those that are left."""
    left = {}
    for name, _ in model.named_modules():
        rule = next((rule for pattern, rule in rules.items() if matches(pattern, name)), None)
        block = next((each for each in renamed if name.startswith(f"{each}.")), None)
        if rule is not None and block is not None:
            left[renamed[block] + name.removeprefix(block)] = rule
        elif rule is not None and not _is_in_list_of(name, renamed):
            left[name] = rule
    return left


def _is_in_list_of(name: str, blocks: Iterable[str]) -> bool:
    """Whether a module is in the list that has these blocks."""
    container = next(iter(blocks)).rpartition(".")[0]
    return name.startswith(f"{container}.") if container else True


def _kept_blocks(model: nn.Module, chain: Chain, rules: Mapping[str, str]) -> tuple[int, ...]:
    """Of each kind of block, the first few."""
    counts: dict[object, int] = {}
    kept = []
    for index, name in enumerate(chain.blocks):
        kind = _kind(name, model.get_submodule(name), rules)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= BLOCKS_OF_A_KIND:
            kept.append(index)
    return tuple(kept)


def _kind(path: str, block: nn.Module, rules: Mapping[str, str]) -> object:
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    modules = [name for name, _ in block.named_modules() if name]
    split = [(name, rule) for name in modules for pattern, rule in rules.items() if matches(pattern, f"{path}.{name}")]
    return type(block), shapes, tuple(split)


def _drop_block(model: nn.Module, name: str) -> None:
    """Take a block out of the list that has it."""
    path, _, key = name.rpartition(".")
    container: Any = model.get_submodule(path)
    keys: Sequence[str] = list(dict(container.named_children()))
    del container[keys.index(key)]


# ---- in which ways samples are cut -----------------------------------------------------------------------------------


MICROBATCHES = (1, 2, 4)  # the microbatch sizes that are measured: a batch cut into so many


class _MeasuredCut(NamedTuple):
    """A plan that has the cut, without pipeline; and the samples of the microbatches to measure, in order.

    may_have_stages  whether ranks are left for a pipeline: only there are backwards divided
    """

    plan: Plan
    samples: tuple[int, ...]
    may_have_stages: bool


def cuts_of(num_ranks: int, batch_size: int) -> list[_MeasuredCut]:
    """All ways to divide the ranks among dp, cp and tp, with both forms of attention over context ranks."""
    cuts = []
    for tp in divisors(num_ranks):
        for cp in divisors(num_ranks // tp):
            dp = num_ranks // (tp * cp)
            largest = -(-batch_size // dp)
            samples = tuple(sorted({-(-largest // parts) for parts in MICROBATCHES}))
            for ulysses in dict.fromkeys((1, cp)):
                cuts.append(_MeasuredCut(Plan(dp=dp, cp=cp, tp=tp, ulysses=ulysses), samples, dp > 1))
    return sorted(cuts, key=lambda cut: cut.plan.cp * cut.plan.tp)  # those that most plans have come first


# ---- when a segment begins and ends ----------------------------------------------------------------------------------


class SegmentClock:
    """Marks the passes of one model, whose chain has `num_blocks` blocks; it has two segments more."""

    def __init__(self, model: nn.Module) -> None:
        chain = find_chain(model)
        self._blocks = [model.get_submodule(name) for name in chain.blocks]
        self._parameters = {id(p) for p in model.parameters()}
        self._segment_of = {id(p): index for index, block in enumerate(self._blocks, 1) for p in block.parameters()}
        behind = [p for name in chain.behind for p in model.get_submodule(name).parameters()]
        self._segment_of |= {id(p): self.num_segments - 1 for p in behind if id(p) not in self._segment_of}
        self._forward: list[float] = []
        self._backward: dict[int, float] = {}

    @property
    def num_segments(self) -> int:
        return len(self._blocks) + 2

    def segment_of(self, parameter: Tensor) -> int:
        """The segment that has a parameter; what belongs to no block and lies behind none is of the first end."""
        return self._segment_of.get(id(parameter), 0)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Inside, forwards and their backwards are marked."""
        handles = []
        for index, block in enumerate(self._blocks):
            handles.append(block.register_forward_pre_hook(self._entering(index), with_kwargs=True))
        handles.append(self._blocks[-1].register_forward_hook(self._leave) if self._blocks else None)
        try:
            yield
        finally:
            for handle in handles:
                if handle is not None:
                    handle.remove()

    def _entering(self, index: int) -> Any:
        def enter(_: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
            self._forward.append(now())
            self._watch(index, [*tree_leaves(list(arguments)), *tree_leaves(dict(keywords))])

        return enter

    def _leave(self, _: nn.Module, arguments: Any, outputs: Any) -> None:
        self._forward.append(now())
        self._watch(len(self._blocks), list(tree_leaves(outputs)))

    def _watch(self, boundary: int, values: Sequence[Any]) -> None:
        """Mark when the gradient of the first of the values that has one is complete."""
        found = [v for v in values if isinstance(v, Tensor) and v.requires_grad and id(v) not in self._parameters]
        if found:

            def complete(_: Tensor) -> None:
                self._backward.setdefault(boundary, now())

            found[0].register_hook(complete)

    def begin_forward(self) -> None:
        self._forward, self._backward = [now()], {}

    def end_forward(self) -> list[float]:
        """Seconds of the forward by segment."""
        marks = [*self._forward, now()]
        if not self._blocks:  # all of the model is the first end
            marks.append(marks[-1])
        assert len(marks) == self.num_segments + 1, "the model calls each block of its chain once"
        return [stop - start for start, stop in itertools.pairwise(marks)]

    def begin_backward(self) -> None:
        self._backward_start = now()

    def end_backward(self) -> list[float]:
        """Seconds of the backward by segment. A segment whose input has no gradient ends with the backward."""
        stop, marks = now(), [self._backward_start]
        if not self._blocks:
            return [stop - marks[0], 0.0]
        for boundary in range(len(self._blocks), -1, -1):
            marks.append(max(marks[-1], self._backward.get(boundary, stop)))
        marks.append(stop)
        return [after - before for before, after in itertools.pairwise(marks)][::-1]


# ---- the turns of one cut --------------------------------------------------------------------------------------------


COLD_BYTES = 64 * 2**20


Backward = Callable[[Tensor, "_DroppedGrads"], tuple[list[float], list[float]]]
"""The seconds by segment of a whole backward, or of its first half; and those of its second half."""


class SegmentTurns(NamedTuple):
    """Seconds by segment, medians over the turns of this rank. `second_half`: empty if backwards are whole."""

    forward: list[float]
    backward: list[float]
    second_half: list[float]


class _DroppedGrads:
    """Takes gradients and drops them. `taken`: when the last one of each segment was."""

    def __init__(self, parameters: Sequence[Tensor], clock: SegmentClock) -> None:
        self._parameters = parameters
        self._segments = [clock.segment_of(parameter) for parameter in parameters]
        self.seconds = [0.0] * clock.num_segments
        self._last = 0.0

    def begin(self) -> None:
        self.seconds = [0.0] * len(self.seconds)
        self._last = now()

    def on_grad(self, param_index: int) -> None:
        self._parameters[param_index].grad = None
        taken = now()
        self.seconds[self._segments[param_index]] += taken - self._last
        self._last = taken


class SegmentTimer:
    """Measures the segments of one probe."""

    def __init__(self, probe: Probe, turns: Turns) -> None:
        self._probe, self._turns, self._chunk = probe, turns, probe.stage.chunks[0]
        self._clock = SegmentClock(probe.model)
        self._cold = torch.zeros(COLD_BYTES // 4, device=turns.ranks.device)

    def whole(self, batch: Any) -> SegmentTurns:
        """With whole backwards. Collective."""
        return self._run(batch, WholeBackward(), self._whole_backward)

    def halves(self, batch: Any) -> SegmentTurns:
        """With backwards in two halves. Collective."""
        deferred = DeferredGrads(self._probe.parameters)

        def backward(loss: Tensor, sink: _DroppedGrads) -> tuple[list[float], list[float]]:
            self._clock.begin_backward()
            with deferred.first_half(self._probe.stage.grad_hooks) as pending:
                self._chunk.backward([loss], None)
                first = self._clock.end_backward()
            sink.begin()
            deferred.second_half(pending, sink)
            return first, list(sink.seconds)

        return self._run(batch, deferred, backward)

    def _whole_backward(self, loss: Tensor, sink: _DroppedGrads) -> tuple[list[float], list[float]]:
        self._clock.begin_backward()
        with self._probe.stage.grad_hooks.calling(sink):
            self._chunk.backward([loss], None)
        return self._clock.end_backward(), []

    def _run(self, batch: Any, halves: WholeBackward, backward: Backward) -> SegmentTurns:
        sink = _DroppedGrads(self._probe.parameters, self._clock)
        taken: list[tuple[list[float], list[float], list[float]]] = []

        def turn() -> float:
            layout = self._probe.assembly.batches.microbatches(batch, 1, step=len(taken), samples=None)
            with layout as (part,), self._clock.marking():
                self._cold.add_(1.0)
                self._turns.begin()
                forward, loss = self._forward(part, halves)
                taken.append((forward, *backward(loss, sink)))
            return sum(map(sum, taken[-1]))

        timed = taken[-self._turns.take(turn) :]
        return SegmentTurns(*(_medians(each) for each in zip(*timed, strict=True)))

    def _forward(self, part: Microbatch, halves: WholeBackward) -> tuple[list[float], Tensor]:
        self._clock.begin_forward()
        with halves.in_forward():
            output = self._chunk.forward(part, [])
        assert self._chunk.loss is not None
        loss = self._chunk.loss(output, part)
        return self._clock.end_forward(), loss.total / max(1.0, float(loss.count))


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """By segment."""
    return [median(values) for values in zip(*rows, strict=True)]


# ---- all cuts --------------------------------------------------------------------------------------------------------


Say = Callable[[str], None]


class MeasuredSegment(NamedTuple):
    """A segment, and its record: of whole backwards, or of divided ones."""

    facts: SegmentFacts
    record: SegmentRecord


class SegmentMeasurements(NamedTuple):
    """The segments, and the cuts that the model does not allow, with the reason."""

    segments: list[MeasuredSegment]
    left_out: list[str]


def measure_segments(task: Task, source: FactsSource, turns: Turns, say: Say) -> SegmentMeasurements:
    """Collective; the same on every rank. Cuts for which no time is left are left out."""
    short = shorten(task, build_meta_model(task))
    batch = _first_batch(task, source.batch_size)
    segments: list[MeasuredSegment] = []
    left_out: list[str] = []
    for cut in cuts_of(turns.ranks.size, source.batch_size):
        name = _cut_name(cut)
        if segments and turns.is_over():
            left_out.append(f"{name}: no time was left; its segments are priced by their operations")
            continue
        say(f"blocks and ends: {name}")
        try:
            facts = source.facts(cut.plan)
            segments += _measure_cut(short, cut, facts, batch, turns)
        except (PlanError, TaskError) as error:
            left_out.append(f"{name}: {error.problems[0].got if error.problems else error}")
    return SegmentMeasurements(segments, left_out)


def _cut_name(cut: _MeasuredCut) -> str:
    sizes = [f"{axis} {size}" for axis, size in (("tp", cut.plan.tp), ("cp", cut.plan.cp)) if size > 1]
    return " × ".join(sizes + (["ulysses"] if cut.plan.ulysses > 1 else [])) or "whole samples"


def _first_batch(task: Task, batch_size: int) -> Any:
    """The first samples of the training data, as one rank would read them."""
    feed = Feed.single_rank(open_data(task.data(), where="the task's data").train, batch_size=batch_size, seed=0)
    batch = next(iter(feed.repeat()))
    return dict(batch) if isinstance(batch, dict) else tuple(batch)


def _measure_cut(
    short: Shortened, cut: _MeasuredCut, facts: ModelFacts, batch: Any, turns: Turns
) -> Iterator[MeasuredSegment]:
    """The segments of one cut, with whole backwards and with divided ones."""
    ranks = turns.ranks
    timer = SegmentTimer(make_probe(short.task, cut.plan, ranks), turns)
    whole: dict[int, SegmentTurns] = {}
    halves: dict[int, SegmentTurns] = {}
    for samples in cut.samples:
        part = tree_map(batch, lambda tensor, samples=samples: tensor[:samples])
        whole[samples] = SegmentTurns(*of_slowest_rank(list(timer.whole(part)), ranks))
        if cut.may_have_stages:
            halves[samples] = SegmentTurns(*of_slowest_rank(list(timer.halves(part)), ranks))
    measured = [facts.first, *(facts.blocks[index] for index in short.kept), facts.last]
    by_signature: dict[str, list[int]] = {}
    for index, each in enumerate(measured):
        by_signature.setdefault(signature(each), []).append(index)
    for name, indices in by_signature.items():
        for times in filter(None, (whole, halves)):
            forward, backward, second = (_curve(times, field, indices) for field in range(3))
            assert forward is not None
            assert backward is not None
            segment = measured[indices[0]]
            record = SegmentRecord(name, Cut.of(cut.plan), forward, backward, second, segment.collectives)
            yield MeasuredSegment(segment, record)


def _curve(times: dict[int, SegmentTurns], field: int, indices: list[int]) -> Curve | None:
    """By samples: the mean of the segments with these indices; None: no segment has such times."""
    points = []
    for samples, turns in times.items():
        values = turns[field]
        if not values:
            return None
        points.append((float(samples), sum(values[index] for index in indices) / len(indices)))
    return Curve.through(points)
