"""Laws of attention over the context axis: how it may be used, what it refuses, its dropout, its waits."""

import functools
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from fourfold.axes.context.rules.layout import RINGS, token_positions
from fourfold.axes.context.work import kernels
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.dropout import AttentionDropout, DropoutMask, _as_int64, _splitmix64
from fourfold.comm import shared_regions
from fourfold.comm.channel import MemoryChannel
from fourfold.comm.meter import CommMeter
from fourfold.testing import threads
from fourfold.torch_kit import memory
from fourfold.torch_kit.fingerprint import GOLDEN_GAMMA
from fourfold.words.errors import DivergenceError, PeerError, PlanError, TrainingError
from tests import attention_oracle
from tests.attention_oracle import TOLERANCE, AttentionCase


def both(size, use, ring="zigzag", ulysses=1):
    """The results of `use(attend, tensors)` in one process, and those of the ranks, concatenated."""
    tensors = attention_oracle.make_tensors(AttentionCase(size, ring, ulysses))
    single_process = use(scaled_dot_product_attention, tensors)

    def body(comm):
        axis = threads.make_axis(comm, ring, ulysses)
        mine = torch.tensor(token_positions(axis.local_token_ranges(tensors.q.shape[-2])))
        q, k, v, grad_out = (tensor[:, :, mine] for tensor in tensors[:4])
        local = attention_oracle.FullTensors(q, k, v, grad_out, None)
        return mine, use(functools.partial(context_attention, group=axis), local)

    found = threads.run(size, body)
    order = torch.argsort(torch.cat([mine for mine, _ in found]))
    together = [torch.cat(parts, dim=2)[:, :, order] for parts in zip(*(each for _, each in found), strict=True)]
    return together, single_process


def same(found, expected):
    return all((a - b).abs().max() <= TOLERANCE for a, b in zip(found, expected, strict=True))


USES = [("zigzag", 1), ("plain", 1), ("rsa", 1), ("gather", 1), ("zigzag", 2), ("plain", 4)]


@pytest.mark.parametrize(("ring", "ulysses"), USES)
def test_attention_may_be_recomputed_in_backward(ring, ulysses):
    def use(attend, tensors):
        q, k, v = (tensor.clone().requires_grad_() for tensor in tensors[:3])
        layer = lambda q, k, v: attend(q, k, v, is_causal=True).sin()  # noqa: E731
        out = checkpoint(layer, q, k, v, use_reentrant=False)
        out.backward(tensors.grad_out)
        return out.detach(), q.grad, k.grad, v.grad

    assert same(*both(4, use, ring, ulysses))


@pytest.mark.parametrize(("ring", "ulysses"), USES)
def test_attention_may_be_used_twice_in_one_graph_and_under_no_grad(ring, ulysses):
    def use(attend, tensors):
        q, k, v = (tensor.clone().requires_grad_() for tensor in tensors[:3])
        with torch.no_grad():
            first = attend(q, k, v)
        out = attend(attend(q, k, v, is_causal=True), k, v)
        out.backward(tensors.grad_out)
        return first, out.detach(), q.grad, k.grad, v.grad

    assert same(*both(4, use, ring, ulysses))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
@pytest.mark.parametrize(("ring", "ulysses"), USES)
def test_q_k_and_v_may_require_gradients_independently(ring, ulysses, wanted):
    def use(attend, tensors):
        given = {name: tensor.clone() for name, tensor in zip("qkv", tensors[:3], strict=True)}
        for name in wanted:
            given[name].requires_grad_()
        attend(*given.values(), is_causal=True).backward(tensors.grad_out)
        assert all(given[name].grad is None for name in "qkv" if name not in wanted)
        return [given[name].grad for name in wanted]

    assert same(*both(4, use, ring, ulysses))


@pytest.mark.parametrize(("ring", "ulysses"), USES)
def test_tensors_may_have_any_strides(ring, ulysses):
    def use(attend, tensors):
        # A projection [B, l, H, K], viewed as [B, H, l, K]; the upstream gradient is one number, expanded.
        q, k, v = (t.transpose(1, 2).contiguous().requires_grad_() for t in tensors[:3])
        out = attend(*(t.transpose(1, 2) for t in (q, k, v)))
        out.sum().backward()
        return [out.detach(), *(t.grad.transpose(1, 2) for t in (q, k, v))]

    assert same(*both(4, use, ring, ulysses))


def test_tensors_may_lack_the_head_dim_and_batches_may_be_empty():
    def use(attend, tensors):
        q, k, v, grad_out = (tensor[:, 0].clone().requires_grad_() for tensor in tensors[:4])
        attend(q, k, v).backward(grad_out)
        empty = [t[:0].detach().requires_grad_() for t in tensors[:3]]
        attend(*empty).sum().backward()
        assert empty[1].grad.shape == empty[1].shape
        return [t.grad.unsqueeze(1) for t in (q, k, v)]

    assert same(*both(4, use))


