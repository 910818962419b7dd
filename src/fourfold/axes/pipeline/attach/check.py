"""The pipeline axis of a step. Its check: this rank's stages, as in a step, compute what the whole model does.

skeleton   the model with random weights that take nearly no memory (`axis.py`): every rank has all stages of it
recorded   what the modules of the skeleton return and keep, for a few samples (`work/recording.py`)
rehearsal  a stage of the real model with the skeleton's weights, which gets what was recorded in front of it
           (`rehearsal.py`). What it needs of that is found one after the other: each raises StandInUsed
Law: a stage computes with its weights, with what it receives, and with what the model makes of the batch alone. What
else it needs is carried, or the plan is refused.
"""

import contextlib
import functools
import itertools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.attach.axis import PipelineAxis, cut
from fourfold.axes.pipeline.attach.rehearsal import NEED, DividedModel, Rehearsal, buffers_of
from fourfold.axes.pipeline.work.gates import Carried, Gates, SplitTokens
from fourfold.axes.pipeline.work.knowledge import is_of
from fourfold.axes.pipeline.work.recording import Recorder, Recording
from fourfold.axes.pipeline.work.stand_in import BUFFER, WEIGHT, Source
from fourfold.axes.pipeline.work.values import attributes_of, take_apart, without_caches
from fourfold.comm.channel import make_channel
from fourfold.comm.communicator import Communicator
from fourfold.comm.tensor_group import CALL_ROW, CallMismatch, CheckedTensorGroup
from fourfold.model.batch import Microbatch, num_samples, split_microbatches, unpack_batch
from fourfold.model.model_call import call_model, eval_mode
from fourfold.model.objective import Objective
from fourfold.model.weights import Weights
from fourfold.proof.attachment import AxisParts, BatchLayout, Rank, SharedSamples, TensorCalls
from fourfold.proof.checks import Check, Learned, Report, out_of_step_problem, preserve_module, raise_problems
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.torch_kit.torch_private import full_backward_hooks, own_parameters
from fourfold.words.errors import Problem, TaskError

NUM_SAMPLES = 2
WHERE = "the pipeline"


class Pipeline(NamedTuple):
    """The axis, and what a first batch shows of its stages."""

    axis: PipelineAxis
    check: "PipelineCheck"


def attach(rank: Rank) -> AxisParts[Pipeline]:
    """Leave this rank's stage of the model. Collective. Raises TaskError if the model cannot be copied."""
    axis = cut(rank)
    check = PipelineCheck(rank.model, rank.objective, axis, rank.world, rank.split_tokens)
    rank = rank._replace(skeleton=axis.skeleton, whole_shown_to_loss=check.whole_shown_to_loss)
    if not axis.is_cut:
        return AxisParts(rank, Pipeline(axis, check))

    def checks(rank: Rank, weights: Weights) -> Sequence[Check]:
        return [check]

    def lay_out(rank: Rank, layout: BatchLayout, calls: TensorCalls) -> BatchLayout:
        rows = make_channel(
            axis.ranks, "batches", rank.meter, choice=rank.transport, may_cross_hosts=True, first_length=CALL_ROW
        )
        agree = functools.partial(calls.agree_with_stages, rows, axis.ranks)
        return SharedSamples(layout, "pp", axis.ranks, agree, (rank.seed, rank.world.along("dp").rank))

    return AxisParts(rank, Pipeline(axis, check), checks, lay_out, f"stages: {axis.edges.name}")


