"""Remembered: methods whose answers are kept on their instance, for the many plans that share what they depend on."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def _all_arguments(_: Any, *args: Hashable) -> Hashable:
    return args


def remembered(key: Callable[..., Hashable] = _all_arguments) -> Callable[[Method], Method]:
    """A method that runs once for each `key` of its arguments, or for all of them; what it raises is not kept."""

    def decorate(method: Method) -> Method:
        place = f"answers of {method.__name__}"

        @functools.wraps(method)
        def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
            own, found = self.__dict__, key(self, *args, **kwargs)
            if place not in own:
                own[place] = {}
            elif found in own[place]:
                return own[place][found]
            own[place][found] = made = method(self, *args, **kwargs)
            return made

        return answer  # type: ignore[return-value]

    return decorate
