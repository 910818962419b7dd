"""Laws of plans: round trip, closed choices, all problems at once; and that plan/ needs no torch."""

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cli.arguments import SETTINGS
from fourfold.plan.ask import ask_problems
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS, PLAN_FIELDS, parse_value, plan_problems
from fourfold.words.errors import PlanError

PLANS = st.builds(
    Plan,
    dp=st.integers(1, 64),
    microbatches=st.integers(1, 9),
    bucket_bytes=st.integers(1, 2**30),
    unused=st.sampled_from(["error", "allow"]),
    batch_norm=st.sampled_from(["error", "local"]),
    transport=st.sampled_from(["auto", "shared", "gloo", "nccl"]),
    sync=st.sampled_from(["step", "local"]),
    local_steps=st.integers(1, 500),
    outer_lr=st.floats(0.0, 10.0, exclude_min=True) | st.integers(1, 10),
    outer_momentum=st.floats(0.0, 0.999) | st.just(0),
)


@given(plan=PLANS, defaults=st.booleans())
def test_a_plan_survives_a_round_trip_through_toml(plan, defaults):
    assert Plan.from_toml(plan.to_toml(defaults=defaults)) == plan


def test_every_field_has_a_rule_that_accepts_its_default():
    assert tuple(field.name for field in dataclasses.fields(Plan)) == FIELDS
    for field in dataclasses.fields(Plan):
        rule = PLAN_FIELDS[field.name]
        assert rule.accepts(field.default)
        assert rule.supported is None or field.default in rule.supported


def test_the_signature_is_the_contract():
    contract = {
        "pp": 1, "dp": 1, "cp": 1, "tp": 1, "dims": "", "shard": None, "zero": 0, "microbatches": 1,
        "schedule": "1f1b", "stages": "even",
        "interleave": 1, "max_in_flight": None, "program": "", "recompute": "none", "edge": "none", "edge_density": 0.1,
        "ring": "zigzag", "ulysses": 1, "sequence_parallel": False,
        "update": "after", "sync": "step", "local_steps": 10, "outer_lr": 1.0, "outer_momentum": 0.0,
        "codec": "none", "codec_rank": 4, "codec_density": 0.01, "codec_refresh_steps": 100,
        "offload": "none", "precision": "keep", "reduce_dtype": "keep", "batch_norm": "error", "unused": "error",
        "bucket_bytes": 4194304, "transport": "auto",
    }  # fmt: skip
    parameters = inspect.signature(Plan).parameters
    assert {name: p.default for name, p in parameters.items()} == contract
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())


def test_all_problems_are_reported_at_once():
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(
            {"dp": 0, "microbatch": 2, "codec": "gzip", "zero": 4, "sync": "server", "bucket_bytes": "big"},
            where="plan.toml",
        )
    message = str(caught.value)
    assert message.startswith("6 problems in plan.toml")
    assert "dp = 0" in message
    assert "a whole number of at least 1" in message
    assert "try microbatches" in message
    assert "codec = 'gzip'" in message
    assert "one of none, bf16" in message
    assert "not implemented yet" in message


@pytest.mark.parametrize(
    ("fields", "attempt"),
    [
        ({"codec": "topk2"}, "try codec = topk"),
        ({"update": "inbackward"}, "try update = in_backward"),
        ({"ring": "xyz"}, None),
        ({"zero": 7}, None),
    ],
)
def test_a_mistyped_choice_is_refused_and_the_closest_one_suggested(fields: dict, attempt: str | None):
    with pytest.raises(PlanError) as caught:
        Plan(**fields)
    assert ("try" in str(caught.value)) == (attempt is not None)
    assert attempt is None or str(caught.value).endswith(attempt)


@pytest.mark.parametrize(
    ("fields", "ineffective"),
    [
        ({"codec_density": 0.05}, {"codec_density": 'codec = "topk" or "dct"'}),
        ({"codec_density": 0.05, "codec": "powersgd"}, {"codec_density": 'codec = "topk" or "dct"'}),
        ({"codec_density": 0.05, "codec": "dct", "codec_refresh_steps": 7}, {}),
        ({"codec_rank": 2, "codec": "powersgd"}, {}),
        ({"ring": "plain"}, {"ring": "cp above ulysses"}),
        ({"ring": "plain", "cp": 2, "ulysses": 2}, {"ring": "cp above ulysses"}),
        ({"ring": "plain", "cp": 4, "ulysses": 2}, {}),
        ({"local_steps": 4, "outer_lr": 0.7}, {"local_steps": 'sync = "local"', "outer_lr": 'sync = "local"'}),
        ({"local_steps": 4, "outer_momentum": 0.9, "sync": "local"}, {}),
        ({}, {}),
    ],
)
def test_fields_without_effect_are_reported(fields: dict, ineffective: dict):
    assert Plan(**fields).ineffective_fields == ineffective


