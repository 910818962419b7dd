"""What does not go with a pipeline is refused by name, all at once."""

from typing import Any

import pytest

from fourfold.axes.pipeline.rules.conflicts import NO_RECOMPUTE, recompute_problems, tie_problems
from fourfold.axes.pipeline.rules.edges import edge_note
from fourfold.plan.check import combination_problems
from fourfold.plan.plan import Plan
from fourfold.words.errors import PlanError

PIPELINE: dict[str, Any] = {"pp": 2, "dp": 2, "microbatches": 2}
INTERLEAVED: dict[str, Any] = {**PIPELINE, "schedule": "interleaved", "interleave": 2}


@pytest.mark.parametrize("fields", [
    {"sync": "local"}, {"batch_norm": "sync", "microbatches": 1}, {"unused": "allow"},
    {"sequence_parallel": True, "tp": 2}, {"codec": "topk"}, {"precision": "fp16"}, {"update": "in_forward", "zero": 3},
])  # fmt: skip
def test_a_pipeline_goes_with_what_goes_without_it(fields):
    assert not combination_problems(Plan(**{**PIPELINE, **fields}))
    assert not combination_problems(Plan(**{**PIPELINE, **fields, "pp": 1}))


def test_interleaved_stages_need_microbatches_in_groups():
    problems = combination_problems(Plan(**{**INTERLEAVED, "microbatches": 3}))
    assert 'schedule = "interleaved", microbatches = 3' in [problem.got for problem in problems]
    assert not combination_problems(Plan(**INTERLEAVED))


def test_schedules_without_interleaving_have_one_stage_each():
    problems = combination_problems(Plan(**PIPELINE, interleave=2))
    assert any("interleave = 2" in problem.got for problem in problems)


def test_recompute_goes_with_the_schedules_whose_backward_is_one_action_with_the_weights_of_forward():
    for schedule in NO_RECOMPUTE:
        found = recompute_problems("full", schedule, divides_backward=False)
        assert [each.got for each in found] == [f'schedule = "{schedule}" with recompute = "full"']
        assert not recompute_problems("none", schedule, divides_backward=False)
    for schedule in ("gpipe", "1f1b"):
        assert not combination_problems(Plan(**PIPELINE, schedule=schedule, recompute="selective"))
    (problem,) = combination_problems(Plan(**PIPELINE, schedule="zero-bubble", recompute="full"))
    assert 'schedule = "zero-bubble", which divides backward, with recompute = "full"' in problem.got
    written = {**PIPELINE, "schedule": "written", "recompute": "full"}
    whole, halved = (
        "0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 B1.0 F1.1 B1.1",
        "0: F0.0 F0.1 I0.0 W0.0 I0.1 W0.1\n1: F1.0 B1.0 F1.1 B1.1",
    )
    assert not combination_problems(Plan(**written, program=whole))
    (problem,) = combination_problems(Plan(**written, program=halved))
    assert problem.got == 'schedule = "written", which divides backward, with recompute = "full"'


def test_what_does_not_go_with_a_tied_weight_is_refused():
    assert [p.got for p in tie_problems(["a"], "in_forward")] == ['update = "in_forward" and a, which two stages use']
    assert [p.got for p in tie_problems(["a"], "after", is_asynchronous=True)] == [
        "an asynchronous schedule and a, which two stages use"
    ]
    assert not tie_problems([], "in_forward")
    assert not tie_problems(["a"], "after")


@pytest.mark.parametrize("edge", ["bf16", "int8", "dct"])
def test_edges_that_are_compressed_need_stages(edge):
    assert [p.got for p in combination_problems(Plan(edge=edge))] == [f'edge = "{edge}" with pp = 1']
    assert not combination_problems(Plan(**PIPELINE, edge=edge))


def test_a_density_of_edges_needs_dct():
    assert [p.got for p in combination_problems(Plan(**PIPELINE, edge="int8", edge_density=0.05))] == [
        'edge_density = 0.05 with edge = "int8"'
    ]
    assert not combination_problems(Plan(**PIPELINE, edge="dct", edge_density=0.05))


@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, float("nan"), "0.1"])
def test_a_density_that_is_no_fraction_is_refused(density):
    with pytest.raises(PlanError, match=r"edge_density = .* need a number above 0, at most 1"):
        Plan(**PIPELINE, edge="dct", edge_density=density)


def test_compressed_edges_are_part_of_a_runs_identity():
    assert not Plan(**PIPELINE).identity_fields
    own = Plan(**PIPELINE, edge="dct", edge_density=0.05).identity_fields
    assert own == {"edge": "dct", "edge_density": 0.05, "pp": 2, "stages": "even", "interleave": 1}
    assert "edge_density" not in Plan(**PIPELINE, edge="bf16").identity_fields
    assert edge_note(Plan(**PIPELINE).edge_spec) is None
    assert "another training" in str(edge_note(Plan(**PIPELINE, edge="bf16").edge_spec))
