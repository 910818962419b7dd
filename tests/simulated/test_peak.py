"""Laws of counted memory: what fake tensors say of a step is what real ones hold."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import bert
from bench.sequence_memory import (
    USABLE_BYTES,
    Layout,
    extrapolate_bytes,
    largest_within,
    peak_memory,
    sequence_parallel,
    tensor_parallel,
)
from fourfold.testing.peak_memory import PeakMemory

SHAPE = bert.Shape(width=48, heads=4, layers=2, vocabulary=96, positions=16)
JOBS = {
    "tensor": tensor_parallel(2),
    "gathered": tensor_parallel(2, bert.gathered_losses(2)),
    "flash": tensor_parallel(2, bert.losses, attend=bert.flash_attention),
    "tokens split": tensor_parallel(2, split=True),
    "alone": sequence_parallel(1, "plain"),
    **{ring: sequence_parallel(4, ring) for ring in ("zigzag", "plain", "rsa", "gather")},
    **{f"zero {zero}": sequence_parallel(4, "plain", zero=zero) for zero in (1, 2)},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_fake_step_holds_what_a_real_one_does_to_the_byte(name: str) -> None:
    real = peak_memory(JOBS[name], SHAPE, batch=3, length=16)
    for without_memory in (FakeTensorMode(), torch.device("meta")):
        with without_memory:
            fake = peak_memory(JOBS[name], SHAPE, batch=3, length=16)
        assert (fake.peak_bytes, fake.bytes_by_kind) == (real.peak_bytes, real.bytes_by_kind)
    assert sum(real.bytes_by_kind.values()) == real.peak_bytes


def test_a_step_holds_what_the_allocator_has_given_out() -> None:
    job = JOBS["tensor"]
    model, ids = job.build(SHAPE), torch.zeros(3, 16, dtype=torch.long)
    counted = PeakMemory()
    counted.track("there already", [*model.parameters(), ids])
    there = counted.peak_bytes
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
    # Scalars that torch makes inside operations.
    assert counted.peak_bytes - there == pytest.approx(most, abs=64)


def test_what_a_step_holds_is_a_line_in_the_number_of_layers() -> None:
    def held(job: Layout, layers: int) -> int:
        with torch.device("meta"):
            return peak_memory(job, SHAPE._replace(layers=layers), batch=3, length=16).peak_bytes

    for name in ("tensor", "plain"):
        two, three, five = (held(JOBS[name], layers) for layers in (2, 3, 5))
        assert five == two + 3 * (three - two)


@pytest.mark.parametrize("ring", ["plain", "rsa"])
def test_the_first_hop_holds_what_all_do(ring: str) -> None:
    with torch.device("meta"):
        few, all_of_them = (
            peak_memory(sequence_parallel(8, ring, few_hops=hasty), SHAPE, batch=3, length=32)
            for hasty in (True, False)
        )
    assert few.bytes_by_kind == all_of_them.bytes_by_kind


def test_merged_blocks_hold_far_more_samples_than_the_most_careful_tensor_parallelism() -> None:
    def largest_batch(job: Layout, least: int) -> float:
        """Where the line through two batches meets the limit."""
        one, two = (extrapolate_bytes(job, batch=batch, length=512) for batch in (least, 2 * least))
        return least + (USABLE_BYTES - one) * least / (two - one)

    theirs = largest_batch(tensor_parallel(12), 50)
    merged, full_rows = (largest_batch(sequence_parallel(64, ring, few_hops=True), 500) for ring in ("plain", "rsa"))
    assert merged / theirs >= 13.7
    assert 8 < full_rows / theirs < merged / theirs


@settings(deadline=None)
@given(rest=st.integers(0, 10**6), each=st.integers(1, 10**5), bend=st.integers(0, 50), limit=st.integers(0, 10**8))
def test_the_largest_is_found_and_one_more_is_too_much(rest: int, each: int, bend: int, limit: int) -> None:
    start = 1 + limit % 100

    def held(n: int) -> int:
        asked.append(n)
        return rest + each * n + bend * n * n

    asked: list[int] = []
    found = largest_within(held, limit, start)
    assert found == 0 or held(found) <= limit
    assert held(found + 1) > limit
    assert bend or len(asked) <= 14  # and not as many as there are numbers
