"""What communicators along the axes of a mesh must give: on ranks that are threads and on processes."""

import itertools
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from fourfold.comm.communicator import Communicator
from fourfold.comm.shared_regions import open_host_memory
from fourfold.torch_kit import memory
from fourfold.words.mesh import AXES, Axis, Mesh

AXES_SUBSETS: list[tuple[Axis, ...]] = [
    axes for size in range(len(AXES) + 1) for axes in itertools.combinations(AXES, size)
]


def meshes(max_size: int) -> list[Mesh]:
    """Every mesh of up to so many ranks."""
    lengths = range(1, max_size + 1)
    return [
        Mesh(pp, dp, cp, tp)
        for pp in lengths
        for dp in lengths[: max_size // pp]
        for cp in lengths[: max_size // (pp * dp)]
        for tp in lengths[: max_size // (pp * dp * cp)]
    ]


def exchange(comm: Communicator) -> list[Any]:
    """What this rank learns from the collectives of a communicator, and from those of a group of its ranks."""
    rank = comm.global_rank
    gathered = comm.all_gather_json({"rank": rank, "index": comm.rank, "padding": "x" * rank})
    copied, total = torch.full((3,), float(rank)), torch.tensor([float(1 << rank)])
    comm.broadcast(copied, comm.size - 1)
    comm.all_reduce(total)
    results = [[[each["rank"], each["index"]] for each in gathered], copied.tolist(), total.tolist()]
    if comm.size > 1:
        copied.fill_(float(rank))
        group = comm.get_group(range(comm.size), "tests")
        group.all_reduce(total).wait()
        group.broadcast(copied, 0)
        results += [copied.tolist(), total.tolist()]
    return results


def expected_exchange(ranks: Sequence[int]) -> list[Any]:
    """What each of these global ranks learns."""
    total = float(sum(1 << rank for rank in ranks))
    results: list[Any] = [[[rank, index] for index, rank in enumerate(ranks)], [float(ranks[-1])] * 3, [total]]
    return results if len(ranks) == 1 else [*results, [float(ranks[0])] * 3, [total * len(ranks)]]


def sums_in_an_order_of_the_team(world: Communicator, axis: Axis) -> list[tuple[str, float]]:
    """The sums of global ranks in groups of a team along `axis`, by purpose.

    Each team makes its groups in another order than the next, uses them in the reverse of it, and every second team
    makes one group less.
    """
    others: list[Axis] = [each for each in AXES if each != axis]
    team = world.along(axis)
    number = world.along(*others).rank
    purposes = [f"purpose {index}" for index in range(3)]
    purposes = (purposes[number % 3 :] + purposes[: number % 3])[: 3 - number % 2]
    groups = {purpose: team.get_group(range(team.size), purpose) for purpose in purposes}
    sums = []
    for purpose in reversed(purposes):
        total = torch.tensor([float(world.rank)])
        groups[purpose].all_reduce(total).wait()
        sums.append((purpose, total.item()))
    return sorted(sums)


def sums_by_two_views(world: Communicator, axis: Axis) -> list[float]:
    """The sums of two collectives that are under way in one group, which the world and the team have been asked for."""
    team = world.along(axis)
    groups = world.get_group(team.ranks, "views"), team.get_group(range(team.size), "views")
    totals = [torch.tensor([float(world.rank + added)]) for added in (0, 100)]
    works = [group.all_reduce(total) for group, total in zip(groups, totals, strict=True)]
    for work in works:
        work.wait()
    return [total.item() for total in totals]


def written_in_team_memory(team: Communicator) -> list[int]:
    """Each rank writes its global rank to its place in the team's memory; returns what all places hold then."""
    opened, reason = open_host_memory(lambda: memory.create_shared(mmap.PAGESIZE), team, range(team.size))
    assert opened is not None, reason
    mapping = memory.map_shared(opened.take_handle())
    team.all_gather_json(None)  # a barrier
    mapping[team.rank] = team.global_rank
    team.all_gather_json(None)
    return list(mapping[: team.size])
