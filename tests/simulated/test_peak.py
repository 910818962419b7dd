"""Laws of counted memory: a step on fake tensors holds as many bytes as on real ones."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import bert
from bench.context_memory import (
    USABLE_BYTES,
    Layout,
    context_parallel,
    extrapolate_bytes,
    largest_within,
    peak_memory,
    tensor_parallel,
)
from fourfold.planner.task_facts.fake_memory import PeakMemory

SHAPE = bert.Shape(width=48, heads=4, layers=2, vocabulary=96, positions=16)
JOBS = {
    "tensor": tensor_parallel(2),
    "gathered": tensor_parallel(2, bert.gathered_losses(2)),
    "flash": tensor_parallel(2, bert.losses, attend=bert.flash_attention),
    "tokens split": tensor_parallel(2, split=True),
    "alone": context_parallel(1, "plain"),
    **{ring: context_parallel(4, ring) for ring in ("zigzag", "plain", "rsa", "gather")},
    **{f"zero {zero}": context_parallel(4, "plain", zero=zero) for zero in (1, 2)},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_fake_step_has_the_peak_memory_of_a_real_one_to_the_byte(name: str) -> None:
    real = peak_memory(JOBS[name], SHAPE, batch=3, length=16)
    for without_memory in (FakeTensorMode(), torch.device("meta")):
        with without_memory:
            fake = peak_memory(JOBS[name], SHAPE, batch=3, length=16)
        assert (fake.peak_bytes, fake.bytes_by_kind) == (real.peak_bytes, real.bytes_by_kind)
    assert sum(real.bytes_by_kind.values()) == real.peak_bytes


def test_counted_peak_memory_equals_that_of_the_allocator() -> None:
    job = JOBS["tensor"]
    model, ids = job.build(SHAPE), torch.zeros(3, 16, dtype=torch.long)
    counted = PeakMemory()
    counted.track("existing", [*model.parameters(), ids])
    existing = counted.peak_bytes
    with counted:
        job.losses(model(ids, ids), ids).sum().backward()
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        job.losses(model(ids, ids), ids).sum().backward()
    recorded: Any = profile.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    # The difference: scalars that torch makes inside operations.
    assert counted.peak_bytes - existing == pytest.approx(most, abs=64)


def test_peak_memory_is_linear_in_the_number_of_layers() -> None:
    def held(job: Layout, layers: int) -> int:
        with torch.device("meta"):
            return peak_memory(job, SHAPE._replace(layers=layers), batch=3, length=16).peak_bytes

    for name in ("tensor", "plain"):
        two, three, five = (held(JOBS[name], layers) for layers in (2, 3, 5))
        assert five == two + 3 * (three - two)


@pytest.mark.parametrize("ring", ["plain", "rsa"])
def test_the_first_ring_hop_has_the_peak_memory_of_all_hops(ring: str) -> None:
    with torch.device("meta"):
        one_hop, all_hops = (
            peak_memory(context_parallel(8, ring, few_hops=few), SHAPE, batch=3, length=32) for few in (True, False)
        )
    assert one_hop.bytes_by_kind == all_hops.bytes_by_kind


def test_merged_blocks_fit_far_larger_batches_than_the_leanest_tensor_parallelism() -> None:
    def largest_batch(job: Layout, least: int) -> float:
        """The batch size at which the line through two batch sizes reaches the limit."""
        one, two = (extrapolate_bytes(job, batch=batch, length=512) for batch in (least, 2 * least))
        return least + (USABLE_BYTES - one) * least / (two - one)

    theirs = largest_batch(tensor_parallel(12), 50)
    merged, full_rows = (largest_batch(context_parallel(64, ring, few_hops=True), 500) for ring in ("plain", "rsa"))
    assert merged / theirs >= 13.7
    assert 8 < full_rows / theirs < merged / theirs


@settings(deadline=None)
@given(rest=st.integers(0, 10**6), each=st.integers(1, 10**5), bend=st.integers(0, 50), limit=st.integers(0, 10**8))
def test_largest_within_finds_the_largest_size_that_fits(rest: int, each: int, bend: int, limit: int) -> None:
    start = 1 + limit % 100

    def held(n: int) -> int:
        sizes_tried.append(n)
        return rest + each * n + bend * n * n

    sizes_tried: list[int] = []
    found = largest_within(held, limit, start)
    assert found == 0 or held(found) <= limit
    assert held(found + 1) > limit
    assert bend or len(sizes_tried) <= 14  # a search, not a scan
