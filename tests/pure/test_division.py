"""Division: every stage has consecutive blocks, and `even` divides no worse than any other division."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.pipeline.rules.division import (
    EVEN,
    divide,
    division_problems,
    stage_count_problems,
    stage_names,
    stages_problems,
)

COSTS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def joined(stages):
    return list(itertools.chain(*stages))


def greatest_cost(stages, costs, first, last):
    """Of the most costly stage; the ends count to the first and the last."""
    sums = [sum(costs[block] for block in blocks) for blocks in stages]
    sums[0] += first
    sums[-1] += last
    return max(sums)


def all_divisions(num_blocks, num_stages):
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield [range(a, b) for a, b in itertools.pairwise((0, *cuts, num_blocks))]


@given(COSTS, st.integers(0, 20), st.integers(0, 20), st.data())
def test_even_stages_tile_the_chain_and_no_division_has_a_cheaper_worst_stage(costs, first, last, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    stages = divide(EVEN, costs, first, last, num_stages)
    assert len(stages) == num_stages
    assert all(stages)
    assert joined(stages) == list(range(len(costs)))
    best = min(greatest_cost(each, costs, first, last) for each in all_divisions(len(costs), num_stages))
    assert greatest_cost(stages, costs, first, last) == best


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_counts_are_taken_as_they_are(counts):
    text, num_blocks = ", ".join(map(str, counts)), sum(counts)
    assert not stages_problems(text)
    assert not division_problems(text, num_blocks, len(counts))
    stages = divide(text, [1.0] * num_blocks, 5.0, 5.0, len(counts))
    assert [len(blocks) for blocks in stages] == counts
    assert joined(stages) == list(range(num_blocks))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 6))
def test_what_is_not_refused_divides_and_the_attempt_of_a_refusal_is_legal(counts, num_blocks, num_stages):
    text = ",".join(map(str, counts))
    problems = division_problems(text, num_blocks, num_stages)
    is_legal = len(counts) == num_stages and sum(counts) == num_blocks
    assert (not problems) == is_legal
    if problems and num_blocks >= num_stages:
        attempt = problems[0].attempt.split('"')[1]
        assert not division_problems(attempt, num_blocks, num_stages)


def test_more_stages_than_blocks_are_refused():
    (problem,) = division_problems(EVEN, 3, 4)
    assert "4 stages and a chain of 3 blocks" in problem.got
    assert "pp × interleave of at most 3" in problem.attempt


@pytest.mark.parametrize(("text", "num_stages"), [("3,2", 2), ("a; b c", 2), ("3", 1)])
def test_a_division_into_another_number_of_stages_is_refused_whatever_the_model_is(text, num_stages):
    assert stage_count_problems(text, num_stages) == []
    (problem,) = stage_count_problems(text, 4)
    assert problem.got.endswith(f": {num_stages} stages")
    assert stage_count_problems("even", 4) == []


def test_names_have_a_stage_each():
    assert stage_names("net1; relu net2") == [["net1"], ["relu", "net2"]]
    assert stage_names("even") is None
    assert not stages_problems("a b; c")
    assert [problem.need for problem in stages_problems("a;")] == ["at least one name for each stage"]
    assert [problem.attempt for problem in stages_problems("evn")] == ['stages = "3,2,2,1", or "net1; relu net2"']
