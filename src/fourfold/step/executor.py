"""Executor: runs one rank's program, action by action.

forward, backward   of one microbatch
measure             sum scalars over the ranks: loss and counts, the gradient norm, …
reduce              launch the buckets that hooks have not launched yet
update              wait for a bucket's reduction, and update its weights
gather              start to all-gather a bucket's new weights
push, pull          local SGD: start to sum a bucket's changes; take the new weights from the sum
Law: it never reorders. The program gives the order, and `actions` says what an action does; actions that hooks have
already run during backward are skipped.
"""

import time
from collections.abc import Sequence

from fourfold.parts.comm.meter import CommMeter
from fourfold.step.actions import Actions
from fourfold.step.batch import Microbatch
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import NULL_RECORDER

VERB_NAMES = {verb: verb.name.lower().replace("_", "-") for verb in Verb}


class Executor:
    """A table of verbs and their handlers."""

    def __init__(self, actions: Actions, meter: CommMeter) -> None:
        self._actions, self._meter = actions, meter
        self._handlers = {
            Verb.FORWARD: actions.forward,
            Verb.BACKWARD: actions.backward,
            Verb.MEASURE: actions.measure,
            Verb.REDUCE: actions.reduce,
            Verb.UPDATE: actions.update_in_order,
            Verb.GATHER: actions.gather,
            Verb.PUSH: actions.push,
            Verb.PULL: actions.pull,
        }
        self._error: BaseException | None = None
        self.recorder = NULL_RECORDER
        self.busy_seconds: dict[str, float] = {}
        """By verb name: the time of the actions of the last step, without waits."""

    def run(self, program: Sequence[Action], microbatches: Sequence[Microbatch]) -> None:
        """One optimizer update.

        After an error inside a step, ranks may have reduced different buckets: later calls raise TrainingError.
        """
        if self._error is not None:
            got = f"a step after one that ended with {type(self._error).__name__}"
            raise TrainingError(Problem(got, "a new TrainStep")) from self._error
        try:
            self._actions.begin_step(microbatches)
            self.busy_seconds = {}
            for action in program:
                if action in self._actions.done_early:
                    continue
                begin, waited = time.perf_counter(), self._meter.waiting_seconds
                with self.recorder.action(action):
                    self._handlers[action.verb](action.index)
                spent = time.perf_counter() - begin - (self._meter.waiting_seconds - waited)
                name = VERB_NAMES[action.verb]
                self.busy_seconds[name] = self.busy_seconds.get(name, 0.0) + spent
            self._actions.end_step()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._actions.stop_listening()
