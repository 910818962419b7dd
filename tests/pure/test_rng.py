"""Which random state each rank gets: the data index and the stage decide, not the rank."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.checkpoint_manifest import Manifest, Place, RngState, manifest_problems
from fourfold.plan.rng import generator_seed, microbatch_seed, random_place, rng_state_to_restore, segment_seed
from fourfold.words.mesh import Mesh
from tests.pure.test_checkpoint_manifest import manifest

MESHES = st.builds(Mesh, pp=st.integers(1, 2), dp=st.integers(1, 5), cp=st.integers(1, 4), tp=st.integers(1, 2))


def state_of(place: Place) -> RngState:
    return RngState(f"{place.pp}{place.dp:x}", place=place)


def saved_on(mesh: Mesh) -> Manifest:
    """A checkpoint of this mesh: state `pd` belongs to stage p and data index d."""
    places = sorted({random_place(mesh, rank) for rank in range(mesh.size)})
    made = manifest([("F32", (4, 2))], mesh)
    return msgspec.structs.replace(made, random=tuple(map(state_of, places)), mesh=mesh)


def restored(saved: Manifest, mesh: Mesh) -> list[str | None]:
    states = [rng_state_to_restore(saved, mesh, rank) for rank in range(mesh.size)]
    return [None if state is None else state.cpu for state in states]


def by_place(mesh: Mesh) -> list[str]:
    return [state_of(random_place(mesh, rank)).cpu for rank in range(mesh.size)]


@given(saved=MESHES, mesh=MESHES)
def test_every_rank_restores_the_rng_state_of_its_place_if_the_places_are_unchanged(saved, mesh):
    assert not list(manifest_problems(saved_on(saved)))
    is_unchanged = (saved.dp, saved.pp) == (mesh.dp, mesh.pp)
    assert restored(saved_on(saved), mesh) == (by_place(mesh) if is_unchanged else [None] * mesh.size)


@given(mesh=MESHES)
def test_ranks_that_differ_on_sp_and_tp_alone_are_at_one_random_place(mesh):
    for group in mesh.groups("cp", "tp"):
        assert len({random_place(mesh, rank) for rank in group}) == 1
    assert len({random_place(mesh, rank) for rank in range(mesh.size)}) == mesh.dp * mesh.pp


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, -1, -(2**63)])
def test_seeds_of_places_and_steps_differ_and_fit_into_64_bits(seed):
    seeds = {
        generator_seed(seed, index, stage=stage, step=step)
        for index in range(64)
        for stage in range(4)
        for step in range(0, 64 * 7, 7)
    }
    assert len(seeds) == 64 * 4 * 64
    assert min(seeds) >= 0
    assert max(seeds) < 2**64


def test_each_segment_of_each_microbatch_has_a_seed_of_its_own():
    places = itertools.product((0, -1, 2**64 - 1), range(3), range(3), range(3))
    seeds = [segment_seed(microbatch_seed(*place), segment) for place in places for segment in range(4)]
    assert len(set(seeds)) == len(seeds) == 3**4 * 4
    assert all(0 <= seed < 2**64 for seed in seeds)
