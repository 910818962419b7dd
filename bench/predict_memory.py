"""Bytes predicted next to bytes held: a task on every mesh of four ranks, and at every zero level.

kept     by all ranks from step to step: as counted (`torch_kit/memory.py`), over what the facts and the plan predict
peak     of all ranks in later steps, beyond what their processes had before there was a model: the most that the
         kernel has counted (PSS of private and shared memory, sampled), over the predicted peak
Law: no step is timed, so other processes do not disturb.

    python -m bench.predict_memory [--cases gpt,mlp,lm] [--only pp2-tp2,…] [--steps 6]
"""

import argparse
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench.measurement import MB, PeakMemory, describe_machine, format_table
from bench.predict import FOUR, MODULE, TASKS, kept_bytes, names_of, predict_memory_of, topology_of
from bench.predict_worker import parse_plan, parse_task
from bench.process_world import World
from fourfold.plan.plan import Plan
from fourfold.planner.task_facts.source import TaskFacts
from fourfold.words.errors import FourfoldError
from fourfold.words.mesh import AXES

RANKS = 4
KEPT_TARGET, PEAK_TARGET = 0.02, 0.08
LIMIT_SECONDS = 300
UNTIMED = 3


class MemoryRow(NamedTuple):
    """Bytes of all ranks, predicted and measured."""

    name: str
    kept: float
    kept_predicted: float
    peak: float
    peak_predicted: float
    pss: float


def meshes(case: str) -> dict[str, Mapping[str, object]]:
    """The plans by name: every factorization of four, and zero 1 to 3 over data ranks."""
    found: dict[str, Mapping[str, object]] = {}
    for sizes in itertools.product((1, 2, 4), repeat=len(AXES)):
        mesh = {axis: size for axis, size in zip(AXES, sizes, strict=True) if size > 1}
        product = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        if product != RANKS or (case == "mlp" and mesh.get("cp")):
            continue
        fields: dict[str, object] = dict(mesh)
        if mesh.get("pp"):
            fields["microbatches"] = 4
        if case == "mlp" and mesh.get("pp") and mesh.get("tp"):
            fields["stages"] = "2,4"
        found["-".join(f"{axis}{size}" for axis, size in mesh.items())] = fields
    return found | {f"dp4-zero{level}": {"dp": 4, "zero": level} for level in (1, 2, 3)}


def measure(case: str, name: str, fields: Mapping[str, object], source: TaskFacts, steps: int) -> MemoryRow:
    words = ";".join(["fourfold", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())])
    plan: Plan = parse_plan(words)
    predicted = predict_memory_of(source, plan, topology_of(FOUR))
    peak = PeakMemory()
    with World(words, TASKS[case], num_ranks=RANKS, limit_seconds=LIMIT_SECONDS, module=MODULE) as world:
        before = sum(reply["before"] for reply in world.ready_replies)
        world.run_turn(untimed=UNTIMED, timed=1)  # what the dry run and the first step have freed is returned
        replies = world.run_turn(untimed=0, timed=steps, sample=peak.sample)
    total = sum(part.total for part in predicted) * RANKS / len(predicted)
    kept = sum(reply["kept"] for reply in replies)
    return MemoryRow(name, kept, kept_bytes(plan, predicted), peak.own_bytes - before, total, peak.pss_bytes)


def describe(rows: list[MemoryRow]) -> str:
    titles = ["", "kept MB", "of predicted", "", "peak MB", "of predicted", "", "PSS MB"]
    return format_table([titles, *map(_cells, rows)])


def _cells(row: MemoryRow) -> list[str]:
    kept, peak = row.kept / row.kept_predicted, row.peak / row.peak_predicted
    return [
        row.name,
        f"{row.kept / MB:.1f}",
        f"{kept:.3f}",
        "within" if abs(kept - 1) <= KEPT_TARGET else "missed",
        f"{row.peak / MB:.1f}",
        f"{peak:.3f}",
        "within" if abs(peak - 1) <= PEAK_TARGET else "missed",
        f"{row.pss / MB:.0f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=names_of(TASKS), default=tuple(TASKS))
    parser.add_argument("--only", type=names_of(meshes("gpt")), default=None)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    record: dict[str, list[Mapping[str, object]]] = {}
    try:
        for case in options.cases:
            source, chosen = TaskFacts(parse_task(TASKS[case])), meshes(case)
            rows = []
            for name, fields in chosen.items():
                if options.only is None or name in options.only:
                    rows.append(measure(case, name, fields, source, options.steps))
                    print(f"  {case} {name}", file=sys.stderr, flush=True)
            print(f"\n{case}, {RANKS} ranks\n{describe(rows)}", flush=True)
            record[case] = [row._asdict() for row in rows]
    except FourfoldError as error:
        print(f"\n{error}", flush=True)
        return 1
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
