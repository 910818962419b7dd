"""Laws of waits in shared memory: no deadlock between ranks whose gradients come in different orders."""

import mmap
import threading
from typing import Any

import torch

from fourfold.axes.data.rules.buckets import Bucket, Slot
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS, grad_buffer_indices
from fourfold.comm.codec import registry
from fourfold.comm.collectives import Work
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.compressed import CompressedReducer, CompressedRoutes, MessageGatherer
from fourfold.comm.reduce.host import make_host_transport
from fourfold.comm.reduce.host_memory import HostMemory, SharedMemoryLayout
from fourfold.comm.reduce.protocol import GradReducer
from fourfold.comm.shared_regions import GroupPlace
from fourfold.plan.codec import CodecSpec
from fourfold.testing import threads

NUM_BUCKETS = 8


class NoOtherHosts:
    """No other hosts: what a rank has summed is the whole sum, once it has been waited for."""

    num_members, size, index, replica_index = 1, 1, 0, 0

    def reduce_scatter_async(self, flat):
        return Work(lambda: flat)

    all_reduce_async = reduce_scatter_async


def reducer_of(mapping: mmap.mmap, layout: SharedMemoryLayout, index: int, **options: Any) -> GradReducer:
    """The reducer of one of two ranks."""
    place = GroupPlace(index, (0, 1))
    host = HostMemory(mapping, layout, place, CommMeter(), check_peers=lambda: None, time_limit_seconds=10)
    return make_host_transport(host, **options).grads


def compressed(inner: GradReducer, sums: GradReducer, codecs: Any, rank: int) -> CompressedReducer:
    routes = CompressedRoutes(inner, [sums], MessageGatherer(CommMeter()), is_host_leader=rank == 0, needs_factor=False)
    return CompressedReducer(routes, codecs, CommMeter())


def test_a_pending_sum_is_finished_before_a_rank_waits_for_a_later_launch():
    # Bucket 4 uses the buffer of bucket 0, and bucket 5 that of bucket 1. Rank 0 waits for bucket 0's buffer; rank 1
    # waits for bucket 1's, which rank 0 has yet to launch.
    sizes, dtypes = [64] * NUM_BUCKETS, [torch.float32] * NUM_BUCKETS
    layout = SharedMemoryLayout(
        sizes,
        dtypes,
        buffer_indices=grad_buffer_indices(NUM_BUCKETS, is_cyclic=True),
        weight_dtypes=dtypes,
    )
    mapping, both = mmap.mmap(-1, layout.total_bytes(2)), threading.Barrier(2)

    def body(comm):
        shared = reducer_of(mapping, layout, comm.rank, rest=RESTING_LAYOUTS[2], between_hosts=NoOtherHosts())
        shared.acquire_buffer(0, None)
        shared.grad_buffers[0].fill_(1.0)
        shared.reduce_async(0, 0, None)
        both.wait(10)
        if comm.rank == 0:
            shared.acquire_buffer(4, None)
        shared.acquire_buffer(1, None)
        shared.grad_buffers[1].fill_(2.0)
        shared.reduce_async(1, 1, None)
        if comm.rank == 1:
            shared.acquire_buffer(5, None)
        return [shared.wait_reduce(bucket, 1.0) or shared.grad_shard(bucket).flat.tolist() for bucket in (0, 1)]

    assert threads.run(2, body) == [[[2.0] * 32, [4.0] * 32]] * 2


