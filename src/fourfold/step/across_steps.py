"""Across steps: an asynchronous schedule, in which the backwards of a batch run in later steps.

in flight  a microbatch whose forward has run and whose backward has not
drain      the backwards of all microbatches in flight, and the updates of their batches
lag        how many batches the first stage begins before it ends one; all ranks report the batch that ended so long ago
Law: a batch's forwards and backwards on a stage use one version of its weights, and each of its updates the sum of all
its gradients; after a drain all stages have updated with every batch.

Nothing here waits for all stages: a stage goes on as soon as its neighbours have sent what it needs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fourfold.axes.pipeline.rules.schedules import batches_in_flight, warm_up
from fourfold.axes.pipeline.rules.spec import PipelineSpec
from fourfold.axes.pipeline.work.weight_versions import WeightVersions
from fourfold.comm.reduce.scalars import ScalarReducer
from fourfold.step.step_programs import StepPrograms
from fourfold.step.step_state import StepParts, StepState
from fourfold.step.update_timing import UPDATE_AFTER, UpdateTiming, begin_gradients, end_stages
from fourfold.step.verbs import VERBS
from fourfold.words.program import LOSS, Action, Verb

BACKWARD_PHASE = (Verb.RECEIVE_BACKWARD, Verb.BACKWARD, Verb.SEND_BACKWARD, Verb.REDUCE, Verb.UPDATE)


@dataclass
class _Batch:
    """A batch on this stage. `number`: from the last drain; `num_updated`: buckets."""

    step: StepState
    number: int
    num_updated: int = 0


class AcrossSteps(UpdateTiming):
    """The steps of an asynchronous schedule. The first one is drained: it learns the launch orders and the nominal
    count.
    """

    def __init__(
        self,
        parts: StepParts,
        programs: StepPrograms,
        versions: WeightVersions,
        channels: Sequence[ScalarReducer],
        spec: PipelineSpec,
        stage: int,
    ) -> None:
        """`channels`: of all ranks, as many as `num_channels` says. `stage`: this rank's."""
        self._parts, self._programs, self._versions, self._channels = parts, programs, versions, channels
        self._num_in_flight = warm_up(spec, stage)
        """Microbatches between steps."""
        self._lag = batches_in_flight(spec)
        """Of the first stage, in batches."""
        self._num_batches = self._num_sums = 0
        self._batches: list[_Batch] = []
        """Since the last drain; those that no rank asks for any more are dropped."""
        self._in_flight: deque[tuple[_Batch, int]] = deque()
        self._current: _Batch | None = None
        """The batch of the last backward; None: that was one of a batch before the last drain."""
        self._is_draining = False
        self._last_ended: StepState | None = None
        super().__init__(UPDATE_AFTER)
        self._across = {**VERBS, Verb.FORWARD: self._forward, **dict.fromkeys(BACKWARD_PHASE, self._run_behind)}

    # ---- a step -----------------------------------------------------------------------------------------

    def begin_step(self, step: StepState) -> None:
        if not self._programs.has_record:
            begin_gradients(step.parts)
            self._last_ended = step
            return
        self.verbs = self._across
        step.parts = step.parts._replace(scalars=self._channels[self._num_sums % len(self._channels)])
        self._batches.append(_Batch(step, self._num_batches))
        self._num_batches += 1
        self._num_sums += 1

    def end_step(self, step: StepState) -> None:
        if not self._programs.has_record:
            end_stages(step.parts)

    def newest_ended(self, step: StepState) -> StepState:
        """The newest batch that has ended on all stages; its own where a run continues and none has ended here yet."""
        wanted = self._num_batches - 1 - self._lag
        found = next((each for each in self._batches if each.number == wanted), None)
        if found is not None:
            self._last_ended = found.step
            self._batches = [each for each in self._batches if each.number >= wanted]
        # No stage has to begin its next step for the totals of this one: they are complete after all forwards.
        self._last_ended = self._last_ended or step
        return self._last_ended

    def _forward(self, step: StepState, action: Action) -> None:
        batch = self._batches[-1]
        with self._versions.using(self._versions.version_of(batch.number)):
            VERBS[Verb.FORWARD](step, action)
        self._in_flight.append((batch, action.index))

    def _run_behind(self, _: StepState, action: Action) -> None:
        """An action of the backward of the oldest microbatch in flight, if the pipeline is filled."""
        if action.verb in (Verb.RECEIVE_BACKWARD, Verb.BACKWARD):
            is_due = self._is_draining or len(self._in_flight) > self._num_in_flight
            self._current = self._in_flight[0][0] if is_due and self._in_flight else None
        if self._current is None:
            return
        run = {Verb.BACKWARD: self._backward, Verb.UPDATE: self._update}.get(action.verb)
        if run is None:
            VERBS[action.verb](self._current.step, action)
        else:
            run(self._current, action)

    def _backward(self, batch: _Batch, action: Action) -> None:
        _, index = self._in_flight.popleft()
        assert index == action.index, f"{action}, while microbatch {index} is the oldest in flight"
        if index == 0:
            begin_gradients(self._parts)
        with self._versions.using(self._versions.version_of(batch.number)):
            VERBS[Verb.BACKWARD](batch.step, action)

    def _update(self, batch: _Batch, action: Action) -> None:
        stage = self._parts.stage
        with self._versions.in_update():
            VERBS[Verb.UPDATE](batch.step, action)
        batch.num_updated += 1
        if batch.num_updated == stage.num_buckets:
            end_stages(self._parts)
            stage.weights.edits.accept_edits()
            oldest = self._in_flight[0][0].number if self._in_flight else batch.number + 1
            self._versions.end_update(self._versions.version_of(oldest))

    # ---- between steps ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Drain the pipeline. Collective."""
        if not self._batches:
            return
        self._meet()
        by_index: dict[int, list[Action]] = {}
        index = 0  # of the microbatch whose backward an action belongs to
        for action in self._programs.of_step(0):
            index = action.index if action.verb in (Verb.RECEIVE_BACKWARD, Verb.BACKWARD) else index
            if action.verb in BACKWARD_PHASE:
                by_index.setdefault(index, []).append(action)
        self._is_draining = True
        recorder = self._parts.meter.recorder
        while self._in_flight:
            batch, index = self._in_flight[0]
            for action in by_index[index]:
                with recorder.action(action):
                    self._run_behind(batch.step, action)
        self._is_draining = False
        for sender in self._parts.edges.senders:
            sender.finish()
        self._last_ended = self._batches[-1].step
        self._batches, self._num_batches = [], 0
        self._versions.restart()

    def _meet(self) -> None:
        """Wait until all ranks drain: those in other steps would seem to have left this call."""
        channel = self._channels[self._num_sums % len(self._channels)]
        self._num_sums += 1
        channel.all_reduce_async(LOSS, torch.zeros(1, dtype=torch.float64))
        channel.wait(LOSS)

    @property
    def has_pending(self) -> bool:
        return bool(self._batches)


def num_channels(spec: PipelineSpec) -> int:
    """How many batches have totals that some rank may still wait for."""
    return batches_in_flight(spec) + 1
