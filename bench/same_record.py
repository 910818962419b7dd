"""What a process asks of torch.distributed, recorded below all of torch's own names for it.

call   one method of a ProcessGroup: its kind, the sizes of its tensors, and its whole numbers (peer, tag)
group  a process group, numbered in the order in which it is made
Law: calls of one group stand in the order in which this rank made them. Groups have no order among each other: two of
them may be used from two threads.

Texts that ranks exchange (`allgather` of bytes) have their length left out. They name processes and hosts.
"""

import functools
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KINDS = [
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
]
TEXT = "text of any length"
WORLD = "world"


class Recorder:
    """Records while `calls` is not None. Made once in a process, before Fourfold is imported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, list[list[Any]]] | None = None
        self._names: dict[str, str] = {}
        self.groups: list[dist.ProcessGroup] = []
        for kind in KINDS:
            method = getattr(dist.ProcessGroup, kind, None)
            if method is not None:
                setattr(dist.ProcessGroup, kind, self._watched(kind, method))
        made = dist.new_group
        for module in (dist, dist.distributed_c10d):
            module.new_group = self._numbered(made)  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Begin anew, with no groups but the world's."""
        self._calls, self.groups = {}, []
        self._names = {dist.group.WORLD.group_name: WORLD} if dist.group.WORLD is not None else {}

    def end(self) -> dict[str, list[list[Any]]]:
        """The calls by group, in order."""
        calls, self._calls = self._calls or {}, None
        return dict(sorted(calls.items()))

    def _watched(self, kind: str, method: Any) -> Any:
        @functools.wraps(method)
        def watched(group: Any, *given: Any, **named: Any) -> Any:
            if self._calls is not None:
                call = [kind, *_told(kind, [*given, *named.values()])]
                with self._lock:
                    self._calls.setdefault(self._names.get(group.group_name, "a group of others"), []).append(call)
            return method(group, *given, **named)

        return watched

    def _numbered(self, made: Any) -> Any:
        @functools.wraps(made)
        def new_group(*given: Any, **named: Any) -> Any:
            group = made(*given, **named)
            ranks = list(given[0] if given else named.get("ranks") or [])
            if isinstance(group, dist.ProcessGroup):
                self._names[group.group_name] = f"group {len(self.groups):02} of ranks {ranks}"
            # Of a group of others, too: groups are numbered alike on every rank.
            self.groups.append(group)
            return group

        return new_group


def _told(kind: str, given: Any) -> list[Any]:
    """Sizes and dtypes of all tensors, and all whole numbers, of what a method is given."""
    told: list[Any] = []
    for value in given:
        if isinstance(value, Tensor):
            is_text = kind == "allgather" and value.dtype == torch.uint8
            dtype = str(value.dtype).removeprefix("torch.")
            told.append(TEXT if is_text else f"{value.numel()} {dtype} {value.numel() * value.element_size()} B")
        elif isinstance(value, list | tuple):
            told += _told(kind, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            told.append(value)
    return told
