"""The laws of communicators along the axes of a mesh, on real processes."""

import pytest

from fourfold.words.mesh import Axis, Mesh
from tests.communicator_oracle import AXES_SUBSETS, expected_exchange

CASES = "tests.spawned.communicators"
MESHES = [{"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}]


@pytest.mark.parametrize("mesh", MESHES)
def test_along_any_axes_ranks_exchange_with_those_that_differ_on_them_only(world, mesh):
    results = world(4).run(f"{CASES}:exchanges", mesh=mesh, axes_in_order=AXES_SUBSETS)
    for rank, learnt in enumerate(results):
        assert learnt == [expected_exchange(Mesh(**mesh).peers(rank, *axes)) for axes in AXES_SUBSETS]


@pytest.mark.parametrize(("mesh", "axis"), [(MESHES[0], "dp"), (MESHES[0], "pp"), (MESHES[1], "tp")])
def test_teams_make_and_use_their_groups_in_any_order(world, mesh, axis):
    results = world(4).run(f"{CASES}:sums_of_teams", time_limit_seconds=60.0, mesh=mesh, axis=axis)
    for rank, sums in enumerate(results):
        assert {total for _, total in sums} == {float(sum(Mesh(**mesh).peers(rank, axis)))}
    assert sorted(len(sums) for sums in results) == [2, 2, 3, 3]


def test_a_group_is_the_same_whichever_communicator_is_asked_for_it(world):
    results = world(4).run(f"{CASES}:sums_by_two_views", mesh={"pp": 2, "dp": 2}, axis="dp")
    assert results == [[1.0, 201.0]] * 2 + [[5.0, 205.0]] * 2


def test_a_group_made_again_does_not_meet_the_one_before(world):
    assert world(4).run(f"{CASES}:sums_of_groups_made_again") == [[3.0] * 3] * 2 + [[12.0] * 3] * 2


@pytest.mark.parametrize("mesh", MESHES)
def test_teams_of_one_host_have_memory_of_their_own(world, mesh):
    every_axes: list[list[Axis]] = [["pp"], ["dp"], ["tp"], ["dp", "cp"], ["pp", "dp", "tp"]]
    for axes in every_axes:
        results = world(4).run(f"{CASES}:written_in_team_memory", mesh=mesh, axes=axes)
        assert results == [list(Mesh(**mesh).peers(rank, *axes)) for rank in range(4)]


def test_the_world_and_a_rank_alone_need_no_process_group_and_a_team_one(world):
    axes = [["dp", "cp"], ["tp"], ["pp", "tp"], ["cp"], ["cp", "tp"]]
    assert (
        world(4).run(f"{CASES}:num_groups_made", mesh={"dp": 2, "cp": 2}, axes_in_order=axes) == [[0, 0, 0, 1, 1]] * 4
    )


def test_a_group_is_refused_to_a_rank_that_is_not_in_it_when_it_is_used(world):
    refusals = [f"rank {rank} is not in the group [0] (alone)" for rank in (1, 2, 3)]
    assert world(4).run(f"{CASES}:refused_groups") == ["nothing", *refusals]


@pytest.mark.parametrize("zero", [0, 1])
def test_two_data_groups_of_one_host_train_as_two_worlds_would(world, zero):
    (alone, _) = world(2).run(f"{CASES}:trained_in_team", mesh={"dp": 2}, zero=zero)
    assert alone[0] == "shared memory"
    for mesh in ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}):
        assert world(4).run(f"{CASES}:trained_in_team", mesh=mesh, zero=zero) == [alone] * 4
