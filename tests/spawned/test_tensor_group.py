"""Laws of the tensor axis's collectives on real processes: shared memory, and messages over gloo."""

import pytest

from fourfold.testing.process_world import CaseFailed

CASES = "tests.spawned.tensor_group"


@pytest.mark.parametrize(("choice", "name"), [("auto", "shared memory"), ("gloo", "gloo")])
def test_processes_get_the_bits_of_one_process(world, choice, name):
    for rank in world(2).run(f"{CASES}:differences", choice=choice):
        assert rank["wrong"] == []
        assert rank["name"] == name
        assert (rank["sent_bytes"] > 0) == (name == "gloo")


def test_products_that_processes_write_into_their_buffers_are_summed(world):
    assert world(2).run(f"{CASES}:products", num_rounds=200) == [True] * 2


def test_logits_that_one_process_reads_over_gloo_are_named_on_both(world):
    for message in world(2).run(f"{CASES}:logits_that_rank_0_reads"):
        assert "rank 0 is at the whole logits; rank 1 is at the cross entropy of logits" in message


def test_a_process_that_dies_while_another_waits_is_named(world):
    with pytest.raises(CaseFailed, match=r"PeerError: rank 1 \(host .*\) died while rank 0"):
        world(2).run(f"{CASES}:sum_with_the_dead", time_limit_seconds=60.0)
