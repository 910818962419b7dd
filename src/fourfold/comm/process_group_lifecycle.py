"""Process group lifecycle: how the process groups that Fourfold makes in torch.distributed begin and end.

registry  a communicator's groups; users ask it for a group at every use, and keep none
name      members of a group meet under it in the world's store: its purpose, its ranks, and how often it was made
orphaned  the groups of a registry that no longer exists
Law: only the members of a group make it, and wait for each other only, whatever groups other ranks have or make. Ranks
that have several groups in common make these in one order.
Law: all groups are destroyed before the interpreter shuts down: orphaned ones at the next join, all others at exit.

A gloo thread that frees a tensor during interpreter shutdown aborts the process, after all has gone well.

torch's `new_group` is collective among all ranks of the world, or with `use_local_synchronization` names a group by the
number of groups that a process has: this differs between ranks, and then members wait for each other forever. The
private names are those that `new_group` itself calls; `tests/simulated/test_process_group_private.py` says what they
must do.
"""

import atexit
import contextlib
import ctypes
import hashlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fourfold.comm import rendezvous_store
from fourfold.environment.standard_streams import flush_streams, print_stderr
from fourfold.words.errors import TrainingError

# ---- named process group -------------------------------------------------------------------------------------------

c10d: Any = distributed_c10d


def make_process_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A process group of these global ranks, with the world's backend and store. Collective among them.

    `name` must be the same on every member, and new in this world.
    """
    world = dist.group.WORLD
    assert world is not None
    config, store = c10d._world.pg_map[world]
    backend, members = c10d.Backend(config), sorted(ranks)
    # With a bound device NCCL would split the world's communicator, and that is collective among all ranks.
    bound_device, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(world.rank()),
            members,
            backend,
            store,
            name,
            timeout=c10d._get_default_timeout(backend),
        )
    finally:
        world.bound_device_id = bound_device
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


# ---- process group lifecycle ---------------------------------------------------------------------------------------


# Destroying a group waits for its collectives, and an abandoned one may never end.
DESTROY_TIMEOUT_SECONDS = 5.0
GroupKey = tuple[str, tuple[int, ...]]
"""A group's purpose and its ranks."""


