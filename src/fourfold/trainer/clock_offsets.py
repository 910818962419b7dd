"""Clock offsets between hosts."""

import time
from collections.abc import Callable
from typing import Any

from fourfold.parts.comm.communicator import host_id
from fourfold.plan.trace_file import clock_offset_bounds

NUM_CLOCK_READINGS = 8  # of reading all clocks, to tell how far they are apart


def clock_offsets(exchange: Callable[[Any], list[Any]]) -> list[int]:
    """How far each rank's clock is ahead of rank 0's, in nanoseconds; ranks of one host have one clock. Collective."""
    hosts = exchange(host_id())
    if len(set(hosts)) == 1:
        return [0] * len(hosts)
    columns = list(zip(*(exchange(time.monotonic_ns()) for _ in range(NUM_CLOCK_READINGS)), strict=True))
    found = []
    for host, column in zip(hosts, columns, strict=True):
        least, most = clock_offset_bounds(list(columns[0]), list(column))
        found.append(0 if host == hosts[0] else (least + most) // 2)
    # One figure per host: its first rank's.
    return [found[hosts.index(host)] for host in hosts]
