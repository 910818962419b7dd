"""The law of every mesh: a plan that is not refused trains as one device does."""

import pytest

from tests import law, pairs
from tests.law import CHOICES


@pytest.fixture(autouse=True)
def _offload_states(monkeypatch):
    """Move offloaded states, as on GPUs: on a CPU rank they are in host memory already."""
    monkeypatch.setattr(
        "fourfold.step.stage_assembly.offload_device", lambda offload, device: device if offload == "states" else None
    )


@pytest.mark.parametrize("row", law.drawn().rows, ids=law.text)
def test_every_mesh_trains_as_one_device(row):
    case, place = law.case_of(row), row["place"]
    for got in law.train(case, place):
        assert law.deviation(case, place, got) <= law.tolerance(case, place), case


def test_all_legal_pairs_of_values_are_trained():
    rows, impossible = law.drawn()
    assert not impossible
    assert all(map(law.is_legal, rows))
    covered = set().union(*map(pairs.pairs_in, rows))
    assert covered == set(pairs.pairs(CHOICES)) - law.never()
    assert all(any(row.items() >= set(part) for row in rows) for part in law.triples())


def test_pairs_listed_as_never_legal_are_in_no_legal_row():
    # Neither in a plain training, with tokens or without, nor with any one other value changed in it.
    bases = law.PLAIN, law.LM
    found = [pairs.completed(part, CHOICES, law.is_legal, bases) for part in law.never()]
    assert found == [None] * len(found)


@pytest.mark.parametrize("fields", [
    {"sync": ("local", 2, 1.0, 0.9), "codec": "topk", "zero": 0},
    {"update": "in_backward", "clip": 0.05},
    {"zero": 3, "codec": "int8"},
    {"zero": 2, "sync": ("local", 2, 1.0, 0.9)},
])  # fmt: skip
def test_meaningless_plans_are_refused_by_the_library(fields):
    row = law.PLAIN | fields
    assert law.is_refused(law.case_of(row), row["place"])
