"""Leaving: how the process groups of torch.distributed end that were made here.

groups     made by one user of the ranks; whoever uses one asks for it at every use, and keeps none
forgotten  what nobody has any more: ended when ranks join the next time
Law: no thread of gloo's outlives its process's last line. One that lets go of a tensor while the interpreter is taken
apart aborts the process, after all has gone well.
"""

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from fourfold.parts.comm import meeting
from fourfold.words.errors import TrainingError
from fourfold.words.streams import flush, say

END_SECONDS = 5.0  # for the end of a group: a collective that was given up never ends where all ranks live on
Key = tuple[str, tuple[int, ...]]
"""What a group is for, and its ranks."""


class Groups:
    """Process groups, each made once."""

    def __init__(self) -> None:
        self._groups: dict[Key, Any] = {}
        _made.add(self)

    def make(self, purpose: str, ranks: Sequence[int]) -> Callable[[], dist.ProcessGroup | None]:
        """The group, to be asked for at every use. Every rank must make the same groups in one order."""
        key = purpose, tuple(ranks)
        # Others end on all ranks together, and no two processes forget a group at the same moment.
        if not self._groups and dist.get_backend() == "gloo":
            weakref.finalize(self, _forget, os.getpid(), self._groups).atexit = False
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(ranks))
        return lambda: self._find(key)

    def _find(self, key: Key) -> dist.ProcessGroup | None:
        try:
            return self._groups[key]
        except KeyError:
            raise TrainingError("the ranks have left each other: this process is at its end") from None

    def drop(self) -> list[Any]:
        """Let go of all."""
        groups = list(self._groups.values())
        self._groups.clear()
        return groups


_made: "weakref.WeakSet[Groups]" = weakref.WeakSet()
_forgotten: list[tuple[int, Any]] = []
"""Groups, and the process that has them: a fork has none of their threads."""
_promised: set[bool] = set()
_endings: list[threading.Thread] = []
"""Threads in which groups did not end in END_SECONDS."""


def _forget(process: int, groups: Mapping[Key, Any]) -> None:
    _forgotten.extend((process, group) for group in groups.values())


def _take_forgotten() -> list[Any]:
    taken = [_forgotten.pop() for _ in range(len(_forgotten))]  # more may come meanwhile
    return [group for process, group in taken if process == os.getpid()]


def end_forgotten() -> None:
    """End the groups of steps that are gone: each of gloo's has three threads, and sockets.

    Not where they are forgotten: Python may do that in any thread, in the middle of anything.
    """
    groups = _take_forgotten()
    if groups:
        _unregister(groups)
        # They end with the last that has them, which may wait.
        ending = threading.Thread(target=groups.clear, name="fourfold-end", daemon=True)
        ending.start()
        ending.join(END_SECONDS)
        if ending.is_alive():
            _endings.append(ending)


def _unregister(groups: Sequence[Any]) -> None:
    for group in groups:
        with contextlib.suppress(ValueError):  # It has ended already, with the world it was of.
            dist.destroy_process_group(group)


def leave(*, world: bool) -> list[Any]:
    """Let go of all groups that were made here, and with `world` of the process group that is there.

    Returns them, for the caller to be the last that has them: then they end, and that may take as long as a collective.
    """
    groups = [group for each in list(_made) for group in each.drop()] + _take_forgotten()
    if world and dist.is_available() and dist.is_initialized():
        groups.append(dist.group.WORLD)
        dist.destroy_process_group()
    return groups


def leave_at_exit(*, world: bool) -> None:
    """Have this process `leave` at its exit, and end with code 1 if that takes more than END_SECONDS.

    The groups end in a thread that is there already: at its exit Python starts none.
    """
    if world in _promised:
        return
    _promised.add(world)
    asked, groups = threading.Event(), []

    def end() -> None:
        asked.wait()
        groups.clear()
        meeting.release()

    ending = threading.Thread(target=end, name="fourfold-leave", daemon=True)
    ending.start()

    def act() -> None:
        if not ending.is_alive():  # in a fork
            return
        groups.extend(leave(world=world))
        asked.set()
        ending.join(END_SECONDS)
        if any(thread.is_alive() for thread in (ending, *_endings)):
            # Later it would come back into an interpreter that is gone, and abort the process.
            told = f"a collective was given up and has not ended in {END_SECONDS:.0f} s: this process ends without it"
            say(f"fourfold: {told}")
            flush()
            os._exit(1)

    atexit.register(act)
