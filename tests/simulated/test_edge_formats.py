"""Formats of edges: what arrives, and how many bytes that is, whatever the tensors are."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourfold.axes.pipeline.rules.edges import EDGES, EdgeSpec, edge_bytes, uses_indices
from fourfold.comm.edge_compression import Compression, pack_bits, unpack_bits
from fourfold.comm.edges import encode, specs
from fourfold.plan.codec import num_sent

CPU = torch.device("cpu")
KINDS = [kind for kind in EDGES if kind != "none"]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = st.lists(st.integers(1, 40), min_size=2, max_size=4).filter(lambda shape: torch.Size(shape).numel() <= 20_000)
SPECS = st.builds(EdgeSpec, st.sampled_from(KINDS), st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.5, 0.9, 1.0]))


def activations(shape: Sequence[int], dtype: torch.dtype, seed: int, zeros: float = 0.3) -> Tensor:
    """Random numbers; some are zero, as behind a ReLU, and few are equal to others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    x = (x * 8).round() / 8 if seed % 2 else x
    x[torch.rand(*shape, generator=generator) < zeros] = 0.0
    return x.to(dtype)


def num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def header_bytes(tensors: Sequence[Tensor]) -> int:
    return 8 * len(encode(specs(tensors)))


@settings(max_examples=60, deadline=None)
@given(SPECS, SHAPES, st.sampled_from(FLOATS), st.integers(0, 999))
def test_messages_have_the_bytes_of_the_formula_and_both_ends_agree(spec, shape, dtype, seed):
    x, compression = activations(shape, dtype, seed).requires_grad_(), Compression(spec, CPU)
    sent = compression.pack([x])
    arrived = compression.unpack(list(sent.message))
    (got,) = arrived.tensors
    assert (got.shape, got.dtype, got.requires_grad) == (x.shape, x.dtype, True)
    columns, is_coded = shape[-1], spec.codes(shape, dtype.itemsize, is_float=True)
    rows, kept = x.numel() // columns, int((got != 0).sum())
    applied = spec if is_coded else EdgeSpec()
    expected = edge_bytes(applied, rows, columns, dtype.itemsize, kept if spec.kind == "dct" else None)
    assert num_bytes(sent.message) - header_bytes([x]) == expected.forward
    gradient = activations(shape, dtype, seed + 1)
    message = compression.pack_gradients([gradient], arrived.kept)
    assert num_bytes(message) == expected.backward
    (back,) = compression.unpack_gradients(list(message), sent.kept)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    for a, b in zip(sent.kept, arrived.kept, strict=True):
        assert a.spec == b.spec
        assert (a.mask is None) == (b.mask is None)
        assert a.mask is None or b.mask is None or torch.equal(a.mask, b.mask)
    if not is_coded:
        assert torch.equal(got, x)
        assert torch.equal(back, gradient)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from([0.01, 0.05, 0.25, 0.5, 0.9]), st.sampled_from(FLOATS), st.integers(0, 999))
def test_dct_keeps_the_largest_of_each_row_and_no_more_than_the_plan_says(shape, density, dtype, seed):
    x = activations(shape, dtype, seed)
    spec = EdgeSpec("dct", density)
    got = round_trip(spec, x)
    rows_x, rows_got = x.view(-1, shape[-1]), got.view(-1, shape[-1])
    limit = num_sent(shape[-1], density)
    for row, sent in zip(rows_x, rows_got, strict=True):
        keep = sent != 0
        assert torch.equal(sent[keep], row[keep])
        assert int(keep.sum()) == min(limit, int((row != 0).sum()))
        assert keep.all() or not keep.any() or row[keep].abs().min() >= row[~keep].abs().max()


def test_the_mask_of_a_row_depends_on_that_row_alone():
    """A token must not tell of a later one what its mask would."""
    x = activations([2, 5, 32], torch.float64, 2)
    changed = x.clone()
    changed[:, 3:] *= 100
    for kind in KINDS:
        spec = EdgeSpec(kind, 0.25)
        assert torch.equal(round_trip(spec, x)[:, :3], round_trip(spec, changed)[:, :3])


