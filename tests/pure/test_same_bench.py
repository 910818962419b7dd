"""Laws of `bench.same`: its cases are legal and cover the plan, and every difference is reported."""

import dataclasses
import functools

import numpy as np
import pytest

from bench import same_cases
from bench.same_compare import Stored, compare_facts, compare_tensors
from fourfold.plan.plan import Plan

DERIVED = {"dp"}  # from the number of ranks
NOT_BUILT = {
    "pp",
    "tp",
    "dims",
    "sequence_parallel",
    "schedule",
    "stages",
    "interleave",
    "max_in_flight",
    "program",
    "recompute",
    "edge",
    "edge_density",
}


@functools.cache
def generated() -> tuple[list[same_cases.Case], float]:
    return same_cases.generate()


def test_the_same_seed_gives_the_same_cases():
    assert same_cases.generate(3) == same_cases.generate(3)
    assert same_cases.generate(3)[0] == generated()[0][:3]


def test_the_cases_cover_every_plan_field_and_every_option():
    cases, share = generated()
    names = {field.name for field in dataclasses.fields(Plan)} - DERIVED - NOT_BUILT
    assert {same_cases.NEW_NAMES.get(name, name) for name in same_cases.PLAN_OPTIONS} == {
        same_cases.NEW_NAMES.get(name, name) for name in names
    }
    for name, options in same_cases.OPTIONS.items():
        assert {case[name] for case in cases} == set(options), name
    assert share > 0.9


def test_every_case_and_every_run_is_a_plan():
    known = {field.name for field in dataclasses.fields(Plan)}
    for case in generated()[0]:
        fields = same_cases.plan_fields(case)
        Plan(**{name if name in known else same_cases.NEW_NAMES[name]: value for name, value in fields.items()})
    for fields in same_cases.RUNS:
        Plan.from_toml(same_cases.toml(fields))


def stored(*values: float) -> Stored:
    return Stored("F32", (len(values),), np.array(values, np.float32).tobytes())


def test_equal_means_equal_bits():
    assert not compare_tensors({"a": stored(1.0)}, {"a": stored(1.0)}, group="weights", where="")
    for other in ({"a": stored(1.0 + 2.0**-23)}, {"a": stored(1.0, 1.0)}, {"b": stored(1.0)}, {}):
        assert compare_tensors({"a": stored(1.0)}, other, group="weights", where=""), other
    (found,) = compare_tensors({"a": stored(1.0, 2.0)}, {"a": stored(1.0, 2.5)}, group="weights", where="")
    assert found.size == 0.5
    assert compare_tensors({"a": stored(0.0)}, {"a": stored(-0.0)}, group="weights", where="")


@pytest.mark.parametrize(
    "other",
    [
        {"group": [["allreduce", "4 float32 16 B"], ["broadcast", "1 int64 8 B", 0]]},
        {"group": [["broadcast", "1 int64 8 B", 0], ["allreduce", "8 float32 32 B"]]},
        {"group": [["broadcast", "1 int64 8 B", 0]]},
        {"other": [["broadcast", "1 int64 8 B", 0], ["allreduce", "4 float32 16 B"]]},
    ],
)
def test_a_different_order_size_or_number_of_collectives_is_reported(other):
    calls = {"group": [["broadcast", "1 int64 8 B", 0], ["allreduce", "4 float32 16 B"]]}
    assert not compare_facts(calls, calls, group="collectives")
    assert compare_facts(calls, other, group="collectives")


def test_a_float_is_compared_as_it_prints():
    nan = float("nan")
    assert not compare_facts([nan, 0.1], [nan, 0.1], group="losses")
    assert compare_facts([0.0], [-0.0], group="losses")
    (found,) = compare_facts([1.0, 2.0], [1.5, 2.25], group="losses")
    assert found.size == 0.5
