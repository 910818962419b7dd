"""World: which process am I, how many are we, and what is this process's part of the machine.

rank        place among all processes, global
local_rank  place among the processes of this host
cores       processors this process may use: its affinity, narrowed by a container's quota
Law: reading the environment has no effect; joining a world is done in `parts/comm.py`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.environment import cgroup, launchers


@dataclass(frozen=True)
class World:
    """One process's place among `size` processes, `local_size` of them on its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def from_environment(environ: Mapping[str, str] = os.environ) -> World | None:
    """The world a launcher has put this process in (`environment/launchers.py`), or None where there is no launcher.

    Raises LaunchError where a launcher's variables are incomplete or contradict each other.
    """
    seat = launchers.detect(environ)
    if seat is None:
        return None
    return World(rank=seat.rank, size=seat.size, local_rank=seat.local_rank, local_size=seat.local_size)


def num_cores() -> int:
    """Processors this process may use, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    return max(1, allowed if quota is None else min(allowed, int(quota)))
