"""JSON state: nested Python values as JSON, and back; such as the state of a learning-rate scheduler.

tag  a dict with one key that begins with "$" stands for what JSON lacks: {"$float": "inf"}, {"$tuple": […]}
Law: what is decoded equals what was encoded: lists stay lists, tuples tuples, counters counters, and other dicts are
dicts. What could not come back so is refused, by its place.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fourfold.plan.decode import MAX_DEPTH, DecodeError
from fourfold.words.errors import Problem
from fourfold.words.field import to_builtin

MIN_INT, MAX_INT = -(2**63), 2**64 - 1  # what the JSON encoder writes
NEED = "numbers, strings, True, False, None, and lists, tuples and dicts of these"
MARK = "$"
FLOAT, TUPLE, DICT, COUNTER = "$float", "$tuple", "$dict", "$counter"
# A manifest nests a value in itself, and a tag nests what it stands for twice: so deep a value still fits.
MAX_STATE_DEPTH = MAX_DEPTH // 4


def state_problems(value: Any, place: str, *, depth: int = 0) -> Iterator[Problem]:
    """Every part of a value that JSON cannot give back, by its place in it, such as extra['best']."""
    if depth > MAX_STATE_DEPTH:
        yield Problem(f"{place} is nested too deeply", f"at most {MAX_STATE_DEPTH} levels")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from state_problems(key, f"the key {key!r} of {place}", depth=depth + 1)
            yield from state_problems(each, f"{place}[{key!r}]", depth=depth + 1)
    elif type(value) in (list, tuple):
        for index, each in enumerate(value):
            yield from state_problems(each, f"{place}[{index}]", depth=depth + 1)
    elif isinstance(value, int) and not MIN_INT <= value <= MAX_INT:
        yield Problem(f"{place} = {str(value)[:20]}…", "whole numbers from -2**63 to 2**64 - 1")
    elif value is not None and not isinstance(value, bool | int | float | str):
        attempt = "its item() or tolist()" if hasattr(value, "tolist") else ""
        yield Problem(f"{place} is a {type(value).__name__}", NEED, attempt)


def encode_state(value: Any) -> Any:
    """A value without problems, as JSON values."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT: str(float(value))}
    if isinstance(value, tuple):
        return {TUPLE: [encode_state(each) for each in value]}
    if isinstance(value, list):
        return [encode_state(each) for each in value]
    if not isinstance(value, dict):
        return to_builtin(value)
    is_counter = isinstance(value, Counter)
    if is_counter or any(not isinstance(key, str) or key.startswith(MARK) for key in value):
        pairs = [[encode_state(key), encode_state(each)] for key, each in value.items()]
        return {COUNTER if is_counter else DICT: pairs}
    return {key: encode_state(each) for key, each in value.items()}


def decode_state(value: Any) -> Any:
    """The value that was encoded. Raises DecodeError for JSON that `encode_state` has not made."""
    if isinstance(value, list):
        return [decode_state(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    tags = [key for key in value if key.startswith(MARK)]
    if not tags:
        return {key: decode_state(each) for key, each in value.items()}
    try:
        ((tag, content),) = value.items()
        return _decode_tag(tag, content)
    except (ValueError, TypeError, KeyError):
        raise DecodeError(f"a value of {', '.join(tags)} that is not written as one") from None


def _decode_tag(tag: str, content: Any) -> Any:
    if tag == FLOAT:
        return float({"inf": "inf", "-inf": "-inf", "nan": "nan"}[content])
    decoded = decode_state(content)
    if not isinstance(decoded, list):
        raise DecodeError(f"a value of {tag} without a list")
    if tag == TUPLE:
        return tuple(decoded)
    pairs = dict(decoded)
    return {DICT: pairs, COUNTER: Counter(pairs)}[tag]
