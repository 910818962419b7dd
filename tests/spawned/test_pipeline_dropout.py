"""The law of dropout with pp > 1: masks follow from the microbatch and the block, not from stage or schedule."""

import pytest
import torch
from torch import nn

from fourfold.axes.pipeline.work.chain import Chain, seeded_segments
from tests.spawned.pipeline_dropout import one_process

RUNS = [
    {"pp": 4, "schedule": "gpipe"},
    {"pp": 2, "dp": 2},
    {"pp": 2, "dp": 2, "schedule": "interleaved", "interleave": 2},
    {"pp": 2, "dp": 2, "schedule": "zero-bubble"},
    {"pp": 4, "recompute": "full"},
    {"pp": 2, "dp": 2, "recompute": "selective", "zero": 1},
]


def test_stages_drop_what_one_process_drops(world):
    ranks = world(4).run("tests.spawned.pipeline_dropout:trainings", runs=RUNS, time_limit_seconds=200)
    for index, fields in enumerate(RUNS):
        want = one_process(fields.get("dp", 1))
        for rank in ranks:
            assert rank[index].keys() == want.keys()
            for name, weight in want.items():
                got = torch.tensor(rank[index][name], dtype=torch.float64)
                assert got == pytest.approx(torch.tensor(weight, dtype=torch.float64), abs=1e-9), (fields, name)


def test_blocks_and_microbatches_drop_differently():
    model, masks, before = nn.ModuleList([nn.Dropout(), nn.Dropout()]), [], torch.get_rng_state()
    for microbatch in (1, 2):
        with seeded_segments(model, Chain(("0", "1")), microbatch, torch.device("cpu")):
            masks += [tuple(block(torch.ones(64)).tolist()) for block in model]
    assert len(set(masks)) == 4
    assert torch.equal(torch.get_rng_state(), before)
