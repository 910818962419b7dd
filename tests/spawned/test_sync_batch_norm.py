"""The laws of batch_norm = "sync" on real processes."""

import subprocess
import sys

import pytest

FUNCTIONS = "tests.spawned.sync_batch_norm"


@pytest.mark.parametrize("fields", [
    {"transport": "shared", "zero": 2, "bucket_bytes": 300},
    {"transport": "gloo", "zero": 3, "bucket_bytes": 300},
    {"host": "two", "zero": 1, "update": "in_backward"},
])  # fmt: skip
def test_statistics_over_processes_train_as_on_one_device(world, fields):
    assert max(world(4).run(f"{FUNCTIONS}:deviation", **fields)) <= 1e-12


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_loop_of_a_wrapped_optimizer_trains_as_on_one_device(world, transport):
    assert max(world(4).run(f"{FUNCTIONS}:wrapped_deviation", transport=transport)) <= 1e-12


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_processes_at_norms_of_other_widths_raise_and_do_not_wait(world, transport):
    for error in world(2).run(f"{FUNCTIONS}:diverge", transport=transport, time_limit_seconds=60.0):
        assert "rank 1 is at the forward of narrow, rank 0 is at the forward of wide" in error


def test_verify_finds_that_torch_sync_batch_norm_trains_as_on_one_device(world):
    deviation, *others = world(2).run(f"{FUNCTIONS}:verified")
    assert deviation <= 1e-12
    assert others == [None]


def test_a_ring_that_lives_until_the_interpreter_ends_says_nothing_at_the_end():
    script = """
import torch
from fourfold.torch_kit import memory
from fourfold.comm.meter import CommMeter
from fourfold.comm.shared_regions import GroupPlace, SharedRegions, total_bytes

handle = memory.create_growing(total_bytes(1))
# A module that was imported earlier: it is cleared after those of Fourfold.
torch.kept = SharedRegions(handle, GroupPlace(0, (0,)), CommMeter(), check_peers=lambda: None)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stderr == ""
