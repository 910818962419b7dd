"""Which random state each rank gets: the data index decides, not the rank."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.checkpoint_boxes import GlobalTensor
from fourfold.plan.checkpoint_manifest import Manifest, RngState, manifest_problems
from fourfold.plan.rng import generator_seed, rng_state_to_restore
from fourfold.words.mesh import Mesh
from tests.pure.test_checkpoint_manifest import manifest

MESHES = st.builds(Mesh, dp=st.integers(1, 5), sp=st.integers(1, 4), tp=st.integers(1, 2))


def saved_on(mesh: Mesh, *, has_mesh: bool = True) -> Manifest:
    """A checkpoint of this mesh: state `0d` belongs to data index d."""
    states = tuple(RngState(f"{mesh.coordinates(rank)['dp']:02x}") for rank in range(mesh.size))
    made = manifest([GlobalTensor("model.a", "F32", (4, 2))], mesh.size)
    return msgspec.structs.replace(made, random=states, mesh=mesh if has_mesh else None)


def restored(saved: Manifest, mesh: Mesh) -> list[str | None]:
    states = [rng_state_to_restore(saved, mesh, rank) for rank in range(mesh.size)]
    return [None if state is None else state.cpu for state in states]


def by_data_index(mesh: Mesh) -> list[str]:
    return [f"{mesh.coordinates(rank)['dp']:02x}" for rank in range(mesh.size)]


@given(saved=MESHES, mesh=MESHES)
def test_every_rank_restores_the_rng_state_of_its_data_index_if_dp_is_unchanged(saved, mesh):
    assert not list(manifest_problems(saved_on(saved)))
    expected = by_data_index(mesh) if saved.dp == mesh.dp else [None] * mesh.size
    assert restored(saved_on(saved), mesh) == expected


@given(saved=MESHES, mesh=MESHES)
def test_rng_states_saved_without_a_mesh_are_restored_only_if_they_match_the_data_indices(saved, mesh):
    found = restored(saved_on(saved, has_mesh=False), mesh)
    assert found == (by_data_index(mesh) if saved_on(saved).random == saved_on(mesh).random else [None] * mesh.size)


def test_a_manifest_written_before_the_mesh_was_recorded_is_read():
    text = msgspec.json.encode(saved_on(Mesh(dp=2), has_mesh=False)).replace(b',"mesh":null', b"")
    assert b"mesh" not in text
    assert msgspec.json.decode(text, type=Manifest) == saved_on(Mesh(dp=2), has_mesh=False)


def test_the_mesh_of_a_manifest_survives_a_round_trip():
    saved = saved_on(Mesh(dp=2, sp=3))
    assert msgspec.json.decode(msgspec.json.encode(saved), type=Manifest) == saved


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, -1, -(2**63)])
def test_seeds_of_data_indices_and_steps_differ_and_fit_into_64_bits(seed):
    seeds = {generator_seed(seed, index, step=step) for index in range(64) for step in range(0, 64 * 7, 7)}
    assert len(seeds) == 64 * 64
    assert min(seeds) >= 0
    assert max(seeds) < 2**64
