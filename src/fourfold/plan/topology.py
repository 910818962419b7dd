"""Topology: the machines that ranks run on, those of this job or any others.

host  ranks of one host can share memory, unless there is a reason why they cannot
Law: a topology is data; nothing here asks the machine, so hardware that does not exist here can be described.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

NO_SHARED_MEMORY = "the ranks of a host cannot share memory"


@dataclass(frozen=True)
class Topology:
    """The host of every rank, and what the ranks of a host compute on.

    hosts           by rank: the name of its host; names may be anything that tells hosts apart
    device          "cpu" or "cuda"
    unshared_cause  why ranks of one host cannot share memory; empty if they can
    """

    hosts: tuple[str, ...]
    device: str = "cpu"
    unshared_cause: str = ""

    @classmethod
    def regular(cls, *, hosts: int, ranks_per_host: int, device: str = "cpu", has_shared_memory: bool = True) -> Self:
        """Equal hosts with consecutive ranks."""
        names = tuple(f"host {rank // ranks_per_host}" for rank in range(hosts * ranks_per_host))
        return cls(names, device, "" if has_shared_memory else NO_SHARED_MEMORY)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def has_shared_memory(self) -> bool:
        """Whether ranks of one host can share memory."""
        return self.device == "cpu" and not self.unshared_cause

    def restricted_to(self, ranks: Iterable[int]) -> Self:
        """The topology of some of its ranks, renumbered in the order given."""
        return dataclasses.replace(self, hosts=tuple(self.hosts[rank] for rank in ranks))

    def hosts_of(self, ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The ranks by host, hosts in the order of their first rank."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.hosts[rank], []).append(rank)
        return tuple(map(tuple, by_host.values()))


class GroupHosts(NamedTuple):
    """The hosts of the ranks that sum gradients together.

    ranks_by_host   one tuple of ranks per host
    unshared_cause  why the ranks of each host do not meet in shared memory; empty if they do
    """

    ranks_by_host: tuple[tuple[int, ...], ...]
    unshared_cause: str

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of each host meet in shared memory: then only hosts send to each other."""
        return not self.unshared_cause

    @property
    def num_hosts(self) -> int:
        return len(self.ranks_by_host)

    @property
    def ranks_per_host(self) -> int:
        """Of the host with the most ranks; all have as many where memory is shared."""
        return max(map(len, self.ranks_by_host))


def group_hosts(topology: Topology, ranks: Sequence[int], *, transport: str) -> GroupHosts:
    """Where these ranks meet under the plan's `transport`."""
    by_host = topology.hosts_of(ranks)
    sizes = sorted({len(host) for host in by_host})
    causes = {
        "there is one rank": len(ranks) == 1,
        f'transport = "{transport}"': transport not in ("auto", "shared"),
        f"the ranks compute on {topology.device}": topology.device != "cpu",
        topology.unshared_cause: bool(topology.unshared_cause),
        f"{len(by_host)} hosts with {sizes} ranks each": sizes[-1] == 1 or len(sizes) > 1,
    }
    return GroupHosts(by_host, next((cause for cause, applies in causes.items() if applies), ""))


def num_host_shards(num_shards: int, ranks_per_host: int) -> int | None:
    """How many hosts split what `num_shards` ranks split, where hosts share memory; None if that is no whole number.

    A second copy within a host would be of no use: all its ranks share one.
    """
    if ranks_per_host % num_shards == 0:
        return 1
    return num_shards // ranks_per_host if num_shards % ranks_per_host == 0 else None