@pytest.mark.parametrize("ring", RINGS)
def test_double_backward_is_refused(ring):
    def body(comm):
        q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 1, 2, 4))
        out = context_attention(q, k, v, threads.make_axis(comm, ring))
        (grad,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    threads.run(2, body)


def test_one_rank_calls_torchs_own_attention(monkeypatch):
    axis = threads.run(1, threads.make_axis)[0]
    q, k, v = torch.randn(3, 2, 2, 6, 4)
    called, own = [], scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (called.append(1), own(*a, **k))[1]
    )
    assert torch.equal(context_attention(q, k, v, axis, is_causal=True), own(q, k, v, is_causal=True))
    assert called == [1]
    # It accepts masks that cannot be split between ranks.
    mask = torch.randn(6, 6, requires_grad=True)
    context_attention(q, k, v, axis, mask=mask).sum().backward()
    assert mask.grad is not None


@pytest.mark.parametrize("groups", [4, 2])
def test_half_precision_is_computed_by_flash_attention_on_gpus(groups):
    with FakeTensorMode():  # the kernels' rules for shapes and dtypes, without a GPU
        q = torch.empty(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, groups, 16, 64, device="cuda", dtype=torch.bfloat16)
        block = kernels.AttentionBlock(q, k, k, 0.1, is_causal=True)
        part = kernels.forward(block)
        grads = kernels.backward(block, kernels.SoftmaxTotals(part.out, part.out, part.lse))
    # The plain kernel returns float32.
    assert (part.out.shape, part.out.dtype) == (q.shape, torch.bfloat16)
    assert (part.lse.shape, part.lse.dtype) == (q.shape[:-1], torch.float32)
    assert (grads.q.shape, grads.k.shape, grads.v.shape) == (q.shape, k.shape, k.shape)


# ---- what is refused -------------------------------------------------------------------------------

Q = torch.randn(2, 4, 6, 8)
REFUSED = [
    ({"mask": torch.ones(6, 6, dtype=torch.bool)}, r"a.* mask \[6, 6\] .*need \[.., 1, 6\] .*\[.., 6 or 1, 12\]"),
    ({"mask": torch.ones(3, 1, 1, 6)}, r"an attention mask \[3, 1, 1, 6\]"),
    ({"mask": torch.ones(1, 1, dtype=torch.bool)}, r"an attention mask \[1, 1\]"),
    ({"mask": torch.ones(1, 6, dtype=torch.int64)}, "need a boolean or floating-point mask"),
    ({"mask": torch.ones(1, 6, requires_grad=True)}, "requires a gradient"),
    ({"k": Q[:, :, :5], "v": Q[:, :, :5]}, "self-attention"),
    ({"k": Q[:, :2], "v": Q[:, :2]}, "need as many key heads as query heads"),
    ({"k": Q[:, :3], "v": Q[:, :3], "enable_gqa": True}, "the number of key heads divides"),
    ({"k": Q[..., :4]}, "need q "),
    ({"v": Q.double()}, "one floating-point dtype"),
    (
        {"q": Q[:, :, :5], "k": Q[:, :, :5], "v": Q[:, :, :5]},
        "sequence length 10 .*divisible by 4 .*try length 8 or 12",
    ),
    (
        {"dropout": AttentionDropout(0.5, samples=[1, 2, 3])},
        "sample indices of shape .3., and a batch of 2 samples",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_unsupported_arguments_are_refused(given, message):
    def body(comm):
        with pytest.raises((TrainingError, PlanError), match=message):
            context_attention(group=threads.make_axis(comm), **{"q": Q, "k": Q, "v": Q, **given})

    threads.run(2, body)


def test_heads_that_cannot_be_exchanged_are_refused():
    def body(comm):
        with pytest.raises(TrainingError, match=r"ulysses = 4, 4 heads, 2 heads of .*try ulysses = 1 or 2"):
            context_attention(Q, Q[:, :2], Q[:, :2], threads.make_axis(comm, ulysses=4), enable_gqa=True)

    threads.run(4, body)
    with pytest.raises(TrainingError, match=r"dropout of 1\.5"):
        AttentionDropout(1.5)


# ---- dropout ---------------------------------------------------------------------------------------


def keep_mask(p=0.25, rows=200, columns=300, **fields):
    draw = DropoutMask(AttentionDropout(p, **fields), *(torch.arange(n) for n in (3, 4, rows, columns)))
    return draw.keep_mask(slice(None), slice(None))


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.25, 0.9, 1.0])
def test_dropout_keeps_the_requested_fraction_along_every_dim(p):
    found = keep_mask(p).double()
    for dims in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3)):
        kept_fraction = found.mean(dims)
        count = found.numel() / kept_fraction.numel()
        assert (kept_fraction - (1 - p)).abs().max() <= 5 * (p * (1 - p) / count) ** 0.5


