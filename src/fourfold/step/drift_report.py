"""Drift report: the first weight in which replicas differ, by how much, and whether rounding explains it.

Law: every rank computes the same report from the same gathered fingerprints.
"""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fourfold.parts.comm.communicator import Communicator

WEIGHTS, MASTER_WEIGHTS, FROZEN = KINDS = ("weights", "master weights", "frozen weights")
TRAINED_KINDS = (WEIGHTS, MASTER_WEIGHTS)
"""What is compared with local batch norm: frozen weights may then hold a rank's own state."""


class Difference(NamedTuple):
    """The first weight that differs, and groups of ranks with the same values of it, the largest group first."""

    key: Sequence[Any]
    rank_groups: Sequence[Sequence[int]]
    num_more: int


def machine_fingerprint(communicator: Communicator) -> str:
    """What decides how this rank's updates round: ranks with the same fingerprint compute the same bits."""
    if communicator.device.type == "cuda":
        return f"{torch.cuda.get_device_name(communicator.device)}, torch {torch.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_processor_name()}, {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def first_difference(by_rank: Sequence[Sequence[Any]]) -> Difference | None:
    """The first difference, in the parameter order of the first rank that holds it; None if there is none."""
    ranks_by_value: dict[str, dict[int, list[int]]] = {}
    for rank, row in enumerate(by_rank):
        for key, value in row:
            ranks_by_value.setdefault(json.dumps(key), {}).setdefault(value, []).append(rank)
    differing = [(key, groups) for key, groups in ranks_by_value.items() if len(groups) > 1]
    if not differing:
        return None
    key, groups = differing[0]
    # The largest group first: it is most likely right.
    rank_groups = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    return Difference(json.loads(key), rank_groups, len(differing) - 1)


def describe_difference(difference: Difference, size: float, largest: float) -> str:
    kind, name = difference.key[:2]
    which = name if kind == WEIGHTS else f"{name} ({kind})"
    reference, *others = difference.rank_groups
    differ = "; ".join(f"{_rank_list(ranks, 'differs', 'differ')} from {_rank_list(reference)}" for ranks in others)
    more = f"; so do {difference.num_more} more" if difference.num_more else ""
    return f"{which}: {differ} by at most {size:.3g}, where weights reach {largest:.3g}{more}"


def _rank_list(ranks: Sequence[int], singular: str = "", plural: str = "") -> str:
    """The ranks, followed by a verb in the form that fits."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {singular}".rstrip()
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} {plural}".rstrip()


def is_rounding(difference: Difference, machines: Sequence[str]) -> bool:
    """Whether ranks with the same machine fingerprint agree: then different rounding explains the difference."""
    groups: dict[str, set[int]] = {}
    for index, ranks in enumerate(difference.rank_groups):
        for rank in ranks:
            groups.setdefault(machines[rank], set()).add(index)
    return all(len(each) == 1 for each in groups.values())
