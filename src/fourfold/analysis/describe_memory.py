"""Describe the memory of a plan: what the ranks of a host hold together, and what one rank holds on a network.

place  an index on the pipeline axis
Law: stages differ, so each place has numbers of its own; of its tensor ranks, the one that holds most counts.
"""

from collections.abc import Mapping, Sequence

from fourfold.analysis.describe_programs import format_ranges, indent
from fourfold.plan.lowering import Blueprint, bytes_by_bucket
from fourfold.plan.memory import HostMemoryUse, HostRanks, has_unbucketed_grads, host_memory_use
from fourfold.words.text_table import table_lines
from fourfold.words.units import format_bytes

NETWORK, SHARED_MEMORY = "over a network", "in shared memory"


def rank_memory(blueprint: Blueprint) -> list[HostMemoryUse]:
    """By place: bytes of one rank, from step to step, without activations."""
    plan, uses = blueprint.plan, dict[int, list[HostMemoryUse]]()
    for group in blueprint.groups:
        size = len(group.ranks)
        ranks = HostRanks(size, plan.shard_groups, has_shared_memory=False)
        of = bytes_by_bucket(plan, group.stage, blueprint.update_spec)
        together = host_memory_use(of, zero=plan.zero, host=ranks)
        uses.setdefault(group.stage.stage, []).append(HostMemoryUse(*(each / size for each in together)))
    return [max(uses[place], key=lambda use: use.total) for place in sorted(uses)]


def _memory_of_ranks(by_place: Sequence[HostMemoryUse], size: int) -> dict[str, HostMemoryUse]:
    """What a rank on a network holds, by what is printed of it; places that hold as much are one."""
    if size == 1:
        return {"one rank": by_place[0]}
    places_of: dict[tuple[str, ...], list[int]] = {}
    for place, use in enumerate(by_place):
        places_of.setdefault(tuple(map(format_bytes, use)), []).append(place)
    where = [(each[0], f" at pp {format_ranges(each)}" if len(places_of) > 1 else "") for each in places_of.values()]
    return {f"a rank{at} on a network of {size}": by_place[place] for place, at in where}


def format_memory(blueprints: Mapping[str, Blueprint]) -> str:
    """The memory of a plan. `blueprints`: by how its ranks reach each other."""
    plan = next(iter(blueprints.values())).plan
    size = plan.mesh.size
    uses: dict[str, HostMemoryUse] = {}
    for place, blueprint in blueprints.items():
        if place == NETWORK:
            uses |= _memory_of_ranks(rank_memory(blueprint), size)
        else:
            uses[f"a host of {size} ranks"] = blueprint.host_memory
    kinds = [kind for kind in HostMemoryUse._fields if any(getattr(use, kind) for use in uses.values())]
    rows = [(*kinds, "in all", "")]
    rows += [(*(format_bytes(getattr(u, k)) for k in kinds), format_bytes(u.total), name) for name, u in uses.items()]
    lines = table_lines(rows, ">" * (len(kinds) + 1) + "<")
    if has_unbucketed_grads(plan):
        lines.append("gradients stay where autograd puts them until the update has used them")
    if plan.codec != "none":
        lines.append("the state of the codec is not counted")
    return "memory   kept between steps, without activations\n" + indent(lines)
