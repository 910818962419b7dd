"""Laws of plan checks: which combinations of fields and sizes are legal, decided without torch."""

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.check import (
    combination_problems,
    layerwise_problems,
    size_problems,
)
from fourfold.plan.model_traits import ModelTraits, trait_problems
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import PLAN_FIELDS


def test_legality_is_decided_without_torch():
    code = """
import sys
from fourfold.plan.check import combination_problems
from fourfold.plan.plan import Plan
assert combination_problems(Plan(update="in_backward"), clip=1.0)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


@pytest.mark.parametrize("fields", [{"zero": 1}, {"zero": 2}, {"codec": "topk"}, {"unused": "allow"}])
def test_options_that_need_equal_gradients_on_all_ranks_are_refused_with_local_sgd(fields):
    (problem,) = combination_problems(Plan(dp=2, sync="local", **fields))
    ((name, value),) = fields.items()
    assert name in problem.got
    assert str(value) in problem.got
    assert combination_problems(Plan(dp=2, **fields)) == []


@pytest.mark.parametrize("fields", [{"zero": 3}, {"unused": "allow"}])
def test_a_codec_with_error_feedback_needs_every_gradient_and_unsharded_weights(fields):
    (problem,) = combination_problems(Plan(dp=2, codec="dct", **fields))
    ((name, value),) = fields.items()
    assert problem.got in (f'codec = "dct" with {name} = {value}', f'codec = "dct" with {name} = "{value}"')
    assert combination_problems(Plan(dp=2, **fields)) == []


def test_a_codec_without_error_feedback_allows_unused_parameters():
    assert combination_problems(Plan(codec="bf16", unused="allow")) == []


def test_a_layerwise_update_in_backward_needs_whole_parameters():
    assert layerwise_problems(Plan(dp=2, zero=1, update="in_backward"), "LAMB")
    for fields in ({"zero": 0}, {"zero": 1, "update": "in_forward"}, {"zero": 1, "dp": 1}):
        assert layerwise_problems(Plan(**{"dp": 2, "update": "in_backward", **fields}), "LAMB") == []


@given(
    num_ranks=st.integers(1, 64),
    sizes=st.fixed_dictionaries({axis: st.integers(1, 16 if axis == "dp" else 4) for axis in ("pp", "dp", "cp", "tp")}),
    whole=st.booleans(),
)
def test_a_mesh_of_the_wrong_size_is_refused_and_one_that_fits_suggested(num_ranks, sizes, whole):
    size, tp, pp = math.prod(sizes.values()), sizes["tp"], sizes["pp"]
    fields = {**sizes, "ulysses": sizes["cp"] if whole else 1}
    problems = size_problems(Plan.from_dict(fields), num_ranks)
    assert bool(problems) == (size != num_ranks)
    for problem in problems:
        axes, other = problem.attempt.split(", or ")
        assert other == f"start {size} ranks"
        suggested = {name: int(value) for name, value in (pair.split(" = ") for pair in axes.split(", "))}
        assert size_problems(Plan.from_dict(fields | suggested), num_ranks) == [], (
            "with these fields in place of the plan's"
        )
        assert suggested.get("tp", 1) in (1, tp), "another size may not divide the heads"
        assert suggested.get("tp", 1) == tp or num_ranks % tp
        assert suggested.get("pp", 1) in (1, pp), "another number of stages may not divide the blocks"


@given(
    st.fixed_dictionaries({name: st.sampled_from(PLAN_FIELDS[name].choices) for name in ("zero", "update", "unused")})
)
def test_zero_update_and_unused_combine_freely_except_with_in_backward(fields):
    problems = combination_problems(Plan(dp=2, **fields), clip=1.0)
    assert len(problems) == (fields["update"] == "in_backward") * (1 + (fields["unused"] == "allow"))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_tried_for_batch_normalization_is_not_refused_in_turn(microbatches):
    plan = Plan(dp=2, microbatches=microbatches)
    (problem,) = trait_problems(vars(plan), plan.batch_split, ModelTraits(batch_norms=("norm",)))
    is_refused = bool(combination_problems(dataclasses.replace(plan, batch_norm="sync")))
    assert ("with microbatches = 1" in problem.attempt) == is_refused
