"""Laws of the tensor axis's collectives. Ranks are threads, which use real shared memory or messages."""

import random
import time

import pytest
import torch

from fourfold.comm import shared_regions
from fourfold.comm import tensor_group as tensor_groups
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import make_tensor_group
from fourfold.testing import threads
from fourfold.torch_kit import memory
from fourfold.trainer.tracer import SpanRecorder
from fourfold.words.errors import DivergenceError, PeerError, PlanError
from fourfold.words.layout import Change, collective_sent_bytes
from fourfold.words.trace_events import SEND_LANE, WAIT_SPAN
from tests.simulated.test_liveness import killed_rank, rank_0_with  # noqa: F401  (a fixture)
from tests.tensor_group_oracle import FLOATS, SHAPES, all_results, bits, expected_results, tensor_of

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def groups_of(size, body, *, transport="shared", hosts=1):
    """Run `body(group)` on a tensor group of threads."""
    return threads.run(
        size, lambda comm: body(make_tensor_group(comm, "tensor", CommMeter(), choice=transport)), hosts=hosts
    )


@pytest.fixture(params=[False, True], ids=["whole", "slices"])
def in_slices(request, monkeypatch):
    """Whether each rank adds a slice for all, as of large tensors."""
    monkeypatch.setattr(tensor_groups, "MIN_SLICING_RANKS", 2)
    monkeypatch.setattr(tensor_groups, "MIN_SLICED_BYTES", 0 if request.param else 2**62)


@pytest.mark.usefixtures("in_slices")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_shared_memory_every_rank_gets_the_bits_of_a_sum_in_rank_order(size):
    cases = [(shape, dtype, layout) for shape in SHAPES for dtype in FLOATS
             for layout in ("contiguous", "transposed", "expanded")]  # fmt: skip

    def body(group):
        for shape, dtype, layout in cases:
            tensors = [tensor_of(rank, shape, dtype, layout=layout) for rank in range(size)]
            expected = expected_results(tensors, group.index)
            found = all_results(group, tensors[group.index])
            assert {name: bits(value) for name, value in found.items()} == {
                name: bits(value.contiguous()) for name, value in expected.items()
            }, (shape, dtype, layout)

    groups_of(size, body)