@pytest.mark.parametrize("kind", KINDS)
def test_ids_masks_and_numbers_of_samples_travel_unchanged(kind):
    tensors = [
        torch.arange(12).view(3, 4), torch.rand(3, 4) > 0.5, torch.randn(3), torch.tensor(1.5), torch.zeros(0, 4),
        torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4),
    ]  # fmt: skip
    compression = Compression(EdgeSpec(kind, 0.5), CPU)
    got = compression.unpack(list(compression.pack(tensors).message)).tensors
    assert [each.dtype for each in got] == [each.dtype for each in tensors]
    assert all(map(torch.equal, got[:-1], tensors[:-1]))
    assert not torch.equal(got[-1], tensors[-1])
    assert not any(each.requires_grad for each in got)


def test_gradients_of_those_tensors_that_need_one_are_matched_with_them():
    x, ids, y = torch.randn(3, 8).requires_grad_(), torch.arange(3), torch.randn(2, 3, 16).requires_grad_()
    compression = Compression(EdgeSpec("dct", 0.5), CPU)
    packed = compression.pack([x, ids, y])
    kept = compression.unpack(list(packed.message)).kept
    gradients = [torch.randn(3, 8), torch.randn(2, 3, 16)]
    got = compression.unpack_gradients(list(compression.pack_gradients(gradients, kept)), packed.kept)
    for each, sent, keep in zip(got, gradients, packed.kept, strict=True):
        assert keep.mask is not None
        assert torch.equal(each, sent * keep.mask)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_arrives_as_not_finite(kind, bad):
    x = activations([4, 16], torch.float32, 2, zeros=0.0)
    x[2, 5] = bad
    finite = round_trip(EdgeSpec(kind, 0.25), x).isfinite().all(-1)
    assert finite.tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_int8_errs_by_half_a_scale_at_most(dtype):
    x = activations([50, 64], dtype, 4)
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    error = (round_trip(EdgeSpec("int8"), x).double() - x.double()).abs()
    assert (error <= scale * (0.5 + 127 * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22))).all()


def test_a_row_of_zeros_stays_one():
    for kind in KINDS:
        assert not round_trip(EdgeSpec(kind, 0.25), torch.zeros(3, 16)).any()


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_bits_survive_packing(bits):
    mask = torch.tensor(bits)
    packed = pack_bits(mask)
    assert packed.numel() == -(-len(bits) // 8)
    assert torch.equal(unpack_bits(packed, len(bits)), mask)


def test_indices_of_wide_rows_arrive():
    """Beyond 32,767, where two bytes with a sign are negative."""
    for columns in (50_000, 65_536):
        x = torch.zeros(2, columns)
        x[0, [0, 32_767, 32_768, columns - 1]], x[1, 40_000] = 1.0, 2.0
        assert uses_indices(2, columns, 5)
        assert torch.equal(round_trip(EdgeSpec("dct", 0.001), x), x)


def test_dct_in_two_bytes_is_as_much_smaller_as_the_paper_allows():
    """At 95 %: a bit for each element, and two bytes for each that is kept, in both directions: 24.6 times."""
    rows, columns, kept = 100, 1000, 50
    dense = edge_bytes(EdgeSpec(), rows, columns, 4).both
    masked = rows * columns // 8 + 2 * 2 * rows * kept
    assert round(dense / masked, 1) == 24.6
    assert dense / edge_bytes(EdgeSpec("dct", 0.05), rows, columns, 2).both > 24.6  # indices are smaller than bits


def test_edges_that_are_not_compressed_send_the_tensors_themselves():
    tensors = [torch.randn(2, 3)]
    compression = Compression(EdgeSpec(), CPU)
    assert compression.pack(tensors).message is tensors
    assert compression.unpack(tensors).tensors is tensors
    assert compression.pack_gradients(tensors, ()) is tensors
    assert compression.unpack_gradients(tensors, ()) is tensors


def round_trip(spec: EdgeSpec, x: Tensor) -> Tensor:
    compression = Compression(spec, CPU)
    return compression.unpack(list(compression.pack([x]).message)).tensors[0]
