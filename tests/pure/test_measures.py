"""Laws of measures: what throughput counts has the name of what it is."""

import pytest

from fourfold.words.measures import count_units

DENSE, CLASSES, LABELLED = (
    {"samples": 4, "tokens": None, "targets": 32},
    {"samples": 4, "tokens": None, "targets": 4},
    {"samples": 4, "tokens": 24, "targets": 4},
)
UNLABELLED = {"samples": 4, "tokens": 24, "targets": None}


@pytest.mark.parametrize(("unit", "counts", "expected"), [
    ("tokens", DENSE, (32, "tokens")), ("pixels", DENSE, (32, "pixels")), ("samples", DENSE, (4, "samples")),
    ("tokens", LABELLED, (24, "tokens")), ("tokens", UNLABELLED, (24, "tokens")), ("images", LABELLED, (4, "images")),
    ("tokens", CLASSES, (4, "samples")), ("bytes", UNLABELLED, (4, "samples")), ("samples", LABELLED, (4, "samples")),
])  # fmt: skip
def test_throughput_counts_what_its_unit_names_or_is_named_samples(unit, counts, expected):
    assert count_units(unit, **counts) == expected
