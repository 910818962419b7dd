"""Errors say got / need / try, all problems at once, in columns."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.plan import Plan
from fourfold.words.errors import PLACES, DataError, PlanError, Problem, closest_match, place_of_setting


def test_problems_are_printed_in_columns():
    problems = [
        Problem("mesh.pp = 4", "blocks divisible by pp", "pp = 2"),
        Problem("cp = 8, length 60", "a multiple", "64"),
    ]
    assert PlanError(problems, where="plan.toml").full_message() == (
        "PlanError: 2 problems in plan.toml\n"
        "  mesh.pp = 4         need blocks divisible by pp   try pp = 2\n"
        "  cp = 8, length 60   need a multiple               try 64"
    )


def test_problems_that_do_not_fit_beside_one_another_stand_below_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a gradient for every parameter that is trained"
    problems = [Problem(f"parameter {name} got no gradient", long, 'unused = "allow"') for name in "ab"]
    error = PlanError([*problems, Problem("c", "d")])
    rows = str(error)
    monkeypatch.setenv("COLUMNS", "80")
    assert str(error) == rows == error.full_message().removeprefix("PlanError: ")
    assert error.full_message(80) == (
        "PlanError: 3 problems\n"
        "  parameter a got no gradient\n"
        "  parameter b got no gradient\n"
        f"    need {long}\n"
        '    try unused = "allow"\n'
        "  c\n"
        "    need d"
    )


def test_of_long_names_the_beginning_and_the_end_are_shown():
    name = "a" * 10**5
    assert len(str(DataError(Problem(f"{name}: no such file"), where=name))) < 10**4


def test_a_plain_message_is_one_line():
    assert PlanError("nothing fits").full_message() == "PlanError: nothing fits"


def test_closest_match_finds_a_similar_word_or_none():
    assert closest_match("microbatch", ["microbatches", "dp"]) == "microbatches"
    assert closest_match("xyz", ["microbatches", "dp"]) is None
    assert closest_match("h100", ["v100", "dgx-a100", "dgx-h100"]) == "dgx-h100"


@given(st.data())
def test_a_word_with_one_wrong_letter_is_recognized_and_another_word_is_not(data):
    """Of four letters or more. A word that only shares letters with a setting suggests none."""
    known = ["rates", "steps", "zero", "clip", "folder", "checkpoint_every", "best_metric", "peer_timeout"]
    word = data.draw(st.sampled_from(known))
    at, letter = data.draw(st.integers(0, len(word) - 1)), data.draw(st.sampled_from("jkq"))
    assert closest_match(word[:at] + letter + word[at + 1 :], known) == word
    assert closest_match(word[:at] + letter + word[at:], known) == word
    assert closest_match(word[:at] + word[at + 1 :], known) == word
    for other in ("fresh", "trainer", "reset", "retries", "stop", "force", "power", "notes", "last", "version"):
        assert closest_match(other, [*known, "precision", "tp", "order"]) is None, other
    assert [closest_match(part, known) for part in ("metric", "timeout")] == ["best_metric", "peer_timeout"]


def test_closest_match_knows_the_words_of_other_frameworks_in_any_spelling():
    known = ["steps", "batch_size", "lr", "lr_warmup", "microbatches", "weight_decay"]
    words = ["max_steps", "bs", "learning-rate", "LR", "num_warmup_steps", "gradient_accumulation_steps", "wd"]
    assert [closest_match(word, known) for word in words] == [
        *("steps", "batch_size", "lr", "lr", "lr_warmup", "microbatches", "weight_decay")
    ]
    mistyped = ["lerning_rate", "max_step", "batchsizes", "gradient_acumulation_steps"]
    assert [closest_match(word, known) for word in mistyped] == ["lr", "steps", "batch_size", "microbatches"]
    assert closest_match("learning_rate", ["steps"]) is None
    assert closest_match("lerning_rate", ["steps"]) is None
    assert closest_match("vocab_size", ["batch_size", "vocabulary"]) == "vocabulary"
    assert closest_match("vocab_size", ["batch_size"]) is None
    assert closest_match("experiment", ["experiments"]) == "experiments"  # of a file
    assert closest_match("pipeline_schedule", ["lr_schedule", "schedule"]) == "schedule"


def test_words_whose_values_are_others_here_are_answered_by_values_that_can_be_given():
    assert place_of_setting("bf16", ["precision"]) == "precision=bf16 or precision=fp16"
    assert place_of_setting("deepspeed", ["seed", "zero"]) == "zero=1, zero=2 or zero=3"
    assert place_of_setting("shuffle", ["schedule"]) == "a DataLoader(…, shuffle=…) as the task's data"
    assert closest_match("checkpoint_dir", ["init", "name"]) == "name"
    assert closest_match("metric_for_best_model", ["best_mode", "best_metric"]) == "best_metric"
    given = [pair for place in PLACES.values() for pair in re.findall(r"(\w+)=(\w+)", place)]
    values: list[tuple[str, Any]] = [(key, int(text) if text.isdecimal() else text) for key, text in given]
    values = [(key, value) for key, value in values if hasattr(Plan(), key) and value != "N"]
    for key, value in values:
        assert getattr(Plan(**{key: value}), key) == value
    assert {key for key, _ in values} >= {"precision", "recompute", "zero", "batch_norm", "unused"}
