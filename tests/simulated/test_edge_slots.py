"""Slots of edges over shared memory: what a receiver has is never overwritten, in any order of sends and releases."""

import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.comm.edges import MAX_LENT, NUM_SLOTS, SharedMemoryReceiver, SharedMemorySender
from fourfold.comm.meter import CommMeter
from fourfold.comm.shared_regions import GroupPlace, SharedRegions, total_bytes
from fourfold.torch_kit import memory
from fourfold.words.errors import PeerError

NUM_FREE = NUM_SLOTS - MAX_LENT
"""Messages that may be under way, however many the receiver holds."""


class Ends(NamedTuple):
    sender: SharedMemorySender
    receiver: SharedMemoryReceiver


def edge(time_limit_seconds=0.0):
    """Both ends of an edge, in this process. A wait that nothing ends raises PeerError."""
    handle = memory.create_growing(total_bytes(2, NUM_SLOTS))
    first, second = (
        SharedRegions(
            os.dup(handle),
            GroupPlace(index, (0, 1)),
            CommMeter(),
            check_peers=lambda: None,
            num_areas=NUM_SLOTS,
            time_limit_seconds=time_limit_seconds,
        )
        for index in range(2)
    )
    memory.close_shared(handle)
    return Ends(SharedMemorySender(first, 1), SharedMemoryReceiver(second, 0))


def tensors_of(number, sizes):
    """A message that no other one equals."""
    return [torch.full((size, 3), 1000.0 * number + place) for place, size in enumerate(sizes)]


class Hold(NamedTuple):
    """What the receiver holds, and what was sent."""

    tensors: list
    sent: list


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.lists(st.integers(0, 5), min_size=0, max_size=3)),
        st.tuples(st.just("receive"), st.none()),
        st.tuples(st.just("release"), st.integers(0, 30)),
        st.tuples(st.just("release part"), st.integers(0, 30)),
        st.tuples(st.just("write"), st.integers(0, 30)),
    ),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_message_stays_as_it_was_sent_until_its_last_tensor_is_freed(steps):
    """Sends, receipts and releases in any order; no send waits while fewer messages are under way than are free."""
    ends, under_way, held = edge(), [], []
    for number, (step, value) in enumerate(steps):
        if step == "send" and len(under_way) < NUM_FREE:
            ends.sender.send(tensors_of(number, value))
            under_way.append(tensors_of(number, value))
        elif step == "receive" and under_way:
            held.append(Hold(ends.receiver.receive(), under_way.pop(0)))
        elif step == "release" and held:
            del held[value % len(held)]
        elif step == "release part" and held:
            hold = held[value % len(held)]
            del hold.tensors[:1], hold.sent[:1]
        elif step == "write" and held:
            for tensor, sent in zip(*held[value % len(held)], strict=True):
                tensor.mul_(-1.0)
                sent.mul_(-1.0)
        for hold in held:
            assert len(hold.tensors) == len(hold.sent)
            assert all(map(torch.equal, hold.tensors, hold.sent))


def test_a_sender_waits_while_all_slots_hold_what_is_still_to_be_received():
    ends = edge()
    for number in range(NUM_SLOTS):
        ends.sender.send(tensors_of(number, [2]))
    with pytest.raises(PeerError, match="rank 1 did not arrive"):
        ends.sender.send(tensors_of(NUM_SLOTS, [2]))
    ends.receiver.receive()
    ends.sender.send(tensors_of(NUM_SLOTS, [2]))


def test_a_view_keeps_its_slot():
    ends = edge()
    ends.sender.send(tensors_of(0, [4]))
    part = ends.receiver.receive()[0][1:2]
    for number in range(1, 2 * NUM_SLOTS):
        ends.sender.send(tensors_of(number, [4]))
        ends.receiver.receive()
    assert part.tolist() == [[0.0, 0.0, 0.0]]


def test_a_graph_keeps_its_slots_until_its_backward():
    """As a stage does: several microbatches are in flight, and their backwards run in any order."""
    ends, weight = edge(), torch.ones(3, requires_grad=True)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        outputs, received = [], []
        for number in range(3):
            ends.sender.send([each.requires_grad_() for each in tensors_of(number, [2])])
            received.append(ends.receiver.receive())
            outputs.append((received[-1][0] * weight).sum())
        for number in order:
            weight.grad = None
            outputs[number].backward()
            assert weight.grad is not None
            assert torch.allclose(weight.grad, received[number][0].sum(0))
            assert received[number][0].grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_every_dtype_and_shape_arrives(dtype):
    ends = edge()
    sent = [torch.ones(2, 3).to(dtype), torch.zeros(()).to(dtype), torch.zeros(0, 4).to(dtype), torch.ones(3, 2).T]
    ends.sender.send(sent)
    got = ends.receiver.receive()
    assert [each.dtype for each in got] == [each.dtype for each in sent]
    assert all(map(torch.equal, got, sent))


def test_tensors_of_one_message_are_written_one_by_one():
    """A write to one leaves the others as autograd has saved them."""
    ends = edge()
    ends.sender.send([each.requires_grad_() for each in tensors_of(1, [2, 2])])
    first, second = ends.receiver.receive()
    result = (second * second).sum()
    with torch.no_grad():
        first.zero_()
    result.backward()
    assert second.grad is not None
    assert torch.equal(second.grad, 2 * second)


def test_a_receiver_may_hold_any_number_of_messages():
    """As in GPipe with many microbatches: what is beyond the slots is copied."""
    ends = edge()
    held = []
    for number in range(3 * NUM_SLOTS):
        ends.sender.send(tensors_of(number, [2]))
        held.append(Hold(ends.receiver.receive(), tensors_of(number, [2])))
    assert all(torch.equal(*hold.tensors, *hold.sent) for hold in held)
