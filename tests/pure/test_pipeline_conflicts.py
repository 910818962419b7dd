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
    {"codec": "topk"}, {"precision": "fp16"},
])  # fmt: skip
def test_what_a_pipeline_cannot_do_yet_is_refused_and_allowed_without_it(fields):
    name = next(iter(fields))
    problems = combination_problems(Plan(**{**PIPELINE, **fields}))
    assert [problem.got for problem in problems] == [f'pp > 1 with {name} = "{fields[name]}"']
    assert not combination_problems(Plan(**{**PIPELINE, **fields, "pp": 1}))


@pytest.mark.parametrize(("fields", "got"), [
    ({"zero": 2}, "interleave = 2 with zero = 2"),
    ({"update": "in_forward"}, 'interleave = 2 with update = "in_forward"'),
    ({"microbatches": 3}, "schedule = interleaved, microbatches = 3"),
])  # fmt: skip
def test_what_does_not_go_with_interleaved_stages_is_refused(fields, got):
    assert got in [problem.got for problem in combination_problems(Plan(**{**INTERLEAVED, **fields}))]
    assert not combination_problems(Plan(**INTERLEAVED))


def test_schedules_without_interleaving_have_one_stage_each():
    problems = combination_problems(Plan(**PIPELINE, interleave=2))
    assert any("interleave = 2" in problem.got for problem in problems)


def test_what_does_not_go_with_a_tied_weight_is_refused():
    assert [p.got for p in tie_problems(["a"], "in_forward", "step")] == [
        'update = "in_forward" and a, which two stages use'
    ]
    assert len(tie_problems(["a"], "in_forward", "local")) == 2
    assert not tie_problems([], "in_forward", "local")
    assert not tie_problems(["a"], "after", "step")
