"""Executor: runs one rank's program, action by action.

verb   what an action does, a function of the step and the action: see `verbs.py`
timing when buckets are updated; it may run updates within other actions, which the executor then skips
Law: it never reorders. The program gives the order, and the table of verbs says what an action does.
"""

import time
from collections.abc import Iterable, Mapping

from fourfold.environment.processes import processor_delay_seconds
from fourfold.step.step_state import StepState
from fourfold.step.update_timing import UpdateTiming
from fourfold.step.verbs import EVALUATION, INFERENCE, VerbFunction
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.program import Action, Verb

VERB_NAMES = {verb: verb.name.lower().replace("_", "-") for verb in Verb}

MIN_DELAYED_SECONDS = 2e-4  # of an action after which the kernel is asked for the delay, which takes some microseconds


class Executor:
    """Runs the steps of one rank."""

    def __init__(self, timing: UpdateTiming) -> None:
        self._timing = timing
        self._error: BaseException | None = None
        self.busy_seconds: dict[str, float] = {}
        """By verb name, the time of the actions of the last training step: without waits, and without the time in which
        this thread was ready and others had the processors."""

    def train(self, program: Iterable[Action], step: StepState) -> None:
        """One optimizer update.

        After an error inside a step, ranks may have reduced different buckets: later calls raise TrainingError.
        """
        self._check_usable()
        try:
            self._begin(step)
            self.busy_seconds = _walk(program, step, self._timing.verbs)
            self._end(step)
        except BaseException as error:
            self._error = error
            raise

    def evaluate(self, program: Iterable[Action], step: StepState) -> None:
        """Forwards and measures, without updates. Raises TrainingError after an error inside a step."""
        self._check_usable()
        _walk(program, step, EVALUATION)

    def infer(self, program: Iterable[Action], step: StepState) -> None:
        """Forwards only. Not collective."""
        _walk(program, step, INFERENCE)

    def _check_usable(self) -> None:
        if self._error is not None:
            got = f"a step after one that ended with {type(self._error).__name__}"
            raise TrainingError(Problem(got, "a new TrainStep")) from self._error

    def _begin(self, step: StepState) -> None:
        step.parts.local.sgd.begin_step()
        self._timing.begin_step(step)

    def _end(self, step: StepState) -> None:
        if step.has_called_hooks:
            step.stage.step_hooks.run_post_hooks()
        self._timing.end_step(step)
        if step.bad_reason is None:
            step.parts.loss_scale.update(overflowed=step.overflowed)
        if step.has_pulled:
            step.parts.local.sgd.finish_sync()
        step.stage.weights.edits.refresh_samples()


def _walk(program: Iterable[Action], step: StepState, verbs: Mapping[Verb, VerbFunction]) -> dict[str, float]:
    """Run the actions in their order. Returns `Executor.busy_seconds`."""
    meter, busy_seconds = step.parts.meter, dict[str, float]()
    delay = processor_delay_seconds() - meter.delay_seconds
    for action in program:
        if action in step.done_early:
            continue
        begin, waited = time.perf_counter(), meter.waiting_seconds
        with meter.recorder.action(action):
            verbs[action.verb](step, action)
        spent = time.perf_counter() - begin - (meter.waiting_seconds - waited)
        name = VERB_NAMES[action.verb]
        if spent > MIN_DELAYED_SECONDS:
            before, delay = delay, processor_delay_seconds() - meter.delay_seconds
            spent -= delay - before
        busy_seconds[name] = busy_seconds.get(name, 0.0) + spent
    for sender in step.parts.senders:
        sender.finish()  # waits until all messages are on their way
    return busy_seconds
