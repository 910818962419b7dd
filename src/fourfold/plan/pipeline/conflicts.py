"""Conflicts: what does not go with interleaved stages, and with a weight that two stages use."""

from collections.abc import Mapping, Sequence

from fourfold.words.errors import Problem

# By field: the values that a pipeline can have, and what the others would need.
NOT_BUILT: dict[str, tuple[tuple[str, ...], str]] = {
    "sync": (("step",), "the loss count of each data rank on all of its stages"),
    "batch_norm": (("refuse", "local"), "statistics of the stages' own data ranks"),
    "unused": (("refuse",), "gradients that every stage knows to be missing"),
    "residual": (("whole",), "activations of which each tensor rank sends its tokens"),
    "codec": (("none",), "codecs whose state is kept by stage"),
    "precision": (("keep", "bf16"), "overflows that every stage knows of"),
}


def interleave_problems(interleave: int, zero: int, update: str) -> list[Problem]:
    """The settings that do not go with so many stages at a place, whose parameters share buckets.

    `zero`: 0, if nothing rests split.
    """
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
