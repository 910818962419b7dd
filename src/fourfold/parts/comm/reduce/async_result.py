"""Async result: a collective that has begun, to be waited for."""

from collections.abc import Callable
from typing import Any, NamedTuple

GetFuture = Callable[[], Any]


class AsyncResult(NamedTuple):
    """A collective that has begun: `wait` returns its result, `is_done` says whether `wait` would return at once."""

    wait: Callable[[], Any]
    is_done: Callable[[], bool]


def always_done() -> bool:
    """`is_done` of a collective that sends nothing."""
    return True
