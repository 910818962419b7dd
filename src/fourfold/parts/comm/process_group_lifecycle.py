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

from fourfold.environment.standard_streams import flush_streams, print_stderr
from fourfold.parts.comm import rendezvous_store
from fourfold.words.errors import TrainingError

DESTROY_TIMEOUT_SECONDS = (
    5.0  # for the end of a group: a collective that was given up never ends where all ranks live on
)
GroupKey = tuple[str, tuple[int, ...]]
"""What a group is for, and its ranks."""


class ProcessGroupRegistry:
    """Process groups, each made once."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, Any] = {}
        _registries.add(self)

    def get_or_create(self, purpose: str, ranks: Sequence[int]) -> Callable[[], dist.ProcessGroup | None]:
        """The group, to be asked for at every use. Every rank must make the same groups in one order."""
        key = purpose, tuple(ranks)
        # Others end on all ranks together, and no two processes forget a group at the same moment.
        if not self._groups and dist.get_backend() == "gloo":
            weakref.finalize(self, _orphan, os.getpid(), self._groups).atexit = False
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(ranks))
        return lambda: self._get(key)

    def _get(self, key: GroupKey) -> dist.ProcessGroup | None:
        try:
            return self._groups[key]
        except KeyError:
            raise TrainingError("the ranks have left each other: this process is at its end") from None

    def release_all(self) -> list[Any]:
        """Let go of all."""
        groups = list(self._groups.values())
        self._groups.clear()
        return groups


_registries: "weakref.WeakSet[ProcessGroupRegistry]" = weakref.WeakSet()
_orphaned: list[tuple[int, Any]] = []
"""Groups, and the process that has them: a fork has none of their threads."""
_exit_hooks: set[bool] = set()
_stuck_threads: list[threading.Thread] = []
"""Threads in which groups did not end in END_SECONDS."""


def _orphan(process: int, groups: Mapping[GroupKey, Any]) -> None:
    _orphaned.extend((process, group) for group in groups.values())


def _pop_orphaned() -> list[Any]:
    taken = [_orphaned.pop() for _ in range(len(_orphaned))]  # more may come meanwhile
    return [group for process, group in taken if process == os.getpid()]


def destroy_orphaned() -> None:
    """End the groups of steps that are gone: each of gloo's has three threads, and sockets.

    Not where they are forgotten: Python may do that in any thread, in the middle of anything.
    """
    groups = _pop_orphaned()
    if groups:
        _unregister(groups)
        # They end with the last that has them, which may wait.
        ending = threading.Thread(target=groups.clear, name="fourfold-end", daemon=True)
        ending.start()
        ending.join(DESTROY_TIMEOUT_SECONDS)
        if ending.is_alive():
            _stuck_threads.append(ending)


def _unregister(groups: Sequence[Any]) -> None:
    for group in groups:
        with contextlib.suppress(ValueError):  # It has ended already, with the world it was of.
            dist.destroy_process_group(group)


def release_groups(*, include_world: bool) -> list[Any]:
    """Let go of all groups that were made here, and with `world` of the process group that is there.

    Returns them, for the caller to be the last that has them: then they end, and that may take as long as a collective.
    """
    groups = [group for each in list(_registries) for group in each.release_all()] + _pop_orphaned()
    if include_world and dist.is_available() and dist.is_initialized():
        groups.append(dist.group.WORLD)
        dist.destroy_process_group()
    return groups


def release_groups_at_exit(*, include_world: bool) -> None:
    """Have this process `leave` at its exit, and end with code 1 if that takes more than END_SECONDS.

    The groups end in a thread that is there already: at its exit Python starts none.
    """
    if include_world in _exit_hooks:
        return
    _exit_hooks.add(include_world)
    asked, groups = threading.Event(), []

    def destroy() -> None:
        asked.wait()
        groups.clear()
        rendezvous_store.release_stores()

    ending = threading.Thread(target=destroy, name="fourfold-leave", daemon=True)
    ending.start()

    def at_exit() -> None:
        if not ending.is_alive():  # in a fork
            return
        groups.extend(release_groups(include_world=include_world))
        asked.set()
        ending.join(DESTROY_TIMEOUT_SECONDS)
        if any(thread.is_alive() for thread in (ending, *_stuck_threads)):
            # Later it would come back into an interpreter that is gone, and abort the process.
            told = (
                f"a collective was given up and has not ended in {DESTROY_TIMEOUT_SECONDS:.0f} s: "
                "this process ends without it"
            )
            print_stderr(f"fourfold: {told}")
            flush_streams()
            os._exit(1)

    atexit.register(at_exit)
