"""Conflicts: what does not go with a pipeline, and with a weight that two stages use."""

from collections.abc import Mapping, Sequence

from fourfold.words.errors import Problem

# By field: the values that a pipeline can have, and what the others would need.
NOT_BUILT: dict[str, tuple[tuple[str, ...], str]] = {}


def tie_problems(names: Sequence[str], update: str, sync: str) -> list[Problem]:
    """The settings that do not go with these weights, which two stages use."""
    if not names:
        return []
    problems, which = [], f"{', '.join(names[:3])}, which two stages use"
    if update == "in_forward":
        need = "updated weights in front of the forward, when they are copied to the other stage"
        problems.append(Problem(f'update = "{update}" and {which}', need, 'update = "after", or weights of their own'))
    if sync == "local":
        need = "weights that are the same on all data ranks"
        problems.append(Problem(f'sync = "{sync}" and {which}', need, 'sync = "step", or weights of their own'))
    return problems


def not_built_problems(values: Mapping[str, str]) -> list[Problem]:
    """The settings that no pipeline has yet. `values`: of the plan, by field."""
    problems = []
    for field, (allowed, need) in NOT_BUILT.items():
        if values[field] not in allowed:
            attempt = f'{field} = "{allowed[0]}", or pp = 1'
            problems.append(
                Problem(f'pp > 1 with {field} = "{values[field]}"', f"{need} (not implemented yet)", attempt)
            )
    return problems
