"""Rank memory: the peak of a rank as predicted, next to that of a fake rank, and the CPU time that facts take.

    python -m bench.rank_memory

predicted  from the facts of one block and the ends: `predict_memory`
fake rank  runs the whole list of its place on the meta device: `bench/fake_rank.py`
Law: both hold weights, gradients and states whole, so that only working memory differs.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.fake_rank import rank_bytes
from bench.measurement import describe_machine, format_table
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.planner.predict.memory import predict_memory
from fourfold.planner.task_facts.source import TaskFacts
from fourfold.tasks import hf, lm
from fourfold.words.task import Task

MIB = 2**20
SIZES = {"width": {"n_embd": 512, "n_head": 8}, "words": {"vocab_size": 50_257, "n_positions": 1024}}
FOUR: Mapping[str, Any] = {"microbatches": 4}
PLANS: tuple[Mapping[str, Any], ...] = (
    {},
    {"recompute": "full"},
    {"precision": "bf16", "recompute": "selective"},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    {"cp": 4},
    {"cp": 4, "ulysses": 2},
    {"pp": 2, "schedule": "gpipe", **FOUR},
    {"pp": 2, "schedule": "1f1b", "recompute": "full", **FOUR},
    {"pp": 2, "schedule": "interleaved", "interleave": 2, **FOUR},
    {"pp": 4, "schedule": "zero-bubble", "microbatches": 8},
    {"pp": 2, "tp": 2, "cp": 2, "schedule": "1f1b", **FOUR},
)


def gpt2(folder: Path, layers: int) -> Task:
    """A model of transformers on the meta device, whose head is tied to its embedding."""
    path = folder / f"gpt2-{layers}.json"
    fields = {"model_type": "gpt2", "n_layer": layers, **SIZES["width"], **SIZES["words"]}
    path.write_text(json.dumps(fields))
    return hf.task(str(path), length=512, batch_size=32)


def memory_row(name: str, source: TaskFacts, fields: Mapping[str, Any]) -> list[str]:
    """The place whose prediction is furthest from its fake rank."""
    plan = Plan(**fields)
    topology = Topology.regular(hosts=1, ranks_per_host=plan.mesh.size, device="cuda")
    predicted = predict_memory(lower(plan, source.specs(plan), topology, source.update_spec), source)
    pairs = [(parts.total, rank_bytes(source, plan, place).total) for place, parts in enumerate(predicted)]
    ours, fake = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    text = " ".join(f"{key}={value}" for key, value in fields.items()) or "one rank"
    return [name, text, f"{ours / MIB:.1f}", f"{fake / MIB:.1f}", f"{ours / fake - 1:+.2%}"]


def seconds_of_facts(task: Task, plans: tuple[Plan, ...]) -> list[float]:
    """CPU seconds of the facts of each plan, which other processes change less; the first one makes the model too."""
    source, found = TaskFacts(task), []
    for plan in plans:
        began = time.process_time()
        source.facts(plan)
        found.append(time.process_time() - began)
    return found


def main() -> None:
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        tasks = {"lm": lm.task(layers=8, batch_size=32), "gpt2, 8 layers": gpt2(Path(folder), 8)}
        deep = gpt2(Path(folder), 96)
        rows = [["model", "plan", "predicted MiB", "fake rank MiB", "error of the worst place"]]
        for name, task in tasks.items():
            source = TaskFacts(task)
            rows += [memory_row(name, source, fields) for fields in PLANS]
        print(format_table(rows))
        plans = (Plan(), Plan(tp=2), Plan(cp=4))
        rows = [["CPU seconds of facts", *("one rank", "tp=2", "cp=4")]]
        for name, task in {"lm": lm.task(), "gpt2, 96 layers": deep}.items():
            seconds_of_facts(task, plans[:1])  # imports
            rows.append([name, *(f"{each:.2f}" for each in seconds_of_facts(task, plans))])
        print(format_table(rows))


if __name__ == "__main__":
    main()
