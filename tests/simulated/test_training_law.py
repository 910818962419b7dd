"""The law of every mesh: whatever is not refused trains as one device does."""

import pytest

from tests import law, pairs
from tests.law import CHOICES, PLACES


@pytest.fixture(autouse=True)
def _states_rest_elsewhere(monkeypatch):
    """As if the ranks were GPUs: on CPU ranks all is in host memory already."""
    monkeypatch.setattr("fourfold.run.build.host_of", lambda offload, device: device if offload == "states" else None)


@pytest.mark.parametrize("row", law.drawn().rows, ids=lambda row: "-".join(map(str, row.values())))
def test_every_mesh_trains_as_one_device(row):
    case, place = law.case_of(row), row["place"]
    for got in law.train(case, place):
        assert law.far(case, place, got) <= law.tolerance(case, place)