def test_every_call_position_and_seed_has_its_own_dropout_mask():
    first = keep_mask().double() - 0.75
    others = [keep_mask(seed=1), keep_mask(step=1), keep_mask(call=1), keep_mask(seed=2**40), keep_mask(seed=-1)]
    others += [keep_mask().roll(1, dim) for dim in range(4)]
    for other in others:
        correlation = (first * (other.double() - 0.75)).mean() / (0.25 * 0.75)
        assert abs(correlation) < 5 / first.numel() ** 0.5


def test_a_dropout_mask_depends_on_positions_and_not_on_blocks():
    whole = keep_mask(rows=16, columns=24)
    part = DropoutMask(
        AttentionDropout(0.25), torch.tensor([2]), torch.tensor([1, 3]), torch.arange(16), torch.arange(24).flip(0)
    )
    assert torch.equal(part.keep_mask(slice(4, 9), slice(0, 7)), whole[2:3, [1, 3], 4:9].flip(-1)[..., :7])


def test_the_hash_is_the_published_one_and_never_changes():
    # SplitMix64 from 1234567, as published with its test programs.
    words = _splitmix64(torch.tensor([1234567, 1234567 + _as_int64(GOLDEN_GAMMA)]))
    assert words.tolist() == [6457827717110365317, 3203168211198807973]
    # A run that resumes from a checkpoint must draw the same in later versions.
    drawn = keep_mask(0.5, 2, 12, seed=1, step=2, call=3)[1, 2].long().tolist()
    assert ["".join(map(str, row)) for row in drawn] == ["111110101011", "100101000010"]


# ---- shared memory ---------------------------------------------------------------------------------


def test_a_block_is_not_overwritten_before_all_ranks_have_read_it():
    second_has_begun = threading.Event()

    def body(comm):
        ring_group = threads.make_axis(comm, transport="shared").ring_group
        first = ring_group.iterate_blocks([torch.full((4,), 1.0 + comm.rank)])
        if comm.rank == 0:
            list(first)
            second = ring_group.iterate_blocks([torch.full((4,), 5.0)])
            next(second)
            second_has_begun.set()
            return next(second)[1].tolist()
        held = [block for _, block in (next(first), next(first))][1]
        assert second_has_begun.wait(30)
        assert held.tolist() == [1.0] * 4
        list(first)
        return list(ring_group.iterate_blocks([torch.full((4,), 6.0)]))[1][1].tolist()

    assert threads.run(2, body) == [[6.0] * 4, [5.0] * 4]


def test_a_sum_is_not_overwritten_before_its_owner_has_read_it():
    is_ahead = threading.Event()

    def body(comm):
        ring_group = threads.make_axis(comm, transport="shared").ring_group
        found = []
        for number in (1.0, 2.0):
            carry = ring_group.make_accumulator(3, torch.float64, torch.device("cpu"))
            carry.receive().add_(number)
            carry.send()
            if comm.rank == 1 and number == 2.0:
                is_ahead.set()
            if comm.rank == 0 and number == 1.0:
                assert is_ahead.wait(30)
            found.append(carry.result().tolist())
        return found

    assert threads.run(2, body) == [[[1.0] * 3, [2.0] * 3]] * 2


def test_ranks_with_different_attention_calls_raise():
    def body(comm):
        axis, mine = threads.make_axis(comm, transport="shared"), Q[:, :, : 2 + 2 * comm.rank]
        with pytest.raises(DivergenceError, match=r"rank . has \d+ bytes, rank . \d+ .*need the same attention"):
            context_attention(mine, mine, mine, axis)

    threads.run(2, body)


def test_a_wait_ends_when_a_rank_has_died_or_never_arrives():
    def raise_peer_error():
        raise PeerError("rank 1 died")

    def body(comm):
        ring_group = threads.make_axis(comm, transport="shared").ring_group
        if comm.rank == 1:
            return
        assert isinstance(ring_group, MemoryChannel)
        ring_group.regions.check_peers = raise_peer_error
        with pytest.raises(PeerError, match="rank 1 died"):
            list(ring_group.iterate_blocks([torch.zeros(2)]))

    def late(comm):
        place = shared_regions.GroupPlace(0, (4, 7))
        regions = shared_regions.SharedRegions(
            memory.create_growing(shared_regions.total_bytes(2)),
            place,
            CommMeter(),
            check_peers=lambda: None,
            time_limit_seconds=0.1,
        )
        ring_group = MemoryChannel(regions)
        with pytest.raises(PeerError, match="rank 7 did not arrive"):
            list(ring_group.iterate_blocks([torch.zeros(2)]))

    threads.run(2, body)
    threads.run(1, late)


def test_a_block_that_does_not_fit_is_refused():
    def body(comm):
        ring_group = threads.make_axis(comm, transport="shared").ring_group
        with pytest.raises(memory.MemoryUnavailable, match="need at most 16 GiB"):
            ring_group.make_accumulator(2**40, torch.float32, torch.device("cpu")).receive()

    threads.run(2, body)