@pytest.mark.parametrize(("name", "value"), [("sync", "server")])
def test_a_choice_that_is_not_built_yet_is_refused(name, value):
    with pytest.raises(PlanError, match="not implemented yet"):
        Plan(**{name: value})


@pytest.mark.parametrize(("fields", "message"), [
    ({"dp": 6, "shard": 4, "zero": 3}, "shard = 4 with dp = 6   need a divisor of dp   try shard = 1, 2, 3, 6"),
    ({"dp": 4, "shard": 2}, "shard = 2 with zero = 0"),
])  # fmt: skip
def test_an_invalid_shard_size_is_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        Plan(**fields)


@pytest.mark.parametrize("text", ["dp = 2", "version = 2\ndp = 2", "version = 1\ndp = [", 'version = 1\ndp = "2"'])
def test_an_invalid_plan_file_is_refused(text):
    with pytest.raises(PlanError, match=r"plan\.toml"):
        Plan.from_toml(text)


@pytest.mark.parametrize(("name", "value"), [
    ("outer_lr", 0), ("outer_lr", 11.0), ("outer_lr", float("nan")), ("outer_lr", True), ("outer_lr", "1"),
    ("outer_momentum", 1), ("outer_momentum", -0.1), ("codec_density", 0.0),
])  # fmt: skip
def test_an_out_of_range_number_is_refused_with_the_range(name, value):
    minimum = "of at least 0" if name == "outer_momentum" else "above 0"
    with pytest.raises(PlanError, match=f"{name} = .*need a number {minimum}, at most"):
        Plan(**{name: value})


def test_a_bool_is_not_a_number():
    with pytest.raises(PlanError, match="dp = True"):
        Plan(dp=True)


def test_command_line_values_are_parsed_by_type():
    assert parse_value("dp", "4") == 4
    assert parse_value("dp", "four") == "four"
    assert parse_value("shard", "none") is None
    assert parse_value("unused", "allow") == "allow"


def test_plan_imports_no_torch():
    modules = (
        "fourfold, fourfold.plan.plan, fourfold.axes.data.rules, fourfold.orders.sample_order, fourfold.words.task"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_the_codec_is_part_of_a_runs_identity_and_the_mesh_is_not():
    assert not Plan(dp=4, zero=2, microbatches=3, update="in_backward").identity_fields
    assert Plan(codec="topk", codec_density=0.1).identity_fields["codec_density"] == 0.1


# What computes the same weights another way. A new field is decided upon: it is here, or part of a run's identity.
SAME_TRAINING = {
    *("cp", "tp", "dims", "shard", "zero", "microbatches", "max_in_flight", "program", "recompute", "ring", "ulysses"),
    *("sequence_parallel", "update", "offload", "unused", "bucket_bytes", "transport"),
}


def test_every_field_is_part_of_a_runs_identity_in_some_plan_or_never_changes_the_training():
    plans = [
        Plan(sync="local", dp=2),
        Plan(codec="topk"),
        Plan(precision="bf16", reduce_dtype="fp32", batch_norm="local"),
        Plan(pp=2, schedule="2bw", microbatches=1),
        Plan(pp=2, edge="dct"),
    ]
    named = {name for plan in plans for name in plan.identity_fields}
    assert named | SAME_TRAINING == set(FIELDS)
    assert not named & SAME_TRAINING


def test_precision_and_reduce_dtype_are_part_of_a_runs_identity():
    assert Plan(dp=2, zero=1).identity_fields == {}
    assert Plan(precision="bf16", reduce_dtype="fp32").identity_fields == {"precision": "bf16", "reduce_dtype": "fp32"}


def test_a_setting_of_the_run_is_never_taken_for_a_field():
    for name in {*SETTINGS} - {*FIELDS}:
        attempts = [problem.attempt for problem in (*plan_problems({name: 1}), *ask_problems(1, "1 GiB", {name: 1}))]
        assert not {*FIELDS} & {*attempts}, name
    for name, meant in (("max_steps", "steps, a setting of the run"), ("lr", "the optimizer of"), ("fsdp", "zero=1")):
        wrong: dict[str, Any] = {name: 1}
        with pytest.raises(PlanError, match=f"{name} = 1 +need a field of the plan +try {meant}"):
            Plan(**wrong)


def test_a_mistyped_field_is_refused_in_python_as_in_a_file_and_the_signature_stays():
    with pytest.raises(PlanError, match=r"zerro = 1 +need a field of the plan +try zero\n.*dp = 0"):
        Plan(zerro=1, dp=0)  # type: ignore[call-arg]
    with pytest.raises(PlanError, match="try zero"):
        dataclasses.replace(Plan(), zerro=1)  # type: ignore[call-arg]
    assert tuple(inspect.signature(Plan).parameters) == FIELDS
    assert Plan.__init__.__annotations__["dp"] is int
