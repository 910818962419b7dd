"""TODO."""

from collections.abc import Callable
from typing import Any, NamedTuple

GetFuture = Callable[[], Any]


def noop(future: GetFuture) -> None:
    """For those who do not follow a collective."""


class AsyncResult(NamedTuple):
    """A collective on its way: `land` waits for it and gives what it is about."""

    wait: Callable[[], Any]
    is_done: Callable[[], bool]


def always_done() -> bool:
    """Whether a flight of nothing has landed."""
    return True
