"""Interleave: what does not go with several stages on one place of the pipeline axis.

Their parameters share buckets: a bucket is complete when the backwards of all of them have ended.
"""

from fourfold.words.errors import Problem


def interleave_problems(interleave: int, zero: int, update: str) -> list[Problem]:
    """The settings that do not go with so many stages at a place. `zero`: 0, if nothing rests split."""
    if interleave == 1:
        return []
    problems, own = [], f"interleave = {interleave}"
    if zero >= 2:
        need = "gradients that are reduced once in a step: those of one stage come before those of the next"
        problems.append(Problem(f"{own} with zero = {zero}", need, "zero = 1, or interleave = 1"))
    if update != "after":
        need = "updates behind the backwards of all stages of a rank"
        problems.append(Problem(f'{own} with update = "{update}"', need, 'update = "after", or interleave = 1'))
    return problems
