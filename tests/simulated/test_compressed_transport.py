"""Law of compressed reductions: the messages of a stage are sent in program order, whenever earlier ones arrive."""

import random
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold.comm.codec.protocol import CodecReduction, Message
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.compressed import CompressedReducer, CompressedRoutes, MessageGatherer, message_indices
from fourfold.comm.reduce.group import WholeReducer
from fourfold.plan.codec import CodecRound, Combine


class Counter:
    """A codec of one element, to which each round adds one."""

    num_elements, message_dtype, residual = 1, torch.float64, None

    def __init__(self, num_rounds: int) -> None:
        self.rounds = (CodecRound(Combine.SUM, 8),) * num_rounds

    def reduce(self, flat: Tensor) -> CodecReduction:
        for _ in self.rounds:
            (total,) = yield Message(flat, Combine.SUM)
            flat.copy_(total + 1)


class StageMessages:
    """The reducer of one stage: it records launches, and a message arrives when the test says so, or in a wait.

    If two ranks launched the messages of two buckets in different orders, a process group would add one bucket's
    message to the other's.
    """

    def __init__(self, num_messages: int) -> None:
        self.grad_buffers = [torch.zeros(1, dtype=torch.float64) for _ in range(num_messages)]
        self.launched: list[int] = []
        self.arrived: set[int] = set()

    def acquire_buffer(self, index: int, factor: float) -> None:
        assert factor == 1.0  # a message is summed at once, whatever the sums of gradients wait for

    def all_gather_grads(self, index: int) -> None:
        pass

    def reduce_async(self, index: int, reduction_index: int | None, factor: float) -> None:
        assert (reduction_index, factor) == (None, 1.0)
        self.launched.append(index)

    def wait_reduce(self, index: int, factor: float) -> None:
        assert factor == 1.0
        self.arrived.add(index)

    def is_reduced(self, index: int, factor: float) -> bool:
        assert factor == 1.0
        return index in self.arrived

    def in_flight(self) -> list[int]:
        return [index for index in self.launched if index not in self.arrived]


@given(num_rounds=st.lists(st.integers(1, 3), min_size=2, max_size=5), chance=st.randoms(use_true_random=False))
def test_messages_of_a_stage_are_sent_in_program_order_in_whatever_order_earlier_ones_arrive(
    num_rounds: list[int], chance: random.Random
) -> None:
    codecs: Any = [Counter(number) for number in num_rounds]
    stages = [StageMessages(len(indices)) for indices in message_indices(codecs)]
    buckets = range(len(codecs))
    inner = WholeReducer([torch.zeros(1, dtype=torch.float64) for _ in buckets], tuple(buckets), CommMeter())
    routes = CompressedRoutes(
        inner,
        cast(Any, stages),
        MessageGatherer(CommMeter()),
        is_host_leader=True,
        needs_factor=True,
    )
    coded = CompressedReducer(routes, codecs, CommMeter())

    def let_arrive_and_poll() -> None:
        in_flight = [(stage, index) for stage in stages for index in stage.in_flight()]
        for stage, index in chance.sample(in_flight, chance.randint(0, len(in_flight))):
            stage.arrived.add(index)
        coded.is_reduced(0, None)

    for bucket in buckets:
        coded.grad_buffers[bucket].fill_(10.0 * bucket)
        coded.reduce_async(bucket, bucket, None)
        let_arrive_and_poll()
    for _ in range(chance.randint(0, 8)):
        let_arrive_and_poll()
    for bucket in buckets:
        coded.wait_reduce(bucket, 2.0)
    assert [stage.launched for stage in stages] == [list(range(len(stage.launched))) for stage in stages]
    assert [flat.item() for flat in coded.grad_buffers] == [
        2.0 * (10.0 * b + n) for b, n in zip(buckets, num_rounds, strict=True)
    ]
