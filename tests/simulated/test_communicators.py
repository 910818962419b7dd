"""The laws of communicators along the axes of a mesh, on ranks that are threads."""

import contextlib
import gc
import mmap
import threading
import weakref

import pytest
import torch

from fourfold.comm import shared_regions
from fourfold.comm.channel import make_channel
from fourfold.comm.communicator import Communicator, _RankProcess, gather_topology, host_id, topology_along
from fourfold.comm.meter import CommMeter
from fourfold.comm.shared_regions import open_host_memory
from fourfold.environment.processes import this_process
from fourfold.environment.world import World
from fourfold.testing import threads
from fourfold.torch_kit import memory
from fourfold.words.errors import DivergenceError, LaunchError, PeerError, PlanError
from fourfold.words.mesh import AXES, Mesh
from tests.communicator_oracle import (
    AXES_SUBSETS,
    exchange,
    expected_exchange,
    meshes,
    sums_by_two_views,
    sums_in_an_order_of_the_team,
    written_in_team_memory,
)


def communicators(mesh: Mesh) -> list[Communicator]:
    """The communicator of each rank of a world that never communicates."""
    cpu = torch.device("cpu")
    worlds = [World(rank=rank, size=mesh.size, local_rank=rank, local_size=mesh.size) for rank in range(mesh.size)]
    return [Communicator(world, cpu).on_mesh(mesh) for world in worlds]


def test_communicators_partition_the_world_on_every_mesh_of_up_to_16_ranks():
    assert len(meshes(16)) == 204
    for mesh in meshes(16):
        worlds = communicators(mesh)
        for axes in AXES_SUBSETS:
            teams = [world.along(*axes) for world in worlds]
            assert tuple(sorted({team.ranks for team in teams})) == mesh.groups(*axes)
            assert [team.ranks[team.rank] for team in teams] == list(range(mesh.size))
            assert all(team.size == len(team.ranks) for team in teams)


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(pp=2, dp=2)])
def test_the_topology_of_some_ranks_follows_from_that_of_the_world(mesh):
    def body(comm):
        world = comm.on_mesh(mesh)
        topology = gather_topology(world)
        for axes in AXES_SUBSETS:
            team = world.along(*axes)
            assert topology_along(world, topology, team) == gather_topology(team)
        return topology.hosts

    assert len(set(threads.run(mesh.size, body, hosts=2)[0])) == 2


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2, 2), Mesh(3, 1, 1, 2), Mesh(dp=2, cp=3), Mesh(tp=5), Mesh(pp=2, dp=4)])
def test_along_any_axes_ranks_exchange_with_those_that_differ_on_them_only(mesh):
    def body(comm):
        world = comm.on_mesh(mesh)
        return [exchange(world.along(*axes)) for axes in AXES_SUBSETS]

    for rank, learnt in enumerate(threads.run(mesh.size, body)):
        assert learnt == [expected_exchange(mesh.peers(rank, *axes)) for axes in AXES_SUBSETS]


@pytest.mark.parametrize("axis", AXES)
def test_teams_make_and_use_their_groups_in_any_order(axis):
    mesh = Mesh(2, 2, 2, 2)
    results = threads.run(mesh.size, lambda comm: sums_in_an_order_of_the_team(comm.on_mesh(mesh), axis))
    for rank, sums in enumerate(results):
        assert {total for _, total in sums} == {float(sum(mesh.peers(rank, axis)))}
        assert len(sums) == 3 - mesh.groups(axis).index(mesh.peers(rank, axis)) % 2


def test_a_team_does_not_wait_for_a_rank_of_another():
    has_exchanged = threading.Event()

    def body(comm):
        team = comm.on_mesh(Mesh(pp=2, dp=2)).along("dp")
        if comm.rank == 3:
            assert has_exchanged.wait(60.0)
        learnt = exchange(team)
        if comm.rank == 0:
            has_exchanged.set()
        return learnt

    assert threads.run(4, body) == [expected_exchange(ranks) for ranks in ((0, 1), (0, 1), (2, 3), (2, 3))]


def test_a_failed_rank_ends_the_waits_of_all_teams_then_and_later():
    ended = threading.Semaphore(0)

    def body(comm):
        world = comm.on_mesh(Mesh(pp=2, dp=2))
        if comm.rank == 3:
            raise ValueError("rank 3 failed")
        for team in (world.along("dp"), world, world.along("pp")):
            with contextlib.suppress(threading.BrokenBarrierError):
                exchange(team)
        ended.release()

    with pytest.raises(ValueError, match="rank 3 failed"):
        threads.run(4, body)
    assert all(ended.acquire(timeout=20.0) for _ in range(3))


def test_a_group_is_the_same_whichever_communicator_is_asked_for_it():
    results = threads.run(4, lambda comm: sums_by_two_views(comm.on_mesh(Mesh(pp=2, dp=2)), "dp"))
    assert results == [[1.0, 201.0]] * 2 + [[5.0, 205.0]] * 2


@pytest.mark.parametrize("hosts", [1, 2])
def test_teams_have_the_hosts_of_their_ranks(hosts):
    mesh = Mesh(pp=2, dp=2)

    def body(comm):
        world = comm.on_mesh(mesh)
        return [len(set(world.along(axis).all_gather_json(world.along(axis).host))) for axis in ("pp", "dp")]

    assert threads.run(4, body, hosts=hosts) == [[hosts, 1]] * 4


