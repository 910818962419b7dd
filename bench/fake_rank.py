"""Fake rank: one rank of a pipeline on the meta device, which runs the whole list of its place, to the byte.

It is the oracle of `predict_memory`, which knows one block and the ends of a model.

resting  weights, gradients and optimizer states, which a rank holds all the time; here they rest whole
Law: the stages, the gates, the blocks that are computed again and the halves of backwards are those of a step.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.work.chain import StageMap, map_stages
from fourfold.axes.pipeline.work.gates import Carried, Gates, SplitTokens, StageEnd
from fourfold.axes.pipeline.work.knowledge import Knowledge
from fourfold.axes.pipeline.work.recording import Recorder, Recording
from fourfold.axes.pipeline.work.stand_in import OUTPUT, Source, StandInUsed
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.model.model_call import call_model
from fourfold.model.sdpa_interception import intercept_attention
from fourfold.plan.plan import Plan
from fourfold.planner.task_facts.fake_memory import PeakMemory, recompute_of
from fourfold.planner.task_facts.fake_ranks import META
from fourfold.planner.task_facts.fake_step import FakeModel
from fourfold.planner.task_facts.operations import FakeAttention
from fourfold.planner.task_facts.source import TaskFacts
from fourfold.step.initial_model import build_meta_model
from fourfold.torch_kit.deferred_grads import DeferredGrads, PendingGrads, WholeBackward
from fourfold.torch_kit.grad_hooks import GradHooks
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.words.errors import Problem, TaskError
from fourfold.words.program import Action, Verb

WEIGHTS, GRADIENTS, STATES, BATCH = "weights", "gradients", "optimizer states", "batch"


class RankBytes(NamedTuple):
    """What a rank holds at its peak, by kind. See `PeakMemory`."""

    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        """Without the batch, which is on no device before its microbatch is."""
        return sum(size for kind, size in self.by_kind.items() if kind != BATCH)


def rank_bytes(source: TaskFacts, plan: Plan, place: int = 0) -> RankBytes:
    """What a rank at a place of the pipeline axis holds at its peak. Raises PlanError or TaskError."""
    num_samples = -(-source.batch_size // (plan.dp * plan.microbatches))
    stages = map_stages(build_meta_model(source.task), plan.stage_spec)
    states = max(source.update_spec.num_states, default=0)
    rank = FakeRank(source.fake_model(plan, {}), stages, place, num_samples=num_samples, states_per_weight=states)
    return rank.run(plan.compute_lists[place])


class FakeRank:
    """The rank at a place of the pipeline axis. It takes over the fake model, and leaves it changed.

    states_per_weight  of the optimizer
    num_samples        of a microbatch
    """

    def __init__(
        self, fake: FakeModel, stages: StageMap, place: int, *, num_samples: int, states_per_weight: int
    ) -> None:
        self._fake, self._known, self._place = fake, Knowledge(stages), place
        self._states_per_weight = states_per_weight
        self._samples = fake.samples(num_samples)
        self._attention = FakeAttention(fake.plan.context_spec)
        self._recorded = self._record() if stages.num_stages > 1 else Recording()
        fake = fake.with_copies(stages.ties if place == stages.num_places - 1 else {})
        self._copies = fake.copies
        self._weights = [each for name, each in fake.model.named_parameters() if stages.place_of(name) == place]
        trained = [each for each in self._weights if each.requires_grad]
        self._hooks = GradHooks(trained)
        self._sink = _DropGrads(trained)
        self._halves: WholeBackward = DeferredGrads(trained) if fake.plan.divides_backward else WholeBackward()
        self._received, self._outputs = dict[Any, list[Tensor]](), dict[Any, list[Tensor]]()
        self._pending: dict[Any, PendingGrads] = {}

    def run(self, actions: Sequence[Action]) -> RankBytes:
        """Run a list of forwards and backwards."""
        memory = PeakMemory()
        held = self._rest(memory)
        verbs = {
            Verb.FORWARD: self._forward,
            Verb.BACKWARD: self._backward,
            Verb.BACKWARD_INPUT: self._backward_input,
            Verb.BACKWARD_WEIGHT: self._backward_weight,
        }
        with torch.device(META), memory:
            for action in actions:
                verbs[action.verb](action.stage, (action.stage, action.index))
        del held
        return RankBytes(memory.bytes_by_kind)

    def _rest(self, memory: PeakMemory) -> list[Tensor]:
        """What rests on the rank; returns what else than the model must hold it."""
        trained = [each for each in (*self._weights, *self._copies) if each.requires_grad]
        gradients = [torch.empty_like(each) for each in trained]
        own = [each for each in self._weights if each.requires_grad]
        states = [torch.empty_like(each) for each in own for _ in range(self._states_per_weight)]
        if self._fake.plan.precision != "keep":  # states are in float32, and master weights are among them
            states = [torch.empty_like(each, dtype=torch.float32) for each in (*own, *states)]
        memory.track(WEIGHTS, [*self._weights, *self._copies, *self._fake.model.buffers()])
        memory.track(GRADIENTS, gradients)
        memory.track(STATES, states)
        memory.track(BATCH, tree_leaves(list(self._samples)))
        return [*gradients, *states]

    # ---- the model -------------------------------------------------------------------------------------------------

    def _record(self) -> Recording:
        """What modules return for a microbatch."""
        recorder = Recorder(self._fake.model, self._known, set())
        with (
            torch.device(META),
            torch.no_grad(),
            self._fake.intercepted(self._attention),
            recorder.recording() as recording,
        ):
            call_model(self._fake.model, self._samples[0])
        self._end_tokens()
        return recording

    def _gates(self, stage: int) -> Gates:
        laid_out = self._fake.laid_out
        region = laid_out.region or SplitRegion(laid_out.group)
        split_tokens = SplitTokens(laid_out.sequence_parallel.entries, region)
        gates = Gates(self._fake.model, self._known, stage, split_tokens, torch.device(META))
        gates.set_metadata(self._recorded.described)
        return gates

    def _blocks(self, stage: int) -> Sequence[str]:
        if self._known.stages.num_stages == 1:
            return self._fake.blocks
        return [self._known.stages.chain.blocks[index] for index in self._known.stages.blocks[stage]]

    # ---- actions ---------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, key: tuple[int, int]) -> None:
        while True:
            try:
                return self._forward_with_needs(stage, key)
            except StandInUsed as used:
                if (refused := self._known.note_needs(stage, used.sources)) is not None:
                    problem = Problem(f"stage {stage} needs {refused}", "values that earlier stages can send")
                    raise TaskError(problem, where="the pipeline") from None

    def _forward_with_needs(self, stage: int, key: tuple[int, int]) -> None:
        recompute = recompute_of(self._fake, self._fake.plan.recompute, self._blocks(stage))
        received, closed = list[Tensor](), contextlib.nullcontext()
        if self._known.stages.num_stages > 1:
            gates, carried = self._gates(stage), Carried(self._known.received_by(stage))
            received = self._receive(stage, gates, carried)
            closed = gates.closed([*received, torch.empty(0, dtype=torch.uint8)], carried)
        self._received[key] = received
        try:
            with recompute.installed(), self._halves.in_forward(), closed, self._fake.intercepted(self._attention):
                self._outputs[key] = [self._fake.loss_of(*self._samples)]
        except StageEnd as end:
            self._outputs[key] = list(end.message[:-1])

    def _receive(self, stage: int, gates: Gates, carried: Carried) -> list[Tensor]:
        if stage == 0:
            return []
        sources = {Source(OUTPUT, self._known.stages.boundaries()[stage - 1]), *carried.received}
        received = [
            torch.empty_like(leaf)
            for source, described in self._recorded.described.items()
            if source in sources
            for leaf, is_sent in zip(
                self._recorded.leaves[source], gates.travels(source, described, sources), strict=True
            )
            if is_sent
        ]
        return [each.requires_grad_(each.is_floating_point()) for each in received]

    def _differentiate(self, key: tuple[int, int]) -> None:
        outputs = [each for each in self._outputs.pop(key) if each.requires_grad]
        upstream = [torch.empty_like(each) for each in outputs]
        with intercept_attention(self._attention):  # of blocks that are computed again
            torch.autograd.backward(outputs, upstream)
        self._end_tokens()

    def _backward(self, stage: int, key: tuple[int, int]) -> None:
        with self._hooks.calling(self._sink):
            self._differentiate(key)
        self._send_back(key)

    def _backward_input(self, stage: int, key: tuple[int, int]) -> None:
        with self._halves.first_half(self._hooks) as self._pending[key]:
            self._differentiate(key)
        self._send_back(key)

    def _backward_weight(self, stage: int, key: tuple[int, int]) -> None:
        self._halves.second_half(self._pending.pop(key), self._sink)

    def _send_back(self, key: tuple[int, int]) -> None:
        """The gradients of what was received have left."""
        del self._received[key]
        for copy in self._copies:
            copy.grad = None

    def _end_tokens(self) -> None:
        if self._fake.laid_out.region is not None:
            self._fake.laid_out.region.end_tokens()


class _DropGrads:
    """Takes gradients as buckets do, which have copied them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def on_grad(self, param_index: int) -> None:
        self._parameters[param_index].grad = None
