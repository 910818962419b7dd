"""The law of the mesh on threads: every pp × dp × cp × tp of eight ranks trains as one device."""

import pytest

from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from tests import mesh_law
from tests.mesh_law import MESHES, MODELS, NUM_RANKS

# Each model meets every zero level and every schedule; `tests.spawned_law` trains both on every mesh.
TRAINED = [(mesh, MODELS[index % 3 % 2]) for index, mesh in enumerate(MESHES)]


def test_eight_ranks_have_twenty_meshes():
    assert len(MESHES) == len(set(MESHES)) == 20


@pytest.mark.parametrize(
    ("mesh", "model"), TRAINED, ids=lambda each: each if each in MODELS else "x".join(map(str, each))
)
def test_every_mesh_of_eight_ranks_trains_as_one_device(mesh, model, request):
    if mesh.count(2) < 3:  # the dry run where any two axes meet
        request.getfixturevalue("without_dry_run")
    expected = mesh_law.expected(mesh, model)
    for got in threads.run(NUM_RANKS, lambda comm: mesh_law.train(mesh, model, comm)):
        assert oracle.deviation(got, expected) <= TOLERANCE
