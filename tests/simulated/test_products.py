"""Laws of row products: the sum is that of whole products, however many chunks of it travel one after the other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fourfold.axes.tensor.work.split_region import RowProduct, SplitRegion, origins
from fourfold.comm import tensor_group as tensor_groups
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import make_tensor_group
from fourfold.testing import threads

FEATURES, OUT = 6, 8


def drawn(rank: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    input = torch.randn(rows, 3, FEATURES, generator=generator, dtype=torch.float64)
    return input, torch.randn(OUT, FEATURES, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("max_chunks", [1, 3, 4])
def test_sums_and_gradients_are_the_same_for_any_number_of_chunks(monkeypatch, ranks, rows, max_chunks):
    monkeypatch.setattr(tensor_groups, "MIN_CHUNK_BYTES", 64)
    monkeypatch.setattr(tensor_groups, "MAX_CHUNKS", max_chunks)
    every = [drawn(rank, rows) for rank in range(ranks)]
    expected = torch.stack([input @ weight.t() for input, weight in every]).sum(0)

    def body(comm):
        group = make_tensor_group(comm, "tensor", CommMeter(), choice="gloo")
        input, weight = (tensor.clone().requires_grad_() for tensor in every[comm.rank])
        total = RowProduct.apply(input, weight, group)
        total.square().sum().backward()
        return total.detach(), input.grad, weight.grad, group.meter.sent_bytes

    found = threads.run(ranks, body)
    for rank, (total, input_grad, weight_grad, sent_bytes) in enumerate(found):
        assert torch.equal(total, found[0][0])
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)
        grad = 2 * expected
        torch.testing.assert_close(input_grad, grad @ every[rank][1], rtol=0, atol=1e-12)
        torch.testing.assert_close(weight_grad, grad.flatten(0, -2).t() @ every[rank][0].flatten(0, -2))
        assert sent_bytes == pytest.approx(2 * (ranks - 1) / ranks * total.nbytes)


class Recorder:
    """A group that notes when sums begin and end."""

    name, size, index, meter = "recorder", 2, 0, CommMeter()

    def __init__(self, num_chunks: int) -> None:
        self.events: list[str] = []
        self._num_chunks, self._num_begun = num_chunks, 0

    def buffer(self, shape, dtype):
        return torch.full(tuple(shape), float("nan"), dtype=dtype)

    def num_chunks(self, num_bytes: int) -> int:
        return self._num_chunks

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        number, self._num_begun = self._num_begun, self._num_begun + 1
        assert not tensor.isnan().any(), "a chunk that is not computed yet"
        self.events.append(f"begin {number}")

        def finish() -> Tensor:
            self.events.append(f"end {number}")
            return tensor.mul_(2)

        return finish


def test_a_chunk_is_computed_while_the_sum_of_the_one_before_travels(monkeypatch):
    group, mm = Recorder(3), torch.mm

    def recorded(*args, **kwargs):
        group.events.append("compute")
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", recorded)
    input, weight = drawn(0, 6)
    total = RowProduct.apply(input, weight, group)
    assert " ".join(group.events) == ("compute begin 0 compute end 0 begin 1 compute end 1 begin 2 end 2")
    torch.testing.assert_close(total, 2 * (input @ weight.t()), rtol=0, atol=1e-12)


def test_small_products_are_not_cut():
    def body(comm):
        group = make_tensor_group(comm, "tensor", CommMeter(), choice="gloo")
        shared = make_tensor_group(comm, "tensor", CommMeter(), choice="shared")
        big, least = 100 * tensor_groups.MIN_CHUNK_BYTES, tensor_groups.MIN_CHUNK_BYTES
        return [group.num_chunks(big), group.num_chunks(2 * least - 1), group.num_chunks(0), shared.num_chunks(big)]

    assert threads.run(2, body) == [[tensor_groups.MAX_CHUNKS, 1, 1, 1]] * 2


def test_what_is_made_in_a_region_is_told_from_what_leaves_it():
    def body(comm):
        region = SplitRegion(make_tensor_group(comm, "tensor", CommMeter()))
        hidden, up, down, norm = (torch.ones(6, 6, requires_grad=True) for _ in range(4))
        inside = region.linear(hidden * 1, up, None).relu() * region.partial(norm)
        left = hidden * 2 + region.row_product(inside, down)
        leaves = list(origins(left))
        return None in set(origins(inside)), len(leaves) == 1 and leaves[0] is hidden, list(origins(up)) == [up]

    assert threads.run(2, body) == [(True, True, True)] * 2
