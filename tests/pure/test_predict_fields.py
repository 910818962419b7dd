"""Every field of a plan that costs something is priced: seconds or bytes of a prediction depend on it."""

from collections.abc import Mapping
from typing import NamedTuple

import pytest

from fourfold.plan.lowering import lower
from fourfold.plan.param_spec import UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS
from fourfold.plan.topology import Topology
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.predict.step import predict_step
from tests.planner_cases import ChainFacts, LinearPrices

CHAIN = ChainFacts(width=128, update_spec=UpdateSpec(num_states=(2,)))
NORMS = ChainFacts(norm_channels=(64, 64))
GPT = GptFacts(layers=4, width=64, heads=4, vocabulary=128, length=32, batch_size=16)
WRITTEN = """0: F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3
1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3"""
SECONDS, MEMORY, BYTES = "seconds", "memory", "sent"


class Row(NamedTuple):
    """How a field enters.

    how      in words
    changes  what of a prediction it changes here: seconds, memory, bytes sent
    value    of the field, in a plan with `others`; against its default
    """

    how: str
    changes: tuple[str, ...]
    value: object
    others: Mapping[str, object] = {}
    facts: FactsSource = CHAIN
    device: str = "cuda"


PIPELINE = {"pp": 2, "microbatches": 4}
PRICED = {
    "pp": Row("segments by stage, messages between stages, the schedule's waits", (SECONDS, MEMORY, BYTES), 2),
    "dp": Row("samples of a rank, collectives of buckets", (SECONDS, BYTES), 2),
    "cp": Row("facts: tokens of a rank, collectives inside segments; gradients are summed over it too", (SECONDS,), 2),
    "tp": Row(
        "facts: shards of products, collectives inside segments; specs: elements of buckets", (SECONDS, MEMORY), 2
    ),
    "shard": Row(
        "a reduce-scatter within, an all-reduce between the groups that split a bucket",
        (SECONDS, MEMORY),
        2,
        {"dp": 4, "zero": 1},
    ),
    "zero": Row(
        "the collectives of a bucket, the elements that a rank updates, what rests", (SECONDS, MEMORY), 1, {"dp": 2}
    ),
    "microbatches": Row("passes over segments; gradients are added; activations in flight", (SECONDS, MEMORY), 4),
    "schedule": Row("the program that is simulated", (MEMORY,), "gpipe", {**PIPELINE, "pp": 4, "microbatches": 8}),
    "stages": Row("which segments a stage has", (SECONDS, MEMORY), "6,2", PIPELINE),
    "interleave": Row("the program; stages of a place", (SECONDS,), 4, {**PIPELINE, "schedule": "interleaved"}),
    "max_in_flight": Row(
        "the program; activations in flight", (SECONDS, MEMORY), 3, {**PIPELINE, "schedule": "zero-bubble"}
    ),
    "program": Row("the program itself", (MEMORY,), WRITTEN, {**PIPELINE, "schedule": "written"}),
    "recompute": Row("segments: a second forward; what autograd keeps", (SECONDS, MEMORY), "full"),
    "edge": Row("bytes of a message; two passes to encode and decode it", (SECONDS, BYTES), "int8", PIPELINE),
    "edge_density": Row("bytes of a message", (SECONDS, BYTES), 0.3, {**PIPELINE, "edge": "dct"}),
    "ring": Row("facts: what attention computes and sends", (SECONDS,), "rsa", {"cp": 4}, GPT),
    "ulysses": Row("facts: an exchange of heads", (SECONDS,), 2, {"cp": 2}, GPT),
    "sequence_parallel": Row(
        "facts: collectives inside segments, activations", (SECONDS, MEMORY), True, {"tp": 2}, GPT
    ),
    "update": Row(
        "the place of updates in the program, and of what they wait for",
        (SECONDS,),
        "in_forward",
        {"dp": 2, "zero": 1, "bucket_bytes": 65536},
    ),
    "sync": Row(
        "no reductions; an average in one of many steps, whose mean is taken", (SECONDS, MEMORY), "local", {"dp": 2}
    ),
    "local_steps": Row("how often weights are averaged", (SECONDS, BYTES), 100, {"dp": 2, "sync": "local"}),
    "outer_momentum": Row("a state of the outer update", (SECONDS, MEMORY), 0.9, {"dp": 2, "sync": "local"}),
    "codec": Row(
        "bytes of a bucket's messages; its computing; what it remembers", (SECONDS, MEMORY, BYTES), "topk", {"dp": 2}
    ),
    "codec_rank": Row("bytes of a bucket's messages", (SECONDS, BYTES), 16, {"dp": 2, "codec": "powersgd"}),
    "codec_density": Row("bytes of a bucket's messages", (SECONDS, BYTES), 0.1, {"dp": 2, "codec": "topk"}),
    "offload": Row(
        "gradients and weights between device and host; states are not on the device",
        (SECONDS, MEMORY),
        "states",
        {"dp": 2},
    ),
    "precision": Row(
        "facts; bytes of buckets, master weights; the norm that tells of overflows", (SECONDS, MEMORY), "fp16"
    ),
    "reduce_dtype": Row("bytes of gradients", (SECONDS, MEMORY, BYTES), "bf16", {"dp": 2}),
    "batch_norm": Row("facts: channels; exchanges of data ranks in each pass", (SECONDS,), "sync", {"dp": 2}, NORMS),
    "unused": Row("a sum of flags before updates", (SECONDS,), "allow", {"dp": 2}, CHAIN, "cpu"),
    "bucket_bytes": Row("how many collectives there are, and how early each begins", (SECONDS,), 65536, {"dp": 2}),
    "transport": Row(
        "in shared memory ranks sum themselves; else messages overlap, and all hold weights",
        (SECONDS, MEMORY),
        "gloo",
        {"dp": 2, "zero": 1},
        CHAIN,
        "cpu",
    ),
}
NOT_HERE = {
    "dims": "the rules of a task's model: facts of a task, tests/simulated/test_task_facts.py",
    "outer_lr": "a number: costs nothing",
    "codec_refresh_steps": "how often thresholds are found, which the price of a codec includes",
}


OTHER_ORDER = WRITTEN.replace("F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2", "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2")
BASES: dict[str, dict[str, object]] = {"interleave": {"interleave": 2}, "program": {"program": OTHER_ORDER}}
"""What a field is set to before, where its default is refused."""


def measures(plan: Plan, row: Row) -> dict[str, object]:
    """What a prediction says, by what may change."""
    topology = Topology.regular(hosts=1, ranks_per_host=plan.mesh.size, device=row.device)
    blueprint = lower(plan, row.facts.specs(plan), topology, row.facts.update_spec)
    found: Prediction = predict_step(blueprint, row.facts, LinearPrices(overlap_slowdown=1.2))
    return {SECONDS: round(found.seconds, 12), MEMORY: found.memory, BYTES: found.sent_bytes}


@pytest.mark.parametrize("field", PRICED)
def test_a_prediction_depends_on_every_field_that_costs_something(field):
    row = PRICED[field]
    base: dict[str, object] = BASES.get(field, {})
    before, after = (measures(Plan.from_dict({**row.others, **own}), row) for own in (base, {field: row.value}))
    assert [kind for kind in row.changes if before[kind] == after[kind]] == []


def test_no_field_is_forgotten():
    assert {*PRICED, *NOT_HERE} == set(FIELDS)
    assert not set(PRICED) & set(NOT_HERE)
    assert all(row.how for row in PRICED.values())
