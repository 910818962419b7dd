"""Argument checks: what a value passed in Python may be. One rule per kind of value, with the same words everywhere.

Law: every function returns the problems of one argument, or none if it is valid; no comparison here can raise.
"""

import inspect
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import Problem, closest_match

OPTIMIZER_NEED = "a function from parameters to a torch optimizer"
OPTIMIZER_ATTEMPT = "functools.partial(torch.optim.AdamW, lr=3e-4)"
SCHEDULER_NEED = "a function (optimizer) or (optimizer, steps) that makes a torch scheduler"
SCHEDULER_ATTEMPT = "lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)"
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1  # what torch.manual_seed takes


def int_problems(name: str, value: Any, *, minimum: int, optional: bool = False, attempt: str = "") -> list[Problem]:
    """Require an integer of at least `minimum`; `optional` also allows None."""
    is_valid = is_int(value) and value >= minimum
    return _problems(
        name, value, f"a whole number of at least {minimum}", attempt, is_valid=is_valid, optional=optional
    )


def positive_problems(name: str, value: Any, *, optional: bool = False, attempt: str = "") -> list[Problem]:
    """Require a number above 0, infinity included; `optional` also allows None."""
    is_valid = is_real(value) and value > 0
    return _problems(name, value, "a number above 0", attempt, is_valid=is_valid, optional=optional)


def seed_problems(value: Any, name: str = "seed") -> list[Problem]:
    """Require a seed that torch's generators accept."""
    is_valid = is_int(value) and MIN_SEED <= value <= MAX_SEED
    return _problems(name, value, "a whole number from -2**63 to 2**64 - 1", f"{name}=0", is_valid=is_valid)


def tensor_rule_problems(name: str, value: Any) -> list[Problem]:
    """Rules of the tensor axis are texts by pattern; what they mean is checked with the model."""
    is_valid = isinstance(value, Mapping) and all(isinstance(each, str) for pair in value.items() for each in pair)
    need, attempt = "a dict from patterns of module names to styles", f'{name}={{"*.up": "column", "*.down": "row"}}'
    return _problems(name, value, need, attempt, is_valid=is_valid)


def str_problems(
    name: str, value: Any, *, optional: bool = False, path: bool = False, attempt: str = ""
) -> list[Problem]:
    """Require a string; `path` also allows an object such as pathlib.Path."""
    is_valid = isinstance(value, str) or (path and isinstance(value, os.PathLike))
    return _problems(name, value, f"a {'path' if path else 'string'}", attempt, is_valid=is_valid, optional=optional)


def callable_problems(name: str, value: Any, *, need: str, optional: bool = False, attempt: str = "") -> list[Problem]:
    """Require a callable."""
    return _problems(name, value, need, attempt, is_valid=callable(value), optional=optional)


def optimizer_factory_problems(value: Any) -> list[Problem]:
    """Require a function that makes an optimizer. For an optimizer instance, suggest the factory that would make it."""
    groups = getattr(value, "param_groups", None)
    if groups and not isinstance(value, type):
        name, lr = type(value).__name__, groups[0].get("lr", 1e-3)
        attempt = f"functools.partial(torch.optim.{name}, lr={float(lr):g})"
        return [Problem(f"optimizer = an instance of {name}", OPTIMIZER_NEED, attempt)]
    return callable_problems("optimizer", value, need=OPTIMIZER_NEED, attempt=OPTIMIZER_ATTEMPT)


def scheduler_factory_problems(value: Any) -> list[Problem]:
    """Require a function (optimizer) or (optimizer, steps) that makes a scheduler and needs nothing else."""
    if value is None:
        return []
    if hasattr(value, "optimizer") and hasattr(value, "state_dict"):
        name = type(value).__name__
        return [
            Problem(f"scheduler = an instance of {name}", SCHEDULER_NEED, f"lambda optimizer: {name}(optimizer, …)")
        ]
    if not callable(value):
        return [Problem(format_argument("scheduler", value), f"{SCHEDULER_NEED}, or None", SCHEDULER_ATTEMPT)]
    try:
        parameters = [*inspect.signature(value).parameters.values()]
    except (TypeError, ValueError):  # a function without a signature
        return []
    name = getattr(value, "__name__", None) or getattr(getattr(value, "func", None), "__name__", type(value).__name__)
    if not any(each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters):
        return [Problem(f"scheduler = {name}, which takes no optimizer", SCHEDULER_NEED, SCHEDULER_ATTEMPT)]
    required = [p for p in parameters[1:] if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [each.name for each in required if each.name != "steps"]
    if not missing:
        return []
    arguments = ", ".join(f"{each}=…" for each in missing)
    attempt = f"functools.partial({name}, {arguments})"
    if any(each.name == "total_steps" for each in parameters):
        attempt = f"lambda optimizer, steps: {name}(optimizer, {arguments}, total_steps=steps)"
    return [Problem(f"scheduler = {name} also needs {' and '.join(missing)}", SCHEDULER_NEED, attempt)]


def instance_problems(name: str, value: Any, kind: type, *, optional: bool = False, attempt: str = "") -> list[Problem]:
    """Require an instance of `kind`."""
    return _problems(name, value, f"a {kind.__name__}", attempt, is_valid=isinstance(value, kind), optional=optional)


def tokenizer_problems(name: str, value: Any) -> list[Problem]:
    """Require a tokenizer as transformers' are, or None."""
    is_valid = callable(getattr(value, "save_pretrained", None)) and not isinstance(value, type)
    need, attempt = "an object with save_pretrained(folder)", "transformers.AutoTokenizer.from_pretrained(…)"
    return _problems(name, value, need, attempt, is_valid=is_valid, optional=True)


def name_list_problems(name: str, value: Any, *, optional: bool = False) -> list[Problem]:
    """Require a list or tuple of different strings, at least one."""
    if value is None and optional:
        return []
    if isinstance(value, list | tuple) and 0 < len(value) == len({each for each in value if isinstance(each, str)}):
        return []
    return [Problem(f"{name} = {value!r}"[:80], "a list of different names", f'{name}=["x", "y"]')]


def unknown_name_problems(what: str, names: Iterable[str], known: Sequence[str]) -> list[Problem]:
    """Require names of columns, or of whatever `what` says, that are among the known ones; suggest the nearest."""
    need = f"one of {comma_list(known)}"
    unknown = [name for name in names if name not in known]
    return [Problem(f"no {what} {name!r}", need, closest_match(name, known) or "") for name in unknown]


def mapping_problems(name: str, value: Any, *, optional: bool = False) -> list[Problem]:
    """Require a mapping; `optional` also allows None."""
    return _problems(name, value, "a dict", is_valid=isinstance(value, Mapping), optional=optional)


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is one of Python's or NumPy's integers; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> TypeGuard[float]:
    """Whether a value is a real number and not NaN; infinity counts as a real number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def format_argument(name: str, value: Any) -> str:
    """The argument as an error shows it: its value if that is short, else its type."""
    if value is None or isinstance(value, str | numbers.Number):
        written = repr(value)
        return f"{name} = {written if len(written) <= 60 else written[:60] + '…'}"
    if isinstance(value, type):
        return f"{name} = the class {value.__name__}"
    return f"{name} of type {type(value).__name__}"


def _problems(
    name: str, value: Any, need: str, attempt: str = "", *, is_valid: bool, optional: bool = False
) -> list[Problem]:
    if is_valid or (value is None and optional):
        return []
    return [Problem(format_argument(name, value), need + (", or None" if optional else ""), attempt)]
