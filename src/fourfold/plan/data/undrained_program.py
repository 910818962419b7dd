"""Undrained program: a step of an asynchronous schedule, whose last backwards run in later steps.

undrained  between steps, forwards are left without their backwards: see `plan/pipeline/schedules.py`
Law: the last backward of a batch is followed by its reductions and updates, wherever in a step it stands.
"""

from fourfold.plan.data.step_program import DataStepSpec
from fourfold.words.program import LOSS, Action, Verb


def lower_undrained(step: DataStepSpec) -> tuple[Action, ...]:
    """The program of a step between others. A step after a drain has the same one: of its backwards, those that have no
    forward yet do not run.
    """
    launch_order = step.launch_order or tuple(range(step.num_buckets))
    last = step.microbatches - 1
    end_of_batch = [Action(Verb.REDUCE, step.stage, bucket) for bucket in launch_order]
    end_of_batch += [Action(Verb.UPDATE, step.stage, bucket) for bucket in launch_order]
    actions: list[Action] = []
    waiting: list[Action] = []
    for action in step.undrained:
        if action.verb != Verb.SEND_BACKWARD:
            actions += waiting
            waiting = []
        actions.append(action)
        if action == Action(Verb.FORWARD, step.stage, last):
            actions.append(Action(Verb.MEASURE, step.stage, LOSS))
        if action == Action(Verb.BACKWARD, step.stage, last):
            waiting = end_of_batch
    return (*actions, *waiting)
