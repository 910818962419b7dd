"""Conflicts: what does not go with a weight that two stages use."""

from collections.abc import Sequence

from fourfold.words.errors import Problem


def tie_problems(names: Sequence[str], update: str) -> list[Problem]:
    """The settings that do not go with these weights, which two stages use."""
    if not names:
        return []
    problems, which = [], f"{', '.join(names[:3])}, which two stages use"
    if update == "in_forward":
        need = "updated weights in front of the forward, when they are copied to the other stage"
        problems.append(Problem(f'update = "{update}" and {which}', need, 'update = "after", or weights of their own'))
    return problems
