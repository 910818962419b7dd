"""Laws of asks: what is pinned stays as it is written, and everything that is wrong is said at once."""

import dataclasses
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fourfold
from fourfold.plan.ask import ON_REQUEST, SEARCHED, Ask
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS
from fourfold.planner.search.answer import decide_among
from fourfold.words.errors import PlanError
from fourfold.words.units import write_bytes
from tests.decide_cases import Model, make_case, question

FIELD_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "pp": st.sampled_from([1, 2, "auto"]),
        "dp": st.sampled_from([1, 4, "auto"]),
        "cp": st.sampled_from([2, "auto"]),
        "tp": st.sampled_from([1, 2, "auto"]),
        "zero": st.sampled_from([0, 3, "auto"]),
        "schedule": st.sampled_from(["gpipe", "auto"]),
        "stages": st.sampled_from(["even", "3,2", "auto"]),
        "max_in_flight": st.sampled_from([None, 3, "auto"]),
        "precision": st.sampled_from(["bf16", "keep", "auto"]),
        "codec": st.just("topk"),
        "codec_density": st.sampled_from([0.1, 1]),
    },
)


@given(st.sampled_from([None, 16, 64]), st.sampled_from([None, 1, 12345, "80 GiB", "1.5GB"]), FIELD_VALUES)
def test_an_ask_is_what_its_toml_says(devices, memory, fields):
    if {"pp", "dp", "cp", "tp"} <= fields.keys():
        devices = None  # it follows from them
    ask = Ask(devices=devices, memory=memory, **fields)
    again = Ask.from_toml(ask.to_toml())
    assert again == ask
    assert hash(again) == hash(ask)
    assert ask.pinned == {name: value for name, value in fields.items() if value != "auto"}
    assert ask.requested == (("precision",) if fields.get("precision") == "auto" else ())


def test_what_changes_the_training_is_not_open_by_itself():
    closed = set(FIELDS) - set(SEARCHED)
    assert {"codec", "sync", "local_steps", "edge", "precision", "reduce_dtype", "batch_norm"} <= closed
    assert not any(Ask().is_open(name) for name in closed)
    assert all(Ask().is_open(name) for name in SEARCHED)
    assert Ask(precision="auto").is_open("precision")
    # What a run is identified by: none of it may be chosen silently, in any plan.
    plans = (Plan(codec="topk"), Plan(sync="local"), Plan(precision="bf16"))
    trained = {name for plan in plans for name in plan.identity_fields}
    assert trained & set(SEARCHED) <= {"dp"}  # of local steps, which must be pinned
    assert set(ON_REQUEST) <= closed


def test_all_problems_are_said_at_once():
    with pytest.raises(PlanError) as error:
        Ask(device=3, codec="auto", zero=7, memory="80 apples", devices=0)
    assert len(error.value.problems) == 5
    assert "devices" in str(error.value)
    assert 'memory = "80 GiB"' in str(error.value)


@pytest.mark.parametrize(
    ("fields", "attempt"),
    [
        ({"devices": 64, "pp": 4, "dp": 4, "cp": 2, "tp": 4}, "devices = 128"),
        ({"devices": 64, "tp": 3}, "devices = 63 or 66"),
        ({"devices": 2, "tp": 4}, "devices = 4"),
    ],
)
def test_axes_that_contradict_the_devices_are_refused_with_what_would_do(fields, attempt):
    with pytest.raises(PlanError) as error:
        Ask(**fields)
    assert attempt in error.value.problems[0].attempt


def test_pinned_fields_that_depend_on_open_ones_are_no_problem():
    assert Ask(ulysses=2).pinned == {"ulysses": 2}
    assert Ask(shard=4).pinned == {"shard": 4}
    assert Ask(shard=2, dp=4).pinned == {"shard": 2, "dp": 4}
    with pytest.raises(PlanError):
        Ask(ulysses=2, cp=3)


def test_changes_replace_and_open_fields():
    ask = Ask(devices=8, memory="1 GiB", tp=2, precision="auto")
    assert ask.with_changes(tp="auto", zero=1) == Ask(devices=8, memory=2**30, zero=1, precision="auto")
    assert ask.with_changes(devices=4).devices == 4


def test_a_file_without_a_version_is_refused():
    with pytest.raises(PlanError, match="no version"):
        Ask.from_toml("tp = 2\n")


def test_the_door_has_ask():
    assert fourfold.Ask is Ask
    assert {field.name for field in dataclasses.fields(Plan)} == set(FIELDS)


@given(st.integers(1, 2**50))
def test_memory_is_read_as_it_is_written(num_bytes):
    assert Ask(memory=write_bytes(num_bytes)).memory_bytes == num_bytes


@pytest.mark.parametrize("memory", ["", "GiB", "-1 GiB", "80", "0 B", "nan", 0, -1, 1.5, True])
def test_what_is_no_number_of_bytes_is_refused(memory):
    with pytest.raises(PlanError, match="memory"):
        Ask(memory=memory)


ASKS = sorted((resources.files("fourfold") / "recipes" / "asks").iterdir(), key=lambda file: file.name)


@pytest.mark.parametrize("file", ASKS, ids=[file.name for file in ASKS])
def test_the_asks_of_named_systems_leave_the_mesh_open_and_are_planned(file):
    ask = Ask.from_toml(file.read_text(encoding="utf-8"), where=file.name)
    assert ask.is_open("pp")
    assert ask.is_open("dp")
    assert ask.is_open("stages")
    pricing = make_case(devices=4, model=Model(((1.0, 4.0, 1.0), (4.0, 4.0, 1.0), (1.0, 1.0, 1.0))))
    decision = decide_among(question(pricing, ask))
    assert all(getattr(decision.answer.plan, name) == value for name, value in ask.pinned.items())


def test_flexflow_hypar_flow_and_dapple_have_asks():
    assert [file.name for file in ASKS] == ["dapple.toml", "flexflow.toml", "hypar-flow.toml"]
