"""The law of every mesh: whatever is not refused trains as one device does."""

import pytest

from tests import law, pairs
from tests.law import CHOICES


@pytest.fixture(autouse=True)
def _states_rest_elsewhere(monkeypatch):
    """As if the ranks were GPUs: on CPU ranks all is in host memory already."""
    monkeypatch.setattr(
        "fourfold.step.build.offload_device", lambda offload, device: device if offload == "states" else None
    )


@pytest.mark.parametrize("row", law.drawn().rows, ids=law.text)
def test_every_mesh_trains_as_one_device(row):
    case, place = law.case_of(row), row["place"]
    for got in law.train(case, place):
        assert law.far(case, place, got) <= law.tolerance(case, place), case


def test_any_two_values_that_go_together_are_trained_together():
    rows, impossible = law.drawn()
    assert not impossible
    assert all(map(law.is_legal, rows))
    covered = set().union(*map(pairs.pairs_in, rows))
    assert covered == set(pairs.pairs(CHOICES)) - law.never()
    assert all(any(row.items() >= set(part) for row in rows) for part in law.triples())


def test_two_values_that_are_said_never_to_go_together_do_not():
    # Neither in plain training, with tokens or without, nor with any one value more that is changed in it.
    bases = law.PLAIN, law.OF_TOKENS
    found = [pairs.completed(part, CHOICES, law.is_legal, bases) for part in law.never()]
    assert found == [None] * len(found)


@pytest.mark.parametrize("fields", [
    {"sync": ("local", 2, 1.0, 0.9), "codec": "topk", "zero": 0},
    {"update": "in_backward", "clip": 0.05},
    {"zero": 3, "codec": "int8"},
    {"zero": 2, "sync": ("local", 2, 1.0, 0.9)},
])  # fmt: skip
def test_what_means_nothing_is_refused_by_the_library_itself(fields):
    row = law.PLAIN | fields
    assert law.is_refused(law.case_of(row), row["place"])
