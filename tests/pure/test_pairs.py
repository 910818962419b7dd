"""Laws of pairwise covers: rows of choices in which every legal pair of values occurs."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import pairs
from tests.conftest import is_wanted

CHOICES = {name: tuple(range(4)) for name in "abcdef"}
BASE = dict.fromkeys(CHOICES, 0)
FORBIDDEN = st.sampled_from([part for part in pairs.pairs(CHOICES) if all(value for _, value in part)])


@settings(max_examples=10)
@given(forbidden=st.sets(FORBIDDEN, max_size=12), seed=st.integers(0, 3))
def test_every_pair_of_values_is_in_a_legal_row_or_reported_impossible(forbidden, seed):
    def is_legal(row):
        return not forbidden & pairs.pairs_in(row)

    rows, impossible = pairs.cover(CHOICES, is_legal, [BASE], seed=seed)
    assert all(map(is_legal, rows))
    assert set(impossible) == forbidden
    assert set().union(*map(pairs.pairs_in, rows)) == set(pairs.pairs(CHOICES)) - forbidden
    assert len(rows) < 60  # of 4096; at least 16 are needed


def test_covers_are_deterministic_and_contain_the_required_parts():
    required = pairs.parts(CHOICES, "abc")
    found = [pairs.cover(CHOICES, lambda row: True, [BASE], first=required) for _ in range(2)]
    assert found[0] == found[1]
    assert all(any(row.items() >= set(part) for row in found[0].rows) for part in required)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=4))
def test_cases_of_a_covering_test_have_every_value_and_those_of_three_factors_every_pair(sizes):
    factors = {f"field{number}": list(range(size)) for number, size in enumerate(sizes)}
    marks = [pytest.mark.parametrize(name, values).mark for name, values in factors.items()]

    def is_case(row: pairs.Row) -> bool:
        callspec = SimpleNamespace(params=row)
        return is_wanted(SimpleNamespace(get_closest_marker=str, iter_markers=lambda _: marks, callspec=callspec))  # type: ignore[arg-type]

    cases = [row for row in (dict(part) for part in pairs.parts(factors, list(factors))) if is_case(row)]
    assert {item for row in cases for item in row.items()} == {(name, v) for name, vs in factors.items() for v in vs}
    if len(sizes) == 3:
        assert set().union(*map(pairs.pairs_in, cases)) == set(pairs.pairs(factors))
    longest, second = sorted(sizes)[:-3:-1]
    assert len(cases) == longest * (second if len(sizes) > 2 else 1)
