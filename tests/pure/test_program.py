"""Laws of programs as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.words.program import Action, ProgramError, Verb, format_program, parse_program

ACTIONS = st.builds(Action, st.sampled_from(Verb), st.integers(0, 99), st.integers(0, 999))
PROGRAMS = st.dictionaries(st.integers(0, 64), st.lists(ACTIONS, max_size=20).map(tuple), min_size=1)


@given(program=PROGRAMS)
def test_parsing_a_program_is_the_inverse_of_formatting_it(program):
    assert parse_program(format_program(program)) == program


def test_verbs_have_one_letter_each():
    assert len({verb.value for verb in Verb}) == len(Verb) == 17
    assert all(len(verb.value) == 1 for verb in Verb)


def test_every_invalid_word_is_reported():
    with pytest.raises(ProgramError) as caught:
        parse_program(f"0: F0.0 F0\nsecond\n1: Q1.2\n2: F0.{'9' * 5000}\n²: F0.0")
    message = str(caught.value)
    assert "5 problems in program" in message
    for word in ("'F0'", "'second'", "'Q1.2'", "'F0.999", "'²: F0.0'"):
        assert word in message


def test_line_numbers_count_blank_lines():
    with pytest.raises(ProgramError, match="line 4: 'second'"):
        parse_program("\n0: F0.0\n\nsecond")
