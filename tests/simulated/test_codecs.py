"""Laws of codecs: unsent gradients stay in residuals, messages have the planned size, every rank gets the same sum."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.comm.codec import registry
from fourfold.comm.codec.dct import Dct
from fourfold.comm.codec.int8 import Int8
from fourfold.comm.codec.powersgd import PowerSGD
from fourfold.comm.codec.protocol import SavedRows
from fourfold.comm.codec.sparse import kth_largest
from fourfold.comm.codec.topk import TopK
from fourfold.plan.codec import CODECS, INDEX_BLOCK, SCALE_BLOCK, CodecSpec, codec_rounds, num_sent
from fourfold.testing.oracle import simulate_reduce
from fourfold.torch_kit.tensor_reader import MemoryReader
from tests.pure.test_codec import bucket_of

STATEFUL = [kind for kind, row in CODECS.items() if row.remembers]
SHAPES = [(40, 30), (30,), (), (7, 3, 5), (600,), (33, 65)]
CPU = torch.device("cpu")


def make(kind, shapes, *, dtype="float64", size=1, **parameters):
    bucket = bucket_of(shapes, dtype, getattr(torch, dtype).itemsize)
    return [registry.make_codec(CodecSpec(kind, **parameters), bucket, shapes, device=CPU) for _ in range(size)]


def residual_of(each):
    assert each.residual is not None
    return each.residual


def dct(shapes, **parameters) -> Dct:
    (each,) = make("dct", shapes, **parameters)
    assert isinstance(each, Dct)
    return each


def gradients(shapes, *, size, seed=0, dtype=torch.float64):
    """Heavy-tailed gradients of `size` ranks; some elements are exactly zero."""
    generator = torch.Generator().manual_seed(seed)
    length = bucket_of(shapes).size
    flats = [torch.randn(length, generator=generator, dtype=torch.float64) ** 3 for _ in range(size)]
    return [flat.masked_fill_(torch.rand(length, generator=generator) < 0.2, 0.0).to(dtype) for flat in flats]


@settings(max_examples=25)
@given(
    kind=st.sampled_from(STATEFUL),
    size=st.integers(1, 4),
    steps=st.integers(1, 6),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    density=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    rank=st.integers(1, 4),
    refresh_steps=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_sent_gradients_plus_residuals_are_the_gradient(kind, size, steps, shapes, density, rank, refresh_steps, seed):
    codecs = make(kind, shapes, size=size, density=density, matrix_rank=rank, refresh_steps=refresh_steps)
    gradient = sent = torch.zeros(bucket_of(shapes).size, dtype=torch.float64)
    for step in range(steps):
        flats = gradients(shapes, size=size, seed=10 * seed + step)
        gradient = gradient + sum(flats)
        simulate_reduce(codecs, flats)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        sent = sent + flats[0]
    residual = sum(map(residual_of, codecs))
    assert (sent + residual - gradient).abs().max() <= 1e-12 * max(1.0, gradient.abs().max().item())


@pytest.mark.parametrize("kind", ["topk", "dct"])
def test_a_sparse_codec_of_density_1_equals_no_codec_bit_for_bit(kind):
    codecs = make(kind, SHAPES, size=3, density=1.0, dtype="float32")
    for step in range(3):
        flats = gradients(SHAPES, size=3, seed=step, dtype=torch.float32)
        dense = (flats[0] + flats[1]) + flats[2]
        simulate_reduce(codecs, flats)
        assert torch.equal(flats[0], dense)


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_message_has_the_predicted_size(kind, dtype):
    shapes = [*SHAPES, (300, 257)]  # more than one block of indices
    codecs = make(kind, shapes, size=2, dtype=dtype, density=0.03, matrix_rank=2)
    messages = simulate_reduce(codecs, gradients(shapes, size=2, dtype=getattr(torch, dtype)))
    expected = codec_rounds(
        CodecSpec(kind, density=0.03, matrix_rank=2), bucket_of(shapes, dtype, codecs_width(dtype)), shapes
    )
    assert [(each.combine, each.payload.nbytes) for each in messages] == list(expected) == list(codecs[0].rounds)


def codecs_width(dtype):
    return getattr(torch, dtype).itemsize


@pytest.mark.parametrize("kind", ["topk", "dct"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_residuals_of_two_byte_gradients_are_kept_in_float32(kind, dtype):
    # A one is sent each time; 20 thousandths accumulate in the residual. In bfloat16, one plus a thousandth is one.
    (each,) = make(kind, [(1000,)], dtype=dtype, density=0.001)
    thousandth = torch.tensor(0.001, dtype=getattr(torch, dtype)).item()
    for _ in range(20):
        flat = torch.full((1000,), thousandth, dtype=getattr(torch, dtype))
        flat[7] = 1.0
        simulate_reduce([each], [flat])
        assert flat.nonzero().tolist() == [[7]]
    residual = residual_of(each)
    assert residual.dtype == torch.float32
    assert residual[8].item() == pytest.approx(20 * thousandth, rel=1e-6)


@pytest.mark.parametrize("kind", CODECS)
def test_a_codec_has_the_state_tensors_that_its_table_row_lists(kind):
    (codec,) = make(kind, SHAPES, dtype="float32", density=0.1, matrix_rank=2)
    assert {key for state in codec.state_tensors().values() for key in state} == set(CODECS[kind].remembers)
    assert (codec.residual is not None) == ("remainder" in CODECS[kind].remembers)


def test_every_codec_has_a_class():
    assert registry.CLASSES.keys() == CODECS.keys()


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_residuals_keep_their_sum_on_another_number_of_ranks(kind, size):
    options = {"dtype": "float64", "density": 0.1, "matrix_rank": 2}
    saved, loaded = make(kind, SHAPES, size=2, **options), make(kind, SHAPES, size=size, **options)
    for step in range(3):
        simulate_reduce(saved, gradients(SHAPES, size=2, seed=step))
    states = [codec.state_tensors() for codec in saved]
    for rank, codec in enumerate(loaded):
        for name, tensors in codec.state_tensors().items():
            for key, tensor in tensors.items():
                rows = [MemoryReader(state[name][key]) for state in states]
                codec.reshard(key, SavedRows(rows, rank, size), tensor)
    before, after = (sum(map(residual_of, codecs)) for codecs in (saved, loaded))
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0 if size == 2 else 1e-12)
    if size == 2:
        for one, other in zip(saved, loaded, strict=True):
            for name, tensors in one.state_tensors().items():
                assert all(torch.equal(tensor, other.state_tensors()[name][key]) for key, tensor in tensors.items())


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_codec_without_saved_state_clears_its_residual(kind):
    (codec,) = make(kind, SHAPES, density=0.1, matrix_rank=2)
    simulate_reduce([codec], gradients(SHAPES, size=1))
    for tensors in codec.state_tensors().values():
        for key, tensor in tensors.items():
            codec.reshard(key, SavedRows((), 0, 1), tensor)
    assert not residual_of(codec).any()


@pytest.mark.parametrize("kind", CODECS)
def test_a_codec_resumes_from_its_state_bit_for_bit(kind):
    options = {"size": 2, "dtype": "float32", "density": 0.1, "matrix_rank": 2, "refresh_steps": 3}
    codecs, others = make(kind, SHAPES, **options), make(kind, SHAPES, **options)
    for step in range(4):
        simulate_reduce(codecs, gradients(SHAPES, size=2, seed=step, dtype=torch.float32))
    for one, other in zip(codecs, others, strict=True):
        for name, tensors in one.state_tensors().items():
            for key, tensor in tensors.items():
                other.state_tensors()[name][key].copy_(tensor)
    for step in range(4, 8):
        ours, theirs = (gradients(SHAPES, size=2, seed=step, dtype=torch.float32) for _ in range(2))
        simulate_reduce(codecs, ours)
        simulate_reduce(others, theirs)
        assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("kind", STATEFUL)
def test_residuals_scale_with_the_unit_of_gradients(kind):
    # Powers of two scale without rounding, so the two trainings must agree in every bit.
    options = {"dtype": "float32", "density": 0.1, "matrix_rank": 2, "refresh_steps": 3}
    codecs, others = make(kind, SHAPES, **options), make(kind, SHAPES, **options)
    for step in range(8):
        ours, theirs = (gradients(SHAPES, size=1, seed=step, dtype=torch.float32) for _ in range(2))
        if step == 4:
            codecs[0].scale_residual(8.0)
        if step >= 4:
            ours[0] *= 8.0
        simulate_reduce(codecs, ours)
        simulate_reduce(others, theirs)
        torch.testing.assert_close(ours[0], theirs[0] * (8.0 if step >= 4 else 1.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nonfinite_gradient_reaches_all_ranks_and_no_residual(kind, bad):
    codecs = make(kind, [(64, 64)], size=2, dtype="float32", density=0.01)
    for step in range(3):
        flats = gradients([(64, 64)], size=2, seed=step, dtype=torch.float32)
        if step == 1:
            flats[1][100:200] = bad
        simulate_reduce(codecs, flats)
        assert torch.isfinite(flats[0]).all() == (step != 1)
        assert all(torch.isfinite(residual_of(each)).all() for each in codecs)


# ---- casts --------------------------------------------------------------------------------------


def test_an_fp16_overflow_is_infinite_on_every_rank():
    codecs = make("fp16", [(3,)], size=2, dtype="float32")
    flats = [torch.tensor([40000.0, 1.0, 70000.0]), torch.tensor([40000.0, 1.0, 0.0])]
    simulate_reduce(codecs, flats)
    for flat in flats:
        assert flat.tolist() == [float("inf"), 2.0, float("inf")]


@pytest.mark.parametrize(("kind", "error"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_a_cast_is_off_by_at_most_half_a_unit_in_the_last_place(kind, error):
    (flat,) = gradients(SHAPES, size=1, dtype=torch.float32)
    before = flat.clone()
    simulate_reduce(make(kind, SHAPES, dtype="float32"), [flat])
    assert 0 < ((flat - before).abs() / before.abs().clamp(min=1e-3)).max() <= error


# ---- int8 ---------------------------------------------------------------------------------------


@given(length=st.integers(1, 3000), seed=st.integers(0, 999), exponent=st.integers(-30, 30))
def test_int8_is_off_by_at_most_half_a_step_of_its_block(length, seed, exponent):
    (each,) = make("int8", [(length,)], dtype="float32")
    (flat,) = gradients([(length,)], size=1, seed=seed, dtype=torch.float32)
    before = flat.mul_(10.0**exponent).clone()
    simulate_reduce([each], [flat])
    for start in range(0, length, SCALE_BLOCK):
        block = slice(start, start + SCALE_BLOCK)
        step = before[block].abs().max() / 127
        assert (flat[block] - before[block]).abs().max() <= 0.5001 * step


def test_int8_keeps_denormal_gradients_in_the_residual():
    (each,) = make("int8", [(10,)], dtype="float32")
    assert isinstance(each, Int8)
    flat = torch.full((10,), 1e-42)
    simulate_reduce([each], [flat])
    assert torch.equal(flat, torch.zeros(10))
    assert torch.equal(each.residual, torch.full((10,), 1e-42))


# ---- topk and dct -------------------------------------------------------------------------------


@given(
    length=st.integers(1, 60000),
    count=st.floats(0.0001, 1.0),
    seed=st.integers(0, 99),
    ties=st.booleans(),
)
def test_the_kth_largest_is_exact(length, count, seed, ties):
    (flat,) = gradients([(length,)], size=1, seed=seed, dtype=torch.float32)
    if ties:
        flat = flat.round()
    k = max(1, int(length * count))
    assert kth_largest(flat, k) == flat.abs().sort(descending=True).values[k - 1].item()


def test_a_misleading_sample_does_not_change_the_kth_largest():
    # The sample contains none of the large elements, or all of them.
    for first in (0, 1):
        flat = torch.rand(80000)
        flat[first :: 80000 // 8192][:500] += 5.0
        assert kth_largest(flat, 300) == flat.sort(descending=True).values[299].item()


@given(shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4), percent=st.integers(1, 60))
def test_topk_sends_the_largest_of_the_bucket(shapes, percent):
    size = bucket_of(shapes).size
    flat = torch.randperm(size).add_(1).to(torch.float64) * torch.randint(0, 2, (size,)).mul_(2).sub_(1)
    before = flat.clone()
    (each,) = make("topk", shapes, density=percent / 100)
    assert isinstance(each, TopK)
    simulate_reduce([each], [flat])
    largest = before.abs() > size - num_sent(size, percent / 100)
    assert torch.equal(flat, before * largest)


def test_topk_breaks_ties_by_the_lowest_index():
    flat = torch.ones(1000)
    flat[500] = 2.0
    simulate_reduce(make("topk", [(1000,)], dtype="float32", density=0.01), [flat])
    assert flat.nonzero().squeeze(1).tolist() == [*range(9), 500]


def test_indices_span_many_blocks():
    length = 3 * INDEX_BLOCK + 17
    flat = torch.zeros(length)
    indices = torch.tensor([0, 1, INDEX_BLOCK - 1, INDEX_BLOCK, 2 * INDEX_BLOCK + 5, 3 * INDEX_BLOCK, length - 1])
    flat[indices] = torch.arange(1.0, 8.0)
    for kind in ("topk", "dct"):
        sent = flat.clone()
        simulate_reduce(make(kind, [(length,)], dtype="float32", density=0.001), [sent])
        assert torch.equal(sent, flat)


@given(length=st.integers(256, 5000), percent=st.integers(1, 99), seed=st.integers(0, 99))
def test_a_refresh_without_ties_keeps_exactly_the_density(length, percent, seed):
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randperm(length, generator=generator).add_(1).to(torch.float64)
    simulate_reduce(make("dct", [(length,)], density=percent / 100), [flat])
    assert flat.count_nonzero() == length - length * (100 - percent) // 100


def test_zeros_are_never_sent():
    # More than η of the elements are zero: the η-quantile is 0, and `>=` would keep everything. Fewer elements are left
    # than the band's lower bound, and refreshing the threshold in every step would find no more.
    each = dct([(1000,)], density=0.1, refresh_steps=2)
    for _ in range(4):
        flat = torch.zeros(1000, dtype=torch.float64)
        flat[:30] = 1.0
        simulate_reduce([each], [flat])
        assert torch.equal(flat.nonzero().squeeze(1), torch.arange(30))
        assert not each.residual.any()
    assert each.num_early_refreshes == 0


def test_a_threshold_is_kept_for_refresh_steps():
    each = dct([(4000,)], density=0.1, refresh_steps=3)
    seen = []
    for step in range(9):
        flat = torch.linspace(-1.0, 1.0, 4000, dtype=torch.float64) * (1.0 + 0.001 * step)
        each.residual.zero_()
        simulate_reduce([each], [flat])
        seen.append(each.thresholds.item())
    assert [a == b for a, b in itertools.pairwise(seen)] == [True, True, False] * 2 + [True, True]


@given(seed=st.integers(0, 30), growth=st.sampled_from([0.2, 0.7, 1.0, 1.5, 5.0]))
def test_drift_never_takes_density_out_of_its_band(seed, growth):
    each = dct([(5000,)], density=0.05, refresh_steps=1000)
    for step in range(12):
        (flat,) = gradients([(5000,)], size=1, seed=100 * seed + step)
        simulate_reduce([each], [flat.mul_(growth**step)])
        assert 125 <= flat.count_nonzero() <= 313  # 250 expected; the band goes from half of it to a quarter more
    assert each.num_early_refreshes > 0


def test_the_first_threshold_is_too_low_and_is_refreshed_early():
    # There is no residual at the first refresh. From the second step on, most of the sum is residual.
    each = dct([(20000,)], density=0.01, refresh_steps=1000)
    counts = []
    for step in range(30):
        flat = torch.randn(20000, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        simulate_reduce([each], [flat])
        counts.append(int(flat.count_nonzero()))
    assert max(counts) <= 250
    assert each.num_early_refreshes >= 1
    assert each.thresholds.item() > 2.5758 * 1.5  # it began at the 1 % quantile of |N(0, 1)|


# ---- powersgd -----------------------------------------------------------------------------------


@given(
    rows=st.integers(12, 40),
    columns=st.integers(12, 40),
    rank=st.integers(1, 4),
    size=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_gradient_of_low_rank_is_sent_exactly(rows, columns, rank, size, seed):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    flats = [
        (left @ torch.randn(rank, columns, generator=generator, dtype=torch.float64)).flatten() for _ in range(size)
    ]
    total = sum(flats)
    codecs = make("powersgd", [(rows, columns)], size=size, matrix_rank=rank)
    simulate_reduce(codecs, flats)
    torch.testing.assert_close(flats[0], total, rtol=0, atol=1e-10)


def test_a_warm_start_finds_the_best_approximation():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 50, generator=generator, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix)
    values = 2.0 ** -torch.arange(50.0, dtype=torch.float64)
    matrix = u[:, :50] @ torch.diag(values) @ v
    best = values[3:].norm()
    (each,) = make("powersgd", [(60, 50)], matrix_rank=3)
    assert isinstance(each, PowerSGD)
    errors = []
    for _ in range(20):
        each.residual.zero_()
        flat = matrix.flatten().clone()
        simulate_reduce([each], [flat])
        errors.append((flat.view(60, 50) - matrix).norm() / best)
    assert errors[0] > 1.1
    assert errors[-1] == pytest.approx(1.0, abs=1e-9)


def test_powersgd_sends_a_matrix_whose_gradient_was_zero_before():
    (each,) = make("powersgd", [(30, 30)], matrix_rank=2)
    for _ in range(3):
        flat = torch.zeros(900, dtype=torch.float64)
        simulate_reduce([each], [flat])
        assert not flat.any()
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(2, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    for _ in range(3):
        flat = (left.T @ right).flatten()
        simulate_reduce([each], [flat])
    torch.testing.assert_close(each.residual, torch.zeros(900, dtype=torch.float64), rtol=0, atol=1e-10)


def test_residuals_do_not_accumulate_differences_between_ranks():
    # Differences between ranks cancel in the sum, and must not accumulate in the residuals.
    codecs = make("powersgd", [(40, 40)], size=2, matrix_rank=2)
    generator = torch.Generator().manual_seed(3)
    norms = []
    for _ in range(60):
        left, right = (torch.randn(2, 40, generator=generator, dtype=torch.float64) for _ in range(2))
        low, noise = (left.T @ right).flatten(), torch.randn(1600, generator=generator, dtype=torch.float64)
        simulate_reduce(codecs, [low + noise, low - noise])
        norms.append(max(residual_of(each).norm().item() for each in codecs))
    assert norms[-1] < 60**0.5 * 40
