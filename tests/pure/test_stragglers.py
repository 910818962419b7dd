"""Laws of stragglers: which ranks are named, and in which phase."""

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.environment.processes import processor_delay_seconds
from fourfold.trainer.meters import (
    STRAGGLER_FACTOR,
    find_steady_stragglers,
    find_stragglers,
    median_step_seconds,
)
from fourfold.words.mesh import Mesh

EVEN = {"data": 0.001, "forward": 0.020, "backward": 0.040}


def test_a_straggler_is_reported_with_its_slow_phase():
    (found,) = find_stragglers([EVEN, EVEN, {**EVEN, "backward": 0.140}, EVEN], Mesh(dp=4))
    assert (found.rank, found.place) == (2, "backward")
    text = found.describe("node7")
    assert text.startswith("rank 2 on node7 is a straggler: busy for 161 ms a step, the others for 61 ms")
    assert text.endswith("; backward takes 140 ms, on the others 40 ms")


def test_the_slow_phase_is_the_one_with_the_largest_excess_not_the_longest_one():
    (found,) = find_stragglers([EVEN, {**EVEN, "data": 0.035}], Mesh(cp=2))
    assert (found.rank, found.place) == (1, "data")


def test_one_slow_step_makes_no_straggler():
    slow = [EVEN] * 18 + [{**EVEN, "data": 5.0}] * 2
    assert find_stragglers([median_step_seconds([EVEN] * 20), median_step_seconds(slow)], Mesh(dp=2)) == []


def test_only_a_rank_that_is_slow_in_every_segment_is_a_straggler():
    slow = {**EVEN, "forward": 0.200}
    turns = [[slow, EVEN], [EVEN, slow], [slow, EVEN]]
    assert find_steady_stragglers(turns, Mesh(dp=2)) == []
    assert find_steady_stragglers([[EVEN, EVEN], [slow, EVEN], [slow, EVEN]], Mesh(dp=2)) == []
    (found,) = find_steady_stragglers([[slow, EVEN]] * 3, Mesh(dp=2))
    assert found.rank == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says it on Linux only")
def test_the_delay_is_the_time_in_which_others_had_the_processor():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
    try:
        delay, begin = processor_delay_seconds(), time.perf_counter()
        used = time.thread_time()
        while processor_delay_seconds() - delay < 0.05:
            assert time.perf_counter() - begin < 30
        waited = time.perf_counter() - begin - (time.thread_time() - used)
        assert waited / 2 < processor_delay_seconds() - delay < waited * 1.2  # this thread never sleeps
    finally:
        os.sched_setaffinity(0, allowed)
        spinner.kill()
        spinner.wait()


@given(st.lists(st.floats(0.01, 0.01 * STRAGGLER_FACTOR), min_size=1, max_size=8))
def test_ranks_within_the_factor_are_no_stragglers(seconds):
    assert find_stragglers([{"forward": each} for each in seconds], Mesh(dp=len(seconds))) == []


@given(st.integers(2, 8), st.data())
def test_at_most_half_of_the_ranks_are_stragglers(size, data):
    seconds = data.draw(st.lists(st.floats(0.0, 10.0), min_size=size, max_size=size))
    assert len(find_stragglers([{"forward": each} for each in seconds], Mesh(dp=size))) <= size / 2


def test_negligible_differences_are_not_reported():
    assert find_stragglers([{"forward": 0.0001}, {"forward": 0.0011}], Mesh(dp=2)) == []


def test_a_rank_is_compared_with_those_that_do_the_same_work():
    mesh, slow_stage = Mesh(pp=2, dp=2, tp=2), {"forward": 0.080}
    busy = [EVEN] * 4 + [slow_stage] * 4
    assert find_stragglers(busy, mesh) == []
    busy[5:] = [{"forward": 0.200}] * 3
    (found,) = find_stragglers(busy, mesh)  # 4 has the same part of the same stage; 5 and 7 have another part of it
    assert (found.rank, found.seconds, found.others_seconds) == (6, 0.200, 0.080)
