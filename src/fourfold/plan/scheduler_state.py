"""Scheduler state: what a checkpoint says of a torch learning-rate scheduler, as JSON values.

tag   the only key of an object that stands for a value that JSON does not have: {"tuple": [1, 2]}
Law: it holds no pickle and no callable: reading it gives numbers, strings, and lists and dicts of these.
"""

from typing import Any

import msgspec

from fourfold.plan.decode import is_too_deep

TAGS = ("float", "tuple", "dict", "items", "counter", "tensor")


class SchedulerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a scheduler at a step.

    name     its class
    state    its state_dict, with tags
    initial  the same before the first step, which shows whether its arguments have changed
    options  by group: the optimizer's options that the scheduler has changed, and the learning rate, with tags
    """

    name: str
    state: dict[str, Any]
    initial: dict[str, Any]
    options: tuple[dict[str, Any], ...]

    @property
    def is_too_deep(self) -> bool:
        """Whether it is nested deeper than anything that was written."""
        return is_too_deep([self.state, self.initial, *self.options])
