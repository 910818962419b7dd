"""The law of the mesh on threads: every pp × dp × cp × tp of eight ranks trains as one device."""

import pytest

from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from tests import mesh_law
from tests.mesh_law import MESHES, MODELS, NUM_RANKS


def test_eight_ranks_have_twenty_meshes():
    assert len(MESHES) == len(set(MESHES)) == 20


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_mesh_of_eight_ranks_trains_as_one_device(mesh, model):
    expected = mesh_law.expected(mesh, model)
    for got in threads.run(NUM_RANKS, lambda comm: mesh_law.train(mesh, model, comm)):
        assert oracle.deviation(got, expected) <= TOLERANCE
