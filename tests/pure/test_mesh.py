"""Laws of the mesh."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.words.mesh import AXES, Mesh

MESHES = st.builds(Mesh, **{axis: st.integers(1, 4) for axis in AXES})


@given(mesh=MESHES, axes=st.sets(st.sampled_from(AXES)))
def test_groups_of_any_axes_partition_the_world(mesh, axes):
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert all(mesh.peers(rank, *axes) == group for rank in group)


@given(mesh=MESHES)
def test_ranks_and_coordinates_are_inverse(mesh):
    assert [mesh.rank_at(mesh.coordinates(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@given(mesh=MESHES, axis=st.sampled_from(AXES))
def test_a_full_turn_around_a_ring_ends_at_the_start(mesh, axis):
    for rank in range(mesh.size):
        current = rank
        for _ in range(mesh.axis_size(axis)):
            current = mesh.peer(current, axis, 1)
        assert current == rank
        assert mesh.peer(mesh.peer(rank, axis, -1), axis, 1) == rank


def test_tensor_peers_are_adjacent_ranks_and_pipeline_peers_distant_ones():
    mesh = Mesh(pp=2, dp=2, cp=2, tp=2)
    assert mesh.peers(5, "tp") == (4, 5)
    assert mesh.peers(5, "pp") == (5, 13)
    assert mesh.peers(0, "dp", "cp") == (0, 2, 4, 6)


def test_a_rank_outside_the_mesh_is_refused():
    with pytest.raises(IndexError, match="rank 4 is outside a mesh of 4"):
        Mesh(dp=4).coordinates(4)
