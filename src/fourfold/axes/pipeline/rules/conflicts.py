"""Conflicts: what does not go with recompute, asynchronous schedules, and a weight that two stages use."""

from collections.abc import Mapping, Sequence

from fourfold.plan.decode import format_pair
from fourfold.words.errors import Problem

# By field: the values that go with an asynchronous schedule, and what the others would need.
SYNCHRONOUS_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "zero": ((0,), "whole weights on each rank, of which older versions are kept"),
    "update": (("after",), "updates behind the last backward of a batch"),
    "sync": (("step",), "gradients that are summed for every batch"),
    "codec": (("none",), "gradients that are summed as they are: those of several batches are under way"),
    "precision": (("keep", "bf16"), "updates that no overflow of another stage can stop"),
    "unused": (("error",), "a gradient of every parameter in every batch"),
    "offload": (("none",), "optimizer states on the device: updates run between forwards"),
}

# By schedule: what recompute would break.
NO_RECOMPUTE: dict[str, str] = {
    "zero-bubble": "a backward in one piece: activations that are computed again would be held until W",
    "pipedream": "the weights of the forward when backward computes blocks again: there may be newer ones by then",
    "2bw": "the weights of the forward when backward computes blocks again: there may be newer ones by then",
}


def recompute_problems(recompute: str, schedule: str, *, divides_backward: bool) -> list[Problem]:
    """Why the backward of a schedule cannot compute blocks again. `divides_backward`: its list has halves of it."""
    need = NO_RECOMPUTE.get("zero-bubble" if divides_backward else schedule)
    if recompute == "none" or need is None:
        return []
    divided = ", which divides backward," if divides_backward else ""
    got = f'schedule = "{schedule}"{divided} with recompute = "{recompute}"'
    return [Problem(got, need, 'recompute = "none", or schedule = "1f1b"')]


def asynchronous_problems(schedule: str, values: Mapping[str, object], clip: float | None) -> list[Problem]:
    """The settings that do not go with a schedule whose stages update without waiting for each other.

    values  of the plan, by field
    """
    got, sync = f'schedule = "{schedule}"', 'schedule = "1f1b"'
    problems = [
        Problem(f"{got} with {format_pair(field, values[field])}", need, f"{format_pair(field, allowed[0])}, or {sync}")
        for field, (allowed, need) in SYNCHRONOUS_ONLY.items()
        if values[field] not in allowed
    ]
    if clip is not None:
        need = "updates that do not wait for the gradients of other stages"
        problems.append(Problem(f"{got} with clip = {clip:g}", need, f"clip = none, or {sync}"))
    return problems


def tie_problems(names: Sequence[str], update: str, *, is_asynchronous: bool = False) -> list[Problem]:
    """The settings that do not go with these weights, which two stages use."""
    if not names:
        return []
    problems, which = [], f"{', '.join(names[:3])}, which two stages use"
    if update == "in_forward":
        need = "updated weights in front of the forward, when they are copied to the other stage"
        problems.append(Problem(f'update = "{update}" and {which}', need, 'update = "after", or weights of their own'))
    if is_asynchronous:
        need = "a weight that all stages have in the same version"
        attempt = 'schedule = "1f1b", or weights of their own'
        problems.append(Problem(f"an asynchronous schedule and {which}", need, attempt))
    return problems