@pytest.mark.parametrize(("size", "hosts", "transport"), [(2, 1, "gloo"), (3, 1, "gloo"), (4, 2, "auto")])
def test_over_messages_every_rank_gets_the_same_bits_and_the_sum(size, hosts, transport):
    cases = [(shape, dtype) for shape in SHAPES for dtype in FLOATS]

    def body(group):
        assert group.name == "gloo"
        all_bits = []
        for shape, dtype in cases:
            tensors = [tensor_of(rank, shape, dtype, layout="transposed") for rank in range(size)]
            found = all_results(group, tensors[group.index])
            for name, value in expected_results(tensors, group.index).items():
                if name == "all_reduce" and dtype in (torch.float64, torch.float32):  # added by torch, in any order
                    torch.testing.assert_close(found[name], value, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
                else:
                    assert bits(found[name]) == bits(value.contiguous()), (name, shape, dtype)
            all_bits.append(bits(found["all_reduce"]))
        return all_bits

    first, *others = groups_of(size, body, transport=transport, hosts=hosts)
    assert all(other == first for other in others)


@pytest.mark.usefixtures("in_slices")
def test_a_block_is_not_overwritten_before_all_have_read_it():
    size, num_rounds = 3, 150
    order = random.Random(0)
    lengths = [order.choice([1, 40, 3000]) for _ in range(num_rounds)]
    kinds = [order.choice(["all_reduce", "all_gather", "reduce_scatter", "buffer"]) for _ in range(num_rounds)]

    def body(group):
        pauses = random.Random(group.index)
        for number, (length, kind) in enumerate(zip(lengths, kinds, strict=True)):
            tensors = [torch.full((3 * length,), 1000.0 * number + rank) for rank in range(size)]
            if pauses.random() < 0.3:
                time.sleep(pauses.random() * 2e-3)
            own, expected = tensors[group.index], expected_results(tensors, group.index)
            if kind == "buffer":
                own, kind = group.buffer(own.shape, own.dtype).copy_(own), "all_reduce"
            found = getattr(group, kind)(own, *[0][: kind != "all_reduce"])
            assert torch.equal(found, expected[kind if kind == "all_reduce" else (kind, 0)]), number

    groups_of(size, body)


def test_a_nan_of_one_rank_is_in_the_sum_and_in_the_maximum_of_all():
    def body(group):
        tensor = torch.tensor([1.0, float("nan") if group.index == 1 else 2.0])
        return [bits(group.all_reduce(tensor.clone())), bits(group.all_reduce_max(tensor)), bool(tensor[0] == 1)]

    for transport in ("shared", "gloo"):
        first, *others = groups_of(3, body, transport=transport)
        assert all(other[:2] == first[:2] for other in others)
        dtype, shape, values = first[1]
        maximum = torch.tensor(values, dtype=torch.uint8).view(dtype).view(shape)
        assert maximum[0] == 1.0
        assert maximum[1].isnan()


@pytest.mark.usefixtures("in_slices")
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_product_written_into_the_buffer_is_summed(transport):
    a, b = (tensor_of(rank, (6, 6), torch.float64) for rank in range(2))

    def body(group):
        kept = []
        for number in range(6):
            partial = group.buffer((6, 6), torch.float64)
            torch.mm(a + group.index, b * number, out=partial)
            total = group.all_reduce(partial.view(2, 3, 6))
            kept.append(total)
        assert len({total.data_ptr() for total in kept}) == len(kept)
        for number, total in enumerate(kept):  # later collectives have not changed them
            expected = torch.mm(a, b * number) + torch.mm(a + 1, b * number)
            assert torch.equal(total, expected.view(2, 3, 6))
        gathered = group.all_gather(group.buffer((2,), torch.int64).fill_(group.index), 0)
        assert gathered.tolist() == [0, 0, 1, 1]

    groups_of(2, body, transport=transport)


def test_a_buffer_lies_where_peers_read_it_and_a_sum_does_not():
    def body(group):
        regions = group._regions
        partial = group.buffer((4,), torch.float32).fill_(1)
        total = group.all_reduce(partial)
        return regions.contains(partial.data_ptr()), regions.contains(total.data_ptr())

    assert groups_of(2, body) == [(True, False)] * 2


def test_a_buffer_is_refused_after_another_collective():
    def body(group):
        partial = group.buffer((4,), torch.float32)
        group.all_reduce(torch.zeros(1))
        with pytest.raises(AssertionError, match="lent before another collective"):
            group.all_reduce(partial)

    groups_of(2, body)


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_sum_is_on_its_way_until_it_is_waited_for_and_nothing_else_begins(transport):
    def body(group):
        wait = group.all_reduce_async(torch.full((3,), 1.0 + group.index))
        with pytest.raises(AssertionError, match="has begun and not ended"):
            group.all_reduce(torch.zeros(1))
        assert wait().tolist() == [3.0] * 3
        assert group.all_reduce(torch.ones(1)).tolist() == [2.0]

    groups_of(2, body, transport=transport)


def test_what_begins_in_inference_mode_goes_on_outside_of_it():
    def body(group):
        with torch.inference_mode():
            evaluated = group.all_reduce(torch.ones(3))
        return [each.tolist() for each in (evaluated, group.all_reduce(torch.ones(3)), group.all_reduce(torch.ones(3)))]

    assert groups_of(2, body) == [[[2.0] * 3] * 3] * 2


def test_a_tensor_with_a_gradient_is_summed_without_one():
    def body(group):
        weight = torch.ones(2, requires_grad=True)
        found = [group.all_gather(weight, 0), group.reduce_scatter(weight, 0), group.all_reduce(weight * 2)]
        for _ in range(4):  # through both areas
            assert not group.all_gather(torch.zeros(2), 0).requires_grad
        return [(each.requires_grad, each.tolist()) for each in found[:2]]

    for transport in ("shared", "gloo"):
        assert groups_of(2, body, transport=transport) == [[(False, [1.0] * 4), (False, [2.0])]] * 2


# ---- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([lambda g: g.all_reduce(torch.zeros(3)), lambda g: g.all_reduce(torch.zeros(4))],
         r"rank \d: all-reduce of 1[26] bytes \(torch.float32\); rank \d: all-reduce of 1[26] bytes"),
        ([lambda g: g.all_reduce(torch.zeros(0)), lambda g: g.all_reduce(torch.zeros(4))], "all-reduce of 0 bytes"),
        ([lambda g: g.all_reduce(torch.zeros(4)), lambda g: g.all_gather(torch.zeros(4), 0)], "all-gather of 16"),
        ([lambda g: g.all_reduce(torch.zeros(4)), lambda g: g.all_reduce_max(torch.zeros(4))], "all-reduce of maxima"),
        ([lambda g: g.all_reduce(torch.zeros(4)), lambda g: g.all_reduce(torch.zeros(4, dtype=torch.int32))],
         r"16 bytes \(torch.int32\)"),
    ],
)  # fmt: skip
def test_ranks_that_differ_in_a_collective_are_refused_on_every_rank(calls, message):
    def body(group):
        with pytest.raises(DivergenceError, match=message) as caught:
            calls[group.index == 1](group)
        assert caught.value.where == "the tensor axis"
        return True

    assert groups_of(3, body) == [True] * 3


