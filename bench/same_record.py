"""Records the collectives of a process, at torch's lowest level: the methods of ProcessGroup.

call   one method of a ProcessGroup: its kind, the sizes of its tensors, and its integers (peer, tag)
group  a process group; those of the same ranks are numbered in the order in which they are made
Law: the calls of a group are in the order in which this rank made them. There is no order between groups: two threads
may use two groups.

The length of text that ranks exchange (`allgather` of bytes) is not recorded: it names processes and hosts.
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
        self._num_groups: dict[tuple[int, ...], int] = {}
        self.groups: list[dist.ProcessGroup] = []
        for kind in KINDS:
            method = getattr(dist.ProcessGroup, kind, None)
            if method is not None:
                setattr(dist.ProcessGroup, kind, self._recording(kind, method))
        # Both `new_group` and Fourfold call it, and Fourfold on the members of a group only.
        c10d: Any = dist.distributed_c10d
        c10d._new_process_group_helper = self._numbered(c10d._new_process_group_helper)

    def begin(self) -> None:
        """Forget all calls, and all groups except the world."""
        self._calls, self.groups, self._num_groups = {}, [], {}
        self._names = {dist.group.WORLD.group_name: WORLD} if dist.group.WORLD is not None else {}

    def end(self) -> dict[str, list[list[Any]]]:
        """The calls by group, in order."""
        calls, self._calls = self._calls or {}, None
        return dict(sorted(calls.items()))

    def _recording(self, kind: str, method: Any) -> Any:
        @functools.wraps(method)
        def recording(group: Any, *given: Any, **named: Any) -> Any:
            if self._calls is not None:
                call = [kind, *_call_sizes(kind, [*given, *named.values()])]
                with self._lock:
                    self._calls.setdefault(self._names.get(group.group_name, "unknown group"), []).append(call)
            return method(group, *given, **named)

        return recording

    def _numbered(self, make: Any) -> Any:
        @functools.wraps(make)
        def make_group(size: int, index: int | None, ranks: list[int], *given: Any, **named: Any) -> Any:
            group, store = make(size, index, ranks, *given, **named)
            if ranks and isinstance(group, dist.ProcessGroup):  # the world's own is made of no ranks
                number = self._num_groups[tuple(ranks)] = self._num_groups.get(tuple(ranks), 0) + 1
                self._names[group.group_name] = f"group {number:02} of ranks {ranks}"
                self.groups.append(group)
            return group, store

        return make_group


def _call_sizes(kind: str, given: Any) -> list[Any]:
    """Sizes and dtypes of all tensors, and all integers, among the arguments of a method."""
    sizes: list[Any] = []
    for value in given:
        if isinstance(value, Tensor):
            is_text = kind == "allgather" and value.dtype == torch.uint8
            dtype = str(value.dtype).removeprefix("torch.")
            sizes.append(TEXT if is_text else f"{value.numel()} {dtype} {value.numel() * value.element_size()} B")
        elif isinstance(value, list | tuple):
            sizes += _call_sizes(kind, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            sizes.append(value)
    return sizes
