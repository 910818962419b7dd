"""Human-readable numbers: three digits, a suitable prefix, and no count above 0 shown as 0."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.words.units import format_bytes, format_count, format_si


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (999.6, "1.00 k"),
        (12_345, "12.3 k"),
        (4.56e6, "4.56 M"),
    ],
)
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert format_si(value) == text


@given(st.integers(1, 10**12))
def test_a_count_is_shown_within_half_a_percent(number: int) -> None:
    factors = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    for text in (format_count(number), format_bytes(number)):
        value, _, unit = text.partition(" ")
        assert float(value) * factors[unit] == pytest.approx(number, rel=5.1e-3)


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (17, "17"), (999, "999"), (1218, "1.22 k"), (867_072, "867 k")])
def test_small_counts_are_whole_numbers(number: int, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (812, "812 B"), (1260, "1.23 KiB"), (2**20, "1.00 MiB")])
def test_sizes_have_their_unit(size: int, text: str) -> None:
    assert format_bytes(size) == text