@pytest.mark.parametrize("collective", ["all_reduce", "all_reduce_max", "all_gather", "reduce_scatter"])
def test_a_rank_that_dies_while_another_waits_is_named(killed_rank, collective):  # noqa: F811
    def body(group):
        if group.index == 1:
            return
        group._regions.check_peers = rank_0_with(killed_rank).check_peers
        with pytest.raises(PeerError, match=r"rank 1 \(host somewhere\) died while rank 0 waited for it"):
            getattr(group, collective)(torch.zeros(2), *[0][: not collective.startswith("all_reduce")])

    groups_of(2, body)


def test_a_rank_that_dies_between_the_sums_of_slices_is_named(killed_rank, monkeypatch):  # noqa: F811
    monkeypatch.setattr(tensor_groups, "MIN_SLICING_RANKS", 2)
    monkeypatch.setattr(tensor_groups, "MIN_SLICED_BYTES", 0)

    def body(group):
        if group.index == 1:
            group.all_reduce_async(torch.zeros(40))  # published, and then killed
            return
        group._regions.check_peers = rank_0_with(killed_rank).check_peers
        with pytest.raises(PeerError, match=r"rank 1 \(host somewhere\) died"):
            group.all_reduce(torch.zeros(40))

    groups_of(2, body)


def test_a_rank_that_never_comes_is_named_at_the_time_limit():
    regions = shared_regions.SharedRegions(
        memory.create_growing(shared_regions.total_bytes(2)),
        shared_regions.GroupPlace(0, (4, 7)),
        CommMeter(),
        check_peers=lambda: None,
        time_limit_seconds=0.1,
    )
    with pytest.raises(PeerError, match="rank 7 did not arrive within"):
        tensor_groups.MemoryTensorGroup(regions).all_reduce(torch.zeros(2))


def test_shared_memory_between_hosts_is_refused():
    def body(comm):
        with pytest.raises(PlanError, match="several hosts"):
            make_tensor_group(comm, "tensor", CommMeter(), choice="shared")
        return True

    assert threads.run(2, body, hosts=2) == [True] * 2


# ---- what is counted -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_are_counted_by_the_ring_formula_and_shared_memory_sends_nothing(size, dtype):
    def body(group):
        sent = []
        tensor = torch.zeros(size * 4, 3, dtype=dtype)
        for call in (lambda: group.all_reduce(tensor), lambda: group.all_gather(tensor, 1),
                     lambda: group.reduce_scatter(tensor, 0), lambda: group.all_reduce_async(tensor)()):  # fmt: skip
            before = group.meter.sent_bytes
            call()
            sent.append(group.meter.sent_bytes - before)
        return sent

    num_bytes = size * 12 * dtype.itemsize
    kinds = [(Change.ALL_REDUCE, 1), (Change.ALL_GATHER, size), (Change.REDUCE_SCATTER, 1), (Change.ALL_REDUCE, 1)]
    expected = [collective_sent_bytes(kind, whole_bytes=factor * num_bytes, size=size) for kind, factor in kinds]
    for sent in groups_of(size, body, transport="gloo"):
        assert sent == pytest.approx(expected)
    assert groups_of(size, body) == [[0.0] * 4] * size


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_wait_for_a_late_rank_is_counted_and_in_the_trace(transport):
    def body(group):
        recorder = group.meter.recorder = SpanRecorder()
        if group.index == 1:
            time.sleep(0.1)
        group.all_reduce(torch.zeros(10))
        waits = [span for span in recorder.spans if span.name == WAIT_SPAN]
        sends = [span.name for span in recorder.spans if span.lane == SEND_LANE]
        return group.meter.waiting_seconds, sum(span.stop - span.start for span in waits) / 1e9, sends

    (waited, recorded, sends), _ = groups_of(2, body, transport=transport)
    assert waited > 0.05
    assert recorded == pytest.approx(waited, abs=0.02)
    assert sends == ([Change.ALL_REDUCE] if transport == "gloo" else [])
