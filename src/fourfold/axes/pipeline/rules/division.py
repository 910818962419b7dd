"""Division: which blocks of a chain each pipeline stage computes.

block  one of the modules that a model calls one after the other
cost   a number for each block, and for what the model computes before the first and behind the last of them
names  the blocks of each stage as a user writes them: `"net1; relu net2"`; a stage's names have spaces between them
Law: every stage has consecutive blocks, at least one; together they have each block once.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from fourfold.words.errors import Problem, closest_match

EVEN = "even"


class StageSpec(NamedTuple):
    """Into how many stages a plan divides a model, and how.

    division    the plan's `stages`
    num_stages  stage s is at place s % num_places of the pipeline axis
    """

    division: str = EVEN
    num_stages: int = 1
    num_places: int = 1


def stages_problems(text: str) -> list[Problem]:
    """The problems of the plan's `stages` by itself."""
    groups = stage_names(text)
    if groups is not None and not all(groups):
        return [Problem(f"stages = {text!r}", "at least one name for each stage", 'stages = "net1; relu net2"')]
    if text == EVEN or groups is not None or _counts(text) is not None:
        return []
    need = f'"{EVEN}", how many blocks each stage has, or their names'
    return [Problem(f"stages = {text!r}", need, 'stages = "3,2,2,1", or "net1; relu net2"')]


def stage_names(text: str) -> list[list[str]] | None:
    """By stage: the names of its blocks; None: the text has none."""
    return [group.split() for group in text.split(";")] if ";" in text else None


def stage_count_problems(text: str, num_stages: int) -> list[Problem]:
    """The problem of a division into more or fewer stages than the plan has, whatever the model is."""
    parts = stage_names(text) or _counts(text)
    if parts is None or len(parts) == num_stages:
        return []
    return [Problem(f"stages = {text!r}: {len(parts)} stages", f"{num_stages}: pp × interleave", f'stages = "{EVEN}"')]


def name_problems(
    groups: Sequence[Sequence[str]], blocks: Sequence[str], modules: Sequence[str], num_stages: int
) -> list[Problem]:
    """Why names do not divide a chain. `groups`: by stage, full names where they are known; `blocks`: of the chain, in
    order; `modules`: all of the model.
    """
    problems, own = [], f"stages = {'; '.join(' '.join(group) for group in groups)!r}"
    if len(groups) != num_stages:
        problems.append(Problem(f"{own}: {len(groups)} stages", f"{num_stages}: pp × interleave"))
    named = [name for group in groups for name in group]
    for name in dict.fromkeys(each for each in named if each not in blocks):
        close = closest_match(name, blocks) or closest_match(name, modules)
        problems.append(Problem(f"{own}: {name!r}", f"blocks of the chain: {', '.join(blocks)}", close or ""))
    problems += [
        Problem(f"{own}: {name!r} {named.count(name)} times", "each block once")
        for name in dict.fromkeys(named)
        if named.count(name) > 1
    ]
    if missing := [name for name in blocks if name not in named]:
        problems.append(Problem(f"{own} without {', '.join(missing)}", "each block of the chain"))
    if not problems and named != list(blocks):
        order = "; ".join(f"stage {stage}: {' '.join(group)}" for stage, group in enumerate(groups))
        problems.append(Problem(order, f"the order of the chain: {' '.join(blocks)}"))
    return problems


def division_problems(text: str, num_blocks: int, num_stages: int) -> list[Problem]:
    """Why a chain of so many blocks cannot be divided as the plan says."""
    if not num_blocks:
        got = f"{num_stages} stages and a model without a list of blocks"
        need = "at least two blocks in an nn.ModuleList or nn.Sequential, or stages by the names of modules"
        return [Problem(got, need, 'stages = "net1; relu net2", with names of the model, in the order of their calls')]
    if num_blocks < num_stages:
        got = f"{num_stages} stages and a chain of {num_blocks} blocks"
        attempt = f"pp × interleave of at most {num_blocks}, or more layers"
        return [Problem(got, "at least one block for each stage", attempt)]
    counts = _counts(text)
    if counts is None or (len(counts) == num_stages and sum(counts) == num_blocks):
        return []
    got = f"stages = {text!r}: {len(counts)} stages, {sum(counts)} blocks"
    even = ",".join(str(len(part)) for part in divide_evenly([1.0] * num_blocks, 0.0, 0.0, num_stages))
    return [Problem(got, f"{num_stages} stages, {num_blocks} blocks", f'stages = "{even}"')]


def divide(text: str, costs: Sequence[float], first: float, last: float, num_stages: int) -> tuple[range, ...]:
    """The blocks of each stage. `first`, `last`: costs before the first block and behind the last one.

    `division_problems` has found none.
    """
    counts = _counts(text)
    if counts is None:
        return divide_evenly(costs, first, last, num_stages)
    stops = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    return tuple(range(stop - count, stop) for stop, count in zip(stops, counts, strict=True))


def divide_evenly(costs: Sequence[float], first: float, last: float, num_stages: int) -> tuple[range, ...]:
    """The division whose most costly stage costs least, by dynamic programming; of equal ones, early stages have less.

    The last stage keeps no activations of other microbatches, the first one keeps most: so a block too many is better
    on a late stage.
    """
    return _divide_evenly(tuple(costs), first, last, num_stages)


@functools.lru_cache(maxsize=256)  # a search divides the same chain for many plans
def _divide_evenly(costs: tuple[float, ...], first: float, last: float, num_stages: int) -> tuple[range, ...]:
    num_blocks = len(costs)
    sums = [first]
    for index, cost in enumerate(costs):
        sums.append(sums[-1] + cost + (last if index == num_blocks - 1 else 0.0))
    # best[k][n]: the least greatest cost of k stages with the first n blocks, and where the last of these begins.
    best = [[(sums[n], 0) for n in range(num_blocks + 1)]]
    for stage in range(1, num_stages):
        row = [(float("inf"), 0)] * (num_blocks + 1)
        for stop in range(stage + 1, num_blocks + 1):
            row[stop] = min((max(best[-1][start][0], sums[stop] - sums[start]), start) for start in range(stage, stop))
        best.append(row)
    stops, stop = [], num_blocks
    for stage in reversed(range(num_stages)):
        stops.append(stop)
        stop = best[stage][stop][1]
    starts = [0, *reversed(stops[1:])]
    return tuple(range(start, stop) for start, stop in zip(starts, reversed(stops), strict=True))


def _counts(text: str) -> list[int] | None:
    """The blocks of each stage, if the text has counts."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        return None
    return [int(part) for part in parts]