@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp=2), Mesh(dp=2, tp=2), Mesh(dp=2, cp=2, tp=2)])
def test_teams_of_one_host_have_memory_of_their_own(mesh):
    def body(comm):
        world = comm.on_mesh(mesh)
        return [written_in_team_memory(world.along(*axes)) for axes in AXES_SUBSETS]

    for rank, places in enumerate(threads.run(mesh.size, body)):
        assert places == [list(mesh.peers(rank, *axes)) for axes in AXES_SUBSETS]


def test_the_same_axes_give_the_same_communicator_and_all_ranks_the_world():
    (world, *_) = communicators(Mesh(dp=2, cp=2))
    assert world.on_mesh(Mesh(dp=2, cp=2)) is world
    assert world.along("dp", "cp") is world.along("pp", "dp", "cp", "tp") is world
    assert world.along("cp") is world.along("cp", "tp")
    assert world.along("dp") is not world.along("cp")
    assert world.along("dp").along("dp", "tp") is world.along("dp")
    assert world.along("dp").along("cp").ranks == (0,)


def test_the_process_groups_of_a_communicator_end_with_its_last_name_and_not_with_a_garbage_collection():
    world = communicators(Mesh(dp=2, cp=2))[0]
    team = world.along("dp").along("dp", "tp").along("pp")
    world.along("cp")
    registry = weakref.ref(world._process_groups)
    gc.disable()
    try:
        del world
        assert registry() is team._process_groups
        del team
        assert registry() is None
    finally:
        gc.enable()


def test_a_communicator_without_a_mesh_or_on_one_of_another_size_is_refused():
    comm = Communicator(World(rank=0, size=4, local_rank=0, local_size=4), torch.device("cpu"))
    with pytest.raises(AssertionError, match="on_mesh"):
        comm.along("dp")
    with pytest.raises(AssertionError, match="4 ranks on a mesh of 2"):
        comm.on_mesh(Mesh(dp=2))


def test_a_team_counts_its_hosts_and_names_the_global_rank_of_a_dead_peer():
    world = communicators(Mesh(pp=2, dp=2))[2]
    alive = _RankProcess(host_id(), "here", *this_process())
    dead = alive._replace(hostname="there", start_ticks=alive.start_ticks - 1)
    world._processes += [alive._replace(host="another"), alive, alive, dead]
    assert [world.num_hosts, world.along("dp").num_hosts, world.along("pp").num_hosts] == [2, 1, 2]
    team = world.along("dp")
    assert [team.is_peer_dead(index) for index in range(2)] == [False, True]
    with pytest.raises(PeerError, match=r"^rank 3 \(host there\) died while rank 2 waited for it"):
        team.check_peers()
    with pytest.raises(PeerError, match=r"^rank 3 \(host there\) died while rank 2 waited"), team.report_dead_peers():
        raise RuntimeError("Connection closed by peer")
    assert not world.along("pp").is_peer_dead(0)  # of another host
    world.along("pp").check_peers()


def test_rings_of_teams_exchange_within_the_team_and_their_errors_name_global_ranks():
    def body(comm):
        team = comm.on_mesh(Mesh(dp=2, cp=2)).along("cp")
        ring = make_channel(team, "ring", CommMeter(), choice="shared")
        blocks = {owner: block.tolist() for owner, block in ring.iterate_blocks([torch.full((1,), float(comm.rank))])}
        assert blocks == {index: [float(rank)] for index, rank in enumerate(team.ranks)}
        ring.all_gather([torch.zeros(1)])
        here, there = comm.rank, team.ranks[1 - team.rank]
        with pytest.raises(DivergenceError, match=rf"rank {there} has \d+ bytes, rank {here} \d+"):
            ring.all_gather([torch.zeros(1 + team.rank)])

    threads.run(4, body)


def test_a_team_on_several_hosts_has_no_shared_memory_and_its_ranks_are_named():
    def body(comm):
        team = comm.on_mesh(Mesh(cp=2, tp=2)).along("cp")
        with pytest.raises(PlanError, match=rf"ranks \[{team.ranks[0]}, {team.ranks[1]}\] are on several hosts"):
            make_channel(team, "ring", CommMeter(), choice="shared")
        neighbours = comm.on_mesh(Mesh(cp=2, tp=2)).along("tp")
        assert make_channel(neighbours, "ring", CommMeter(), choice="shared").name == "shared memory"

    threads.run(4, body, hosts=2)


def test_ranks_that_cannot_connect_are_named_by_their_global_ranks_and_their_memory_is_freed(monkeypatch):
    def fail(*args):
        raise OSError("no descriptor came")

    monkeypatch.setattr(shared_regions, "_exchange_handle", fail)
    unmapped = dict(memory._unmapped)

    def body(comm):
        team = comm.on_mesh(Mesh(pp=2, dp=2)).along("dp")
        need = rf"ranks \[{team.ranks[0]}, {team.ranks[1]}\] could not connect to each other \(no descriptor came\)"
        with pytest.raises(LaunchError, match=need):
            open_host_memory(lambda: memory.create_shared(mmap.PAGESIZE), team, range(2))

    threads.run(4, body)
    assert memory._unmapped == unmapped


def test_a_group_is_refused_to_a_rank_that_is_not_in_it_when_it_is_used():
    def body(comm):
        team = comm.on_mesh(Mesh(pp=2, dp=2)).along("dp")
        group, total = team.get_group([1], "tests"), torch.ones(1)
        if team.rank == 0:
            with pytest.raises(AssertionError, match=f"rank {comm.rank} is not in the group"):
                group.all_reduce(total)
        else:
            group.all_reduce(total).wait()

    threads.run(4, body)
