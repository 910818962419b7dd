"""Clock offsets: how far each host's clock is ahead of rank 0's."""

import time
from collections.abc import Callable
from typing import Any

from fourfold.parts.comm.communicator import host_id
from fourfold.plan.trace_file import clock_offset_bounds

NUM_CLOCK_READINGS = 8  # rounds in which all ranks read their clocks


def clock_offsets(all_gather: Callable[[Any], list[Any]]) -> list[int]:
    """How far each rank's clock is ahead of rank 0's, in nanoseconds; ranks of one host share a clock. Collective."""
    hosts = all_gather(host_id())
    if len(set(hosts)) == 1:
        return [0] * len(hosts)
    readings = list(zip(*(all_gather(time.monotonic_ns()) for _ in range(NUM_CLOCK_READINGS)), strict=True))
    offsets = []
    for host, column in zip(hosts, readings, strict=True):
        least, most = clock_offset_bounds(list(readings[0]), list(column))
        offsets.append(0 if host == hosts[0] else (least + most) // 2)
    # One offset per host: its first rank's.
    return [offsets[hosts.index(host)] for host in hosts]
