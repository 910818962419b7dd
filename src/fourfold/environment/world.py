"""World: the rank of this process, how many processes there are, and how many cores this one may use.

rank        number among all processes
local_rank  number among the processes of this host
cores       processors this process may use: its CPU affinity, limited by the quota of a container
Law: reading the environment has no effect; `comm` joins the processes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.environment import host_limits, launchers


@dataclass(frozen=True)
class World:
    """One process among `size` processes, `local_size` of them on its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files for all."""
        return self.rank == 0


def from_environment(environ: Mapping[str, str] = os.environ) -> World | None:
    """The world in which a launcher started this process (`environment/launchers.py`); None without a launcher.

    Raises LaunchError if the variables of the launcher are incomplete or contradict each other.
    """
    info = launchers.detect(environ)
    if info is None:
        return None
    return World(rank=info.rank, size=info.size, local_rank=info.local_rank, local_size=info.local_size)


def num_cores() -> int:
    """Processors this process may use, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = host_limits.cpu_quota()
    return max(1, allowed if quota is None else min(allowed, int(quota)))
