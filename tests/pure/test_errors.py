"""Errors say got / need / try, all problems at once, in columns."""

from fourfold.words.errors import PlanError, Problem, closest_match


def test_problems_are_printed_in_columns():
    problems = [
        Problem("mesh.pp = 4", "blocks divisible by pp", "pp = 2"),
        Problem("sp = 8, length 60", "a multiple", "64"),
    ]
    assert PlanError(problems, where="plan.toml").full_message() == (
        "PlanError: 2 problems in plan.toml\n"
        "  mesh.pp = 4         need blocks divisible by pp   try pp = 2\n"
        "  sp = 8, length 60   need a multiple               try 64"
    )


def test_a_plain_message_is_one_line():
    assert PlanError("nothing fits").full_message() == "PlanError: nothing fits"


def test_closest_match_finds_a_similar_word_or_none():
    assert closest_match("microbatch", ["microbatches", "dp"]) == "microbatches"
    assert closest_match("xyz", ["microbatches", "dp"]) is None
