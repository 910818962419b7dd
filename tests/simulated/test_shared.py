"""Laws of shared memory between hosts, the other hosts left out."""

import functools
import mmap
import threading

import torch

from fourfold.parts.comm.shared import Shared, Slotting
from fourfold.parts.comm.split import Flight, landed
from fourfold.plan.data import RESTS, turns
from fourfold.testing import threads

NUM_BUCKETS = 8


class NoOthers:
    """One host: what a rank has summed is the whole sum, once it has been waited for."""

    size, index, sent_bytes = 1, 0, 0.0

    def scatter(self, flat):
        return Flight(lambda: flat, landed)

    begin = scatter


def test_a_sum_on_its_way_lands_before_a_rank_waits_for_a_later_launch():
    # Two ranks whose gradients come in different orders: rank 0 waits for the slot of bucket 0, by whose turn bucket 4
    # comes; rank 1 for that of bucket 1, which rank 0 has yet to launch.
    sizes, dtypes = [64] * NUM_BUCKETS, [torch.float32] * NUM_BUCKETS
    slotting = Slotting(sizes, dtypes, num_scalars=8, turns=turns(NUM_BUCKETS, few=True), weights=True)
    mapping, both = mmap.mmap(-1, slotting.total_bytes(2)), threading.Barrier(2)
    make = functools.partial(Shared, mapping, slotting, size=2, rest=RESTS[2], time_limit_seconds=10)

    def body(ranks):
        shared = make(index=ranks.rank, between=NoOthers())
        shared.lend(0)
        shared.slots[0].fill_(1.0)
        shared.launch(0, 0)
        both.wait(10)
        if ranks.rank == 0:
            shared.lend(4)
        shared.lend(1)
        shared.slots[1].fill_(2.0)
        shared.launch(1, 1)
        if ranks.rank == 1:
            shared.lend(5)
        return [shared.complete(bucket) or shared.own(bucket).flat.tolist() for bucket in (0, 1)]

    assert threads.run(2, body) == [[[2.0] * 32, [4.0] * 32]] * 2
