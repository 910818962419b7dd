"""Leaving: how the process groups of torch.distributed end that were made here.

groups     made by one user of the ranks; whoever uses one asks for it at every use, and keeps none
forgotten  what nobody has any more: ended when ranks join the next time
Law: no thread of gloo's outlives its process's last line. One that lets go of a tensor while the interpreter is taken
apart aborts the process, after all has gone well.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

END_SECONDS = 5.0  # for the end of a group: a collective that was given up never ends where all ranks live on
Key = tuple[str, tuple[int, ...]]
"""What a group is for, and its ranks."""


class Groups:
    """Process groups, each made once. `ends`: whether they may end on one rank before they do on the others."""

    def __init__(self, *, ends: bool) -> None:
        self._groups: dict[Key, Any] = {}
        _made.add(self)
        if ends:
            weakref.finalize(self, _forget, self._groups).atexit = False

    def make(self, purpose: str, ranks: Sequence[int]) -> Callable[[], dist.ProcessGroup | None]:
        """The group, to be asked for at every use. Every rank must make the same groups in one order."""
        key = purpose, tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(ranks))
        return lambda: self._groups[key]

    def drop(self) -> None:
        """Let go of all."""
        self._groups.clear()


_made: "weakref.WeakSet[Groups]" = weakref.WeakSet()
_forgotten: list[Any] = []
_PROCESS = os.getpid()


def _forget(groups: Mapping[Key, Any]) -> None:
    _forgotten.extend(groups.values())


def end_forgotten() -> None:
    """End the groups of steps that are gone: each of gloo's has three threads, and sockets.

    Not where they are forgotten: Python may do that in any thread, in the middle of anything.
    """
    if not _forgotten:
        return

    def end() -> None:
        while _forgotten:
            with contextlib.suppress(ValueError):  # It has ended already, with the world it was of.
                dist.destroy_process_group(_forgotten.pop())

    ending = threading.Thread(target=end, name="fourfold-end", daemon=True)
    ending.start()
    ending.join(END_SECONDS)


def leave() -> None:
    """Leave the process group that is there, and end all groups made of it.

    In a fork it does nothing: the threads that would have to end are its parent's.
    """
    if os.getpid() != _PROCESS:
        return
    for groups in list(_made):
        groups.drop()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def leave_within(seconds: float) -> Callable[[], None]:
    """The same as `leave`, which waits for so long only: gloo ends a group when its last collective has.

    In a thread that is there already: at its exit Python starts none.
    """
    asked = threading.Event()

    def body() -> None:
        asked.wait()
        leave()

    leaving = threading.Thread(target=body, name="fourfold-leave", daemon=True)
    leaving.start()

    def ask() -> None:
        asked.set()
        leaving.join(seconds)

    return ask