class ProcessGroupRegistry:
    """The process groups of one communicator, each made once."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, Any] = {}
        _registries.add(self)

    def get_or_create(self, purpose: str, ranks: Sequence[int]) -> Callable[[], dist.ProcessGroup | None]:
        """Returns a function that returns the group, or raises once it is destroyed.

        The first call for a group is collective among `ranks`. A rank that is none of them gets a function that it
        must not call.
        """
        key = purpose, tuple(ranks)
        if dist.get_rank() not in key[1]:
            return lambda: _refuse(key)
        # NCCL groups are destroyed on all ranks together, and registries do not vanish on all ranks at the same time.
        if not self._groups and dist.get_backend() == "gloo":
            weakref.finalize(self, _orphan, os.getpid(), self._groups).atexit = False
        if key not in self._groups:
            self._groups[key] = make_process_group(ranks, _new_name(key))
        return lambda: self._get(key)

    def _get(self, key: GroupKey) -> dist.ProcessGroup | None:
        try:
            return self._groups[key]
        except KeyError:
            raise TrainingError("a process group was used after it was destroyed: this process is ending") from None

    @property
    def groups(self) -> list[Any]:
        """The groups that exist."""
        return list(self._groups.values())

    def abandon(self) -> None:
        """End all groups: ranks that wait in one get an error. Not collective."""
        if self._groups and dist.get_backend() == "gloo":
            _orphan(os.getpid(), self._groups)
            self._groups.clear()
            destroy_orphaned()

    def release_all(self) -> list[Any]:
        """Forget all groups, and return them."""
        groups = self.groups
        self._groups.clear()
        return groups


def _new_name(key: GroupKey) -> str:
    """A name that this world has not had. All members of a group find the same one: they make it equally often."""
    purpose, ranks = key
    num_made = _num_made.setdefault(dist.group.WORLD, Counter())
    num_made[key] += 1
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()
    return f"fourfold {purpose} {digest[:16]} {num_made[key]}"


def _refuse(key: GroupKey) -> NoReturn:
    raise AssertionError(f"rank {dist.get_rank()} is not in the group {list(key[1])} ({key[0]})")


_num_made: "weakref.WeakKeyDictionary[Any, Counter[GroupKey]]" = weakref.WeakKeyDictionary()
"""How often each group was made, by world: each world has a store of its own."""
_registries: "weakref.WeakSet[ProcessGroupRegistry]" = weakref.WeakSet()
_orphaned: list[tuple[int, Any]] = []
"""Groups, and the process that made them: a forked child has none of their threads."""
_exit_hooks: set[bool] = set()
_stuck_threads: list[threading.Thread] = []
"""Threads in which groups did not end within DESTROY_TIMEOUT_SECONDS."""


def _orphan(process: int, groups: Mapping[GroupKey, Any]) -> None:
    _orphaned.extend((process, group) for group in groups.values())


def _pop_orphaned() -> list[Any]:
    popped = [_orphaned.pop() for _ in range(len(_orphaned))]  # more may be appended meanwhile
    return [group for process, group in popped if process == os.getpid()]


def destroy_orphaned() -> None:
    """Destroy orphaned groups: each gloo group has three threads, and sockets.

    Not in the finalizer that orphans them: Python may run that in any thread, in the middle of anything.
    """
    groups = _pop_orphaned()
    if groups:
        _unregister(groups)
        # A group ends when its last reference goes, and that may wait.
        ending = threading.Thread(target=groups.clear, name="fourfold-end", daemon=True)
        ending.start()
        ending.join(DESTROY_TIMEOUT_SECONDS)
        if ending.is_alive():
            _stuck_threads.append(ending)


def _keep_forever() -> None:
    """In a forked child: never end a group. None of its threads are there, and it would wait for them or crash."""
    groups = [group for registry in list(_registries) for group in registry.groups]
    groups += [group for _, group in _orphaned]
    if dist.is_available() and dist.is_initialized():
        groups.append(dist.group.WORLD)
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_forever)


def _unregister(groups: Sequence[Any]) -> None:
    for group in groups:
        with contextlib.suppress(ValueError):  # destroyed already, with its world
            dist.destroy_process_group(group)


def release_groups(*, include_world: bool) -> list[Any]:
    """Unregister all groups that Fourfold made, and with `include_world` torch's default group.

    Returns them, so that the caller holds the last references. They end when it drops these, and that may take as long
    as a collective.
    """
    groups = [group for each in list(_registries) for group in each.release_all()] + _pop_orphaned()
    if include_world and dist.is_available() and dist.is_initialized():
        groups.append(dist.group.WORLD)
        dist.destroy_process_group()
    return groups


def release_groups_at_exit(*, include_world: bool) -> None:
    """Release all groups at this process's exit, which ends with code 1 if that takes over DESTROY_TIMEOUT_SECONDS.

    The groups end in a thread that is started now: at exit Python starts none.
    """
    if include_world in _exit_hooks:
        return
    _exit_hooks.add(include_world)
    is_exiting, groups = threading.Event(), []

    def destroy() -> None:
        is_exiting.wait()
        groups.clear()
        rendezvous_store.release_stores()

    ending = threading.Thread(target=destroy, name="fourfold-leave", daemon=True)
    ending.start()

    def at_exit() -> None:
        if not ending.is_alive():  # a forked child has no such thread
            return
        groups.extend(release_groups(include_world=include_world))
        is_exiting.set()
        ending.join(DESTROY_TIMEOUT_SECONDS)
        if any(thread.is_alive() for thread in (ending, *_stuck_threads)):
            # Later the thread would return into an interpreter that is gone, and abort the process.
            message = (
                f"an abandoned collective has not ended in {DESTROY_TIMEOUT_SECONDS:.0f} s: "
                "this process ends without it"
            )
            print_stderr(f"fourfold: {message}")
            flush_streams()
            os._exit(1)

    atexit.register(at_exit)