class PipelineCheck:
    """The check of the pipeline axis, of one rank. `world` lies on the plan's mesh."""

    claim = "each stage computes what the whole model does there"
    phase: str | None = None

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        pipeline: PipelineAxis,
        world: Communicator,
        split_tokens: SplitTokens,
    ) -> None:
        self._world, self._split_tokens, self.known = world, split_tokens, pipeline.known
        stages = pipeline.stages
        own = stages.stages_at(pipeline.place)
        self._divided = DividedModel(model, pipeline.skeleton, objective, stages, own, world.device)
        self._shown_modes, self._finished_modes = set[bool](), set[bool]()
        """In which a batch of this rank, and one of each rank, has been rehearsed: training or not."""

    def make_gates(self, stage: int) -> Gates:
        """The gates of a stage of this rank."""
        elsewhere = self._elsewhere(stage)
        return Gates(
            self._divided.model, self.known, stage, self._split_tokens, self._world.device, elsewhere=elsewhere
        )

    def carried_by(self, stage: int) -> Carried:
        """What a stage receives and sends for itself and for later ones, besides its input and output."""
        return Carried(self.known.received_by(stage), self.known.received_by(stage + 1))

    def is_needed(self, *, training: bool) -> bool:
        """Whether some rank has not had a batch with samples yet. What is learned is not kept: it holds objects.

        In training mode there may be branches that an evaluation before it has not shown.
        """
        return not {self._divided.model.training, True} & self._finished_modes

    def memory_fits(self) -> Sequence[bool]:
        return ()

    def inspect(self, batch: Any, fits: Sequence[bool], *, training: bool) -> Report:
        """Rehearse this rank's stages on a few samples of a batch. Collective among tensor ranks."""
        report: Report = {"problems": [], "out_of_step": False}
        mode, self.known.is_complete = self._divided.model.training, False
        if num_samples(batch) and mode not in self._shown_modes:
            try:
                report["problems"] = self._run_among_tensor_ranks(batch)
            except CallMismatch:
                report["out_of_step"] = True
            except Exception:
                self._forget()
                raise
            if report["problems"] or report["out_of_step"]:
                self._forget()
            else:
                self._shown_modes.add(mode)
        return report | self.known.report(self._divided.own) | {"has_samples": mode in self._shown_modes}

    def _forget(self) -> None:
        self.known.clear()
        self._shown_modes.clear()

    def judge(self, reports: Sequence[Report], *, training: bool) -> Learned | None:
        raise_problems(reports, WHERE)
        if any(each["out_of_step"] for each in reports):
            raise TaskError(out_of_step_problem(), where=WHERE)
        for each in reports:
            self.known.merge(each)
        self.known.is_complete = all(each["has_samples"] for each in reports)
        if self.known.is_complete:
            self._finished_modes.add(self._divided.model.training)
        return None

    def learn(self, learned: Learned, batch: Any) -> None:
        pass

    def whole_shown_to_loss(self) -> contextlib.AbstractContextManager[None]:
        """Within, a loss that reads weights or attributes of the model finds those of the skeleton, if they are new."""
        divided = self._divided
        if divided.skeleton is divided.model:
            return contextlib.nullcontext()
        before = {each: attributes_of(each) for each in divided.skeleton.modules()}
        return divided.objective.calling_loss_within(lambda: divided.shown_whole(before))

    def learn_outputs(self, inputs: Any) -> None:
        """Find in which form the model returns its outputs for these inputs. Collective among tensor ranks."""
        skeleton = self._divided.skeleton
        with preserve_module(skeleton), eval_mode(skeleton), torch.no_grad(), self._divided.computing(skeleton):
            form, _ = take_apart(without_caches(call_model(skeleton, inputs)))
        self.known.outputs[form.text] = form

    # ---- this rank ------------------------------------------------------------------------------------------

    def _run_among_tensor_ranks(self, batch: Any) -> list[Problem]:
        """A rank that fails tells the other tensor ranks at their next collective, so none waits for it."""
        region = self._split_tokens.region
        group = CheckedTensorGroup(region.group, self._world.device)
        has_failed = True
        try:
            with region.with_group(group):
                problems = self._run_samples(batch)
            has_failed = False
            return problems
        finally:
            if group.size > 1:
                with contextlib.suppress(CallMismatch):
                    group.finish(has_failed=has_failed)

    def _run_samples(self, batch: Any) -> list[Problem]:
        model, skeleton = self._divided.model, self._divided.skeleton
        first, other = self._parts(*unpack_batch(batch))
        with self._own_gradients() as trained, preserve_module(skeleton), preserve_module(model):
            recordings = self._record_both((first, other), trained)
            if problems := self._order_problems(recordings[0].calls) or self._checkpoint_problems(recordings[0]):
                return problems
            if self.known.attributes:  # some may have been found in the second one only
                recordings = self._record_both((first, other), trained)
            self.known.first.update(recordings[0].described)
            samples = list(zip((first, other), recordings, strict=True))
            if problems := self._rehearse(samples):
                return problems
            with eval_mode(skeleton), eval_mode(model), torch.no_grad():
                return self._rehearse([(first, self._record(first, trained, {}))])

    def _parts(self, inputs: Any, targets: Any) -> list[Microbatch]:
        """A few samples; and as many of the others, in another order."""

        def last(tensor: Tensor) -> Tensor:
            return tensor[-NUM_SAMPLES:].flip(0)

        both = (inputs, targets)
        few = [tree_map(both, lambda tensor: tensor[:NUM_SAMPLES]), tree_map(both, last)]
        return [split_microbatches(each, 1, self._world.device)[0] for each in few]

    @contextlib.contextmanager
    def _own_gradients(self) -> Iterator[set[nn.Parameter]]:
        """Within, only weights of this rank's stages need gradients: of others, these would take the memory that the
        skeleton does not. Gives all that are trained."""
        divided = self._divided
        trained = {name: p for name, p in divided.skeleton.named_parameters() if p.requires_grad}
        others = [p for name, p in trained.items() if not divided.is_own(name) and name not in divided.stages.chain.own]
        for p in others:
            p.requires_grad_(False)
        try:
            yield set(trained.values())
        finally:
            for p in others:
                p.requires_grad_(True)

    def _record_both(self, parts: Sequence[Microbatch], trained: set[nn.Parameter]) -> list[Recording]:
        """Run the whole model on each part, with the buffers that the forward before has left."""
        recordings: list[Recording] = []
        for part in parts:
            recordings.append(self._record(part, trained, recordings[-1].buffers if recordings else {}))
        return recordings

    def _record(self, part: Microbatch, trained: set[nn.Parameter], buffers: Mapping[str, Tensor]) -> Recording:
        """Run the whole model, and its loss."""
        divided, skeleton = self._divided, self._divided.skeleton
        recorder = Recorder(skeleton, self.known, trained, divided.own)
        computing = divided.computing(skeleton, buffers)
        with computing, recorder.recording() as recording, self.whole_shown_to_loss(), _gradients_refused():
            returned = call_model(skeleton, part.inputs)
            losses = list(tree_leaves(divided.objective.raw_loss(returned, part)))
            recording.buffers = buffers_of(skeleton)
        is_last = divided.stages.num_stages - 1 in divided.own
        recording.losses = losses if is_last else [each.detach() for each in losses]
        self.known.attributes[:] = sorted({*self.known.attributes, *recording.attributes})
        form, leaves = take_apart(without_caches(returned))
        self.known.outputs[form.text] = form
        recording.outputs = [each.detach().clone() for each in leaves if isinstance(each, Tensor)]
        return recording

    def _order_problems(self, calls: list[str]) -> list[Problem]:
        chain = self._divided.stages.chain
        for name, module in self._divided.model.named_modules():
            if name and chain.blocks[0].startswith(f"{name}.") and full_backward_hooks(module):
                got = f"a full backward hook of {name}, whose forward several stages share"
                need = "such hooks of the model itself, and of modules that one stage has"
                return [Problem(got, need, f"hooks of {chain.blocks[0]} and {chain.blocks[-1]}, or pp = 1")]
        called = [name for name in calls if name in chain.blocks]
        if called != list(chain.blocks):
            wrong = next((name for name in chain.blocks if called.count(name) != 1), None)
            got = "blocks in another order" if wrong is None else f"{wrong} called {called.count(wrong)} times"
            return [Problem(f"{got} in one forward", NEED, "pp = 1")]
        first_exit = self._divided.stages.boundaries()[0]
        if late := [name for name in calls[calls.index(first_exit) :] if name in chain.before]:
            got = f"{late[0]}, which has weights and is defined in front of the blocks, called behind {first_exit}"
            attempt = "a model that defines it behind the blocks, or pp = 1"
            return [Problem(got, "modules defined in front of the blocks that are called on the first stage", attempt)]
        return []

    def _checkpoint_problems(self, recording: Recording) -> list[Problem]:
        """A checkpoint is computed again as a whole, so a stage cannot end inside of one."""
        blocks, calls = self._divided.stages.chain.blocks, recording.checkpoints
        for block, following in itertools.pairwise(blocks):
            if block in self._divided.stages.boundaries() and calls[block] and calls[block] is calls[following]:
                got = f"a stage that ends with {block}, which is in one checkpoint with {following}"
                attempt = 'stages that end where checkpoints do, or recompute = "full" in the plan in place of these'
                return [Problem(got, "checkpoints inside of one stage", attempt)]
        return []

    def _rehearse(self, samples: list[tuple[Microbatch, Recording]]) -> list[Problem]:
        """Rehearse this rank's stages."""
        for stage in self._divided.own:
            buffers: Mapping[str, Tensor] = {}
            for part, recording in samples:
                gates = self.make_gates(stage)
                rehearsal = Rehearsal(self._divided, self.known, gates, part, recording, buffers)
                if problem := rehearsal.run():
                    return [problem]
                buffers = rehearsal.buffers
        return []

    def _elsewhere(self, stage: int) -> dict[Source, Tensor]:
        """The parameters of other stages, without the copies of tied ones, and the buffers of earlier ones. Trained
        ones of this rank are among them: a weight has one gradient in one backward."""
        model, stages, found = self._divided.model, self._divided.stages, dict[Source, Tensor]()
        for name, like in self._divided.skeleton.named_parameters(remove_duplicate=False):
            path, _, key = name.rpartition(".")
            is_dropped = own_parameters(model.get_submodule(path)).get(key, like) is None
            is_sent = like.requires_grad or name in stages.chain.own
            if is_dropped or (is_sent and stages.stage_of(name) != stage):
                found[Source(WEIGHT, name)] = like
        return found | self._buffers_in_front(stage)

    def _buffers_in_front(self, stage: int) -> dict[Source, Tensor]:
        """The buffers of earlier stages. Those of this rank are among them until this stage reads them: each is
        written once in one forward."""
        skeleton, in_front = self._divided.skeleton, self._divided.stages.modules_in_front(stage)
        found, shared = dict[Source, Tensor](), set[nn.Module]()
        for name, like in skeleton.named_buffers(remove_duplicate=False):
            source = Source(BUFFER, name)
            if any(is_of(source, module) for module in in_front):
                found[source] = like
            else:
                shared.add(skeleton.get_submodule(source.module))  # as of rotary angles that blocks have in common
        return {source: like for source, like in found.items() if skeleton.get_submodule(source.module) not in shared}


@contextlib.contextmanager
def _gradients_refused() -> Iterator[None]:
    """Within, gradients that a forward or a loss takes through blocks, whose graph is cut, are refused by name."""
    try:
        yield
    except RuntimeError as error:
        if all(frame.f_code is not torch.autograd.grad.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        got = f"torch.autograd.grad of the model's own, which fails through blocks of several stages: {error}"
        raise TaskError(Problem(got, "gradients in forward or loss within one block", "pp = 1"), where=WHERE) from error
