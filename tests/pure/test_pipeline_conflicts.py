"""What does not go with a pipeline is refused by name, all at once."""

from typing import Any

import pytest

from fourfold.plan.check import combination_problems
from fourfold.plan.pipeline.conflicts import tie_problems
from fourfold.plan.plan import Plan

PIPELINE: dict[str, Any] = {"pp": 2, "dp": 2, "microbatches": 2}
INTERLEAVED: dict[str, Any] = {**PIPELINE, "schedule": "interleaved", "interleave": 2}


@pytest.mark.parametrize("fields", [
    {"sync": "local"}, {"batch_norm": "sync", "microbatches": 1}, {"unused": "allow"}, {"residual": "split", "tp": 2},
    {"codec": "topk"}, {"precision": "fp16"}, {"update": "in_forward", "zero": 3},
])  # fmt: skip
def test_a_pipeline_goes_with_what_goes_without_it(fields):
    assert not combination_problems(Plan(**{**PIPELINE, **fields}))
    assert not combination_problems(Plan(**{**PIPELINE, **fields, "pp": 1}))


def test_interleaved_stages_need_microbatches_in_groups():
    problems = combination_problems(Plan(**{**INTERLEAVED, "microbatches": 3}))
    assert "schedule = interleaved, microbatches = 3" in [problem.got for problem in problems]
    assert not combination_problems(Plan(**INTERLEAVED))


def test_schedules_without_interleaving_have_one_stage_each():
    problems = combination_problems(Plan(**PIPELINE, interleave=2))
    assert any("interleave = 2" in problem.got for problem in problems)


def test_what_does_not_go_with_a_tied_weight_is_refused():
    assert [p.got for p in tie_problems(["a"], "in_forward")] == ['update = "in_forward" and a, which two stages use']
    assert not tie_problems([], "in_forward")
    assert not tie_problems(["a"], "after")
