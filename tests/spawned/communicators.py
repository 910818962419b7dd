"""What the ranks of a spawned world do with communicators along the axes of a mesh. Results are JSON."""

import gc
from typing import Any

import torch
import torch.distributed as dist

from fourfold.comm import init
from fourfold.comm.communicator import Communicator
from fourfold.words.mesh import Axis, Mesh
from tests import communicator_oracle
from tests.cases import Case, build_step, train_step

KEPT_GROUPS: list[Any] = []


def world_on(mesh: dict[str, int]) -> Communicator:
    return init.init_communicator().on_mesh(Mesh(**mesh))


def exchanges(mesh: dict[str, int], axes_in_order: list[list[Axis]]) -> list[list[Any]]:
    """What this rank learns along each of these axes."""
    world = world_on(mesh)
    return [communicator_oracle.exchange(world.along(*axes)) for axes in axes_in_order]


def sums_of_teams(mesh: dict[str, int], axis: Axis) -> list[tuple[str, float]]:
    """See `sums_in_an_order_of_the_team`. Rank 0 has a process group more than the others: no name may depend on it."""
    if dist.get_rank() == 0:
        KEPT_GROUPS.append(dist.new_group([0], use_local_synchronization=True))
    return communicator_oracle.sums_in_an_order_of_the_team(world_on(mesh), axis)


def sums_by_two_views(mesh: dict[str, int], axis: Axis) -> list[float]:
    return communicator_oracle.sums_by_two_views(world_on(mesh), axis)


def written_in_team_memory(mesh: dict[str, int], axes: list[Axis]) -> list[int]:
    return communicator_oracle.written_in_team_memory(world_on(mesh).along(*axes))


def num_groups_made(mesh: dict[str, int], axes_in_order: list[list[Axis]]) -> list[int]:
    """How many process groups this rank has made after an exchange along each of these axes, one after the other."""

    def num_groups() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    gc.collect()
    world = world_on(mesh)
    before, counts = num_groups(), []
    for axes in axes_in_order:
        world.along(*axes).all_gather_json(None)
        counts.append(num_groups() - before)
    return counts


def sums_of_groups_made_again() -> list[float]:
    """The sums in a group that is made, dropped and made again: each has a name of its own."""
    sums = []
    for _ in range(3):
        world = init.init_communicator()
        team = world.on_mesh(Mesh(pp=2, dp=world.size // 2)).along("dp")
        sums.append(communicator_oracle.exchange(team)[2][0])
        del world, team
        if dist.get_rank() % 2:  # the others drop theirs later
            gc.collect()
    return sums


def refused_groups() -> str:
    """The error of this rank when it uses a group that it is not in; rank 0 is alone in it, and does not wait."""
    group, total = init.init_communicator().get_group([0], "alone"), torch.ones(1)
    try:
        group.all_reduce(total).wait()
    except AssertionError as error:
        return str(error)
    return "nothing"


def trained_in_team(mesh: dict[str, int], zero: int) -> list[Any]:
    """What joins the data ranks of this rank's team, and the losses and weights of their training."""
    case = Case(zero=zero, clip=0.5)
    data_ranks = world_on(mesh).along("dp", "cp")
    step = build_step(case, data_ranks.size, data_ranks)
    trained = train_step(case, step)
    return [step.transport_name, trained.losses, {name: weight.tolist() for name, weight in trained.weights.items()}]
