"""Every regular expression of the source takes time in proportion to the text, whatever the text is."""

import ast
import random
import re
import time
from collections import defaultdict

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.source_files import files, nodes

REPEATS = (20, 500, 40_000)
MOST_SECONDS = 0.1  # of processor time; linear ones take a few milliseconds at most, quadratic ones more
HOW = ("fullmatch", "match", "search", "sub", "split", "findall", "finditer")


def find_patterns() -> dict[str, set[str]]:
    """The patterns in `re.compile(…)`, `re.sub(…)` and such, and how each is used: by the name it has, in any file."""
    by_name, used, found = dict[str, str](), defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and (text := pattern_of(node.value)):
                by_name[ast.unparse(node.targets[0])] = text
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in HOW:
                how = node.func.attr.replace("finditer", "findall")  # to the end, as its iterator would be read
                used[ast.unparse(node.func.value)].add(how)
                if text := pattern_of(node):
                    found[text].add(how)
    for name, text in by_name.items():
        found[text] |= used[name]
    return found


def pattern_of(call: ast.Call) -> str | None:
    """What a call such as `re.compile(…)` is given; what an f-string inserts stands for itself."""
    if not ast.unparse(call.func).startswith("re.") or not call.args:
        return None
    if isinstance(call.args[0], ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "a" for part in call.args[0].values)
    given = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
    return ("(?x)" if "re.VERBOSE" in ast.unparse(call) else "") + given if isinstance(given, str) else None


PATTERNS = find_patterns()


def processor_seconds(pattern: re.Pattern[str], how: set[str], text: str) -> float:
    before = time.thread_time()
    for each in how:
        getattr(pattern, each)(*([""] if each == "sub" else []), text)
    return time.thread_time() - before


@pytest.mark.parametrize("text", sorted(PATTERNS))
def test_every_regular_expression_is_linear(text: str):
    pattern, how = re.compile(text, re.DOTALL), PATTERNS[text]
    assert how, "it is used under another name"
    drawn = re.compile(re.sub(r"(?<=[*+?}])\+", "", text), re.DOTALL)  # hypothesis knows no possessive repeats

    own = [*sorted(set(text) - set("abcdefghijklmnopqrstuvwxyz\\")), "a", "1", " "]

    @settings(max_examples=6, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.from_regex(drawn, fullmatch=True, alphabet=st.characters(codec="ascii")))
    def law(found: str) -> None:
        rng = random.Random(found)
        for number in range(50):
            start, pumped = rng.randint(0, len(found)), "".join(rng.choices(own, k=rng.randint(1, 2)))
            if number < len(own):
                start, pumped = 0, own[number]
            if found[start:] and rng.random() < 0.5:
                pumped = found[start : start + rng.randint(1, 3)]
            rest = rng.choice([found[start:], ""]) + rng.choice(["", "\0", *own])
            for count in REPEATS:
                foreign = found[:start] + pumped * count + rest
                # On a busy machine one run may take several times as long.
                is_fast = any(processor_seconds(pattern, how, foreign) < MOST_SECONDS for _ in range(3))
                assert is_fast, f"{found[:start]!r} + {pumped!r} * {count} + {rest!r}"

    law()