def test_a_rank_does_its_part_of_a_sum_before_it_waits_for_a_later_message():
    # As above with a codec: rank 1 waits for the message of bucket 1, and rank 0 first waits for the sum of bucket 0.
    sizes, float32s, bfloat16s = [64] * NUM_BUCKETS, [torch.float32] * NUM_BUCKETS, [torch.bfloat16] * NUM_BUCKETS
    layout = SharedMemoryLayout(
        sizes,
        float32s,
        buffer_indices=grad_buffer_indices(NUM_BUCKETS, is_cyclic=True),
        weight_dtypes=float32s,
    )
    messages = SharedMemoryLayout(sizes, bfloat16s)
    mapping, other = mmap.mmap(-1, layout.total_bytes(2)), mmap.mmap(-1, messages.total_bytes(2))
    first, both, launched = threading.Event(), threading.Barrier(2), threading.Event()
    buckets = [Bucket(index, (Slot(str(index), 0, 64),), 64, "float32", 4, 0) for index in range(NUM_BUCKETS)]

    def body(comm):
        inner = reducer_of(mapping, layout, comm.rank, rest=RESTING_LAYOUTS[2], is_prereduced=True)
        sums = reducer_of(other, messages, comm.rank)
        codecs = [registry.make_codec(CodecSpec("bf16"), bucket, [(64,)], device=comm.device) for bucket in buckets]
        coded = compressed(inner, sums, codecs, comm.rank)
        coded.acquire_buffer(0, None)
        coded.grad_buffers[0].fill_(1.0)
        if comm.rank == 0:
            first.wait(10)
        coded.reduce_async(0, 0, None)
        first.set()
        both.wait(10)
        if comm.rank == 0:
            launched.wait(10)
            coded.acquire_buffer(4, None)
        coded.acquire_buffer(1, None)
        coded.grad_buffers[1].fill_(2.0)
        coded.reduce_async(1, 1, None)
        if comm.rank == 1:
            launched.set()
            coded.acquire_buffer(5, None)
        return [coded.wait_reduce(bucket, 1.0) or coded.grad_shard(bucket).flat.tolist() for bucket in (0, 1)]

    assert threads.run(2, body) == [[[2.0] * 32, [4.0] * 32]] * 2


def test_a_rank_does_its_part_of_a_sum_before_it_waits_for_the_next_round_of_messages():
    # Each of two rounds reduces bucket 0, then bucket 1. Rank 1 is the first to hand bucket 1's sum of the first round
    # to the inner transport. It then waits for room for its next message, until rank 0 begins the second round too.
    # Rank 0 first waits for bucket 1's buffer, which is free once rank 1 has done its part of that sum.
    sizes, float32s = [64, 64], [torch.float32] * 2
    layout = SharedMemoryLayout(sizes, float32s, weight_dtypes=float32s)
    message_layout = SharedMemoryLayout(sizes, [torch.bfloat16] * 2)
    mapping, messages = mmap.mmap(-1, layout.total_bytes(2)), mmap.mmap(-1, message_layout.total_bytes(2))
    buckets = [Bucket(index, (Slot(str(index), 0, 64),), 64, "float32", 4, 0) for index in range(2)]
    launched = [[threading.Event() for _ in buckets] for _ in range(2)]
    summed, handed_over = threading.Event(), threading.Event()

    def body(comm):
        inner = reducer_of(mapping, layout, comm.rank, rest=RESTING_LAYOUTS[2], is_prereduced=True)
        sums = reducer_of(messages, message_layout, comm.rank)
        codecs = [registry.make_codec(CodecSpec("bf16"), bucket, [(64,)], device=comm.device) for bucket in buckets]
        coded = compressed(inner, sums, codecs, comm.rank)

        def launch(bucket, reduction_index):
            coded.grad_buffers[bucket].fill_(1.0 + reduction_index)
            coded.reduce_async(bucket, reduction_index, None)

        for bucket in range(2):
            coded.acquire_buffer(bucket, None)
            if comm.rank == 1:
                launched[0][bucket].wait(10)
            elif bucket == 1:
                launched[1][0].wait(10)
            launch(bucket, bucket)
            launched[comm.rank][bucket].set()
        if comm.rank == 0:
            launched[1][1].wait(10)
            # Rank 0's part of the message of bucket 1, and of the sum of bucket 0; it hands nothing over.
            assert sums.is_reduced(1, 1.0)
            assert inner.is_reduced(0, None)
            summed.set()
            handed_over.wait(10)
            coded.acquire_buffer(1, None)
        else:
            summed.wait(10)
            hand_over = inner.reduce_async

            def hand_over_and_say_so(bucket: int, reduction_index: int | None, factor: float | None) -> None:
                hand_over(bucket, reduction_index, factor)
                handed_over.set()

            inner.reduce_async = hand_over_and_say_so
        coded.acquire_buffer(0, None)
        launch(0, 2)
        coded.acquire_buffer(1, None)
        launch(1, 3)
        return [coded.wait_reduce(bucket, 1.0) or coded.grad_shard(bucket).flat.tolist() for bucket in (0, 1)]

    assert threads.run(2, body) == [[[2.0 * (1 + 3)] * 32, [2.0 * (2 + 4)] * 32]] * 2
