"""Rank dropout: slices of the same tensor are dropped independently, the same slice alike, in both forwards.

A rank is a `SplitDropout` with its own slices; the ranks of a test run one after the other, from the same state.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.axes.tensor.attach.split_randomness import find_slice, slices_mismatch
from fourfold.axes.tensor.attach.tensor_parts import TensorPlace
from fourfold.model.rank_dropout import DrawSlice, DrawSlices, FoundDraw, RankDropout, SplitDropout, TaggedDraws
from fourfold.model.sdpa_interception import intercept_attention
from fourfold.plan.param_spec import ShardPiece, TensorShard
from fourfold.words.errors import TaskError

P = 0.5


class Called(nn.Module):
    """A model that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def drawn(model: nn.Module, found: Mapping[str, Sequence[DrawSlice | None]], *inputs: Tensor) -> Any:
    """What a rank with these slices computes from the state of seed 0, and the state after it."""
    slices = DrawSlices(2)
    slices.learn(FoundDraw(name, part) for name, parts in found.items() for part in parts)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        with SplitDropout(model, slices).installed():
            result = model(*inputs)
        return result, torch.get_rng_state()


def split(start: int, stop: int, *, dim: int = 1, ndim: int = 2) -> DrawSlice:
    return DrawSlice(ndim, dim, ((start, stop),))


DROPOUTS = {
    "function": lambda x: F.dropout(x, P),
    "keywords": lambda x: F.dropout(input=x, p=P, training=True, inplace=False),
    "in place": lambda x: F.dropout(x.clone(), P, inplace=True),
    "torch's": lambda x: torch.dropout(x, P, train=True),
    "module": nn.Dropout(P),
}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_slices_are_dropped_independently_and_whole_tensors_alike(kind):
    model, x = Called(DROPOUTS[kind]), torch.ones(50, 40)
    name = "function" if kind == "module" else ""
    (first, state), (second, other) = (
        drawn(model, {name: [split(40 * index, 40 * index + 40)]}, x) for index in (0, 1)
    )
    assert torch.equal(state, other)
    for each in (first, second):
        assert set(each.unique().tolist()) == {0.0, 1 / (1 - P)}
    assert (first == second).double().mean().item() == pytest.approx(0.5, abs=0.05)
    again, _ = drawn(model, {name: [split(0, 40)]}, x)
    assert torch.equal(first, again)
    whole = [drawn(model, {name: [None], "elsewhere": [split(index, 1)]}, x) for index in (0, 1)]
    assert torch.equal(whole[0][0], whole[1][0])
    assert torch.equal(whole[0][1], whole[1][1])


def test_each_place_of_the_sequence_and_the_tensor_axis_drops_other_entries():
    model, x, masks = Called(DROPOUTS["function"]), torch.ones(2000, 1), list[Tensor]()
    for index, part in itertools.product(range(4), range(8)):
        slices = DrawSlices(8)
        slices.learn([FoundDraw("", split(part, part + 1))])
        dropout = RankDropout(TaggedDraws(slices), index, 4)
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            with slices.numbering(model), intercept_attention(dropout.attend, overrides=dropout.overrides):
                masks.append(model(x) != 0)
    for one, other in itertools.combinations(masks, 2):
        assert (one == other).double().mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("inplace", [False, True])
def test_ranks_with_a_part_in_common_drop_it_alike(inplace):
    """Queries of their own and the same keys, in one tensor."""
    model, x = Called(lambda x: F.dropout(x.clone(), P, inplace=inplace)), torch.ones(50, 12)
    parts = [DrawSlice(2, 1, ((start, start + 8), (16, 20))) for start in (0, 8)]
    first, second = (drawn(model, {"": [part]}, x)[0] for part in parts)
    assert torch.equal(first[:, 8:], second[:, 8:])
    assert not torch.equal(first[:, :8], second[:, :8])
    assert set(first.unique().tolist()) == {0.0, 2.0}


def attention(q: Tensor) -> Tensor:
    """The probabilities of attention: its values are the identity."""
    values = torch.eye(q.shape[-2], dtype=q.dtype).expand(*q.shape[:-1], q.shape[-2])
    return F.scaled_dot_product_attention(q, torch.zeros_like(q), values, dropout_p=P)


@pytest.mark.parametrize("shape", [(4, 2, 8, 8), (8, 8, 8), (2, 4, 2, 8, 8)])
def test_attention_drops_other_entries_of_other_heads(shape):
    dim = len(shape) - 3
    slices = [split(start, start + shape[dim], dim=dim, ndim=len(shape)) for start in (0, shape[dim])]
    (first, state), (second, other) = (drawn(Called(attention), {"": [each]}, torch.zeros(shape)) for each in slices)
    assert torch.equal(state, other)
    assert (first == second).double().mean().item() == pytest.approx(0.5, abs=0.1)
    assert first.mean().item() == pytest.approx(1 / 8, abs=0.02)


class Net(nn.Module):
    """Dropout of split features, of whole ones, and in attention that is whole."""

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.dropout, self.repeats = nn.Dropout(P), repeats
        self.attention = nn.MultiheadAttention(8, 2, dropout=P, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.repeats else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        x = self.dropout(x.sin())
        for need_weights in (True, False):
            x = x + self.attention(x, x, x, need_weights=need_weights)[0]
        x = F.dropout(x.exp(), P)
        return attention(x[:, None].sin()).sin() @ self.dropout(x)[:, None]


NET = {"dropout": [split(8, 16, dim=2, ndim=3), None], "attention": [None, None], "": [None, split(1, 2, ndim=4)]}


def test_a_checkpoint_drops_the_same_in_both_forwards():
    grads = []
    for repeats in (False, True):
        torch.manual_seed(1)
        net, x = Net(repeats=repeats), torch.randn(3, 8, 8).double().requires_grad_()
        slices = DrawSlices(2)
        slices.learn(FoundDraw(name, part) for name, parts in NET.items() for part in parts)
        with torch.random.fork_rng([]), SplitDropout(net, slices).installed():
            torch.manual_seed(0)
            net(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("kind", DROPOUTS)
def test_a_checkpoint_runs_as_far_again_without_tokens(kind, num_rows):
    """Ranks without tokens are in the same collectives as those with some."""
    reached = []

    def compute(x: Tensor) -> Tensor:
        x = x.sin()
        reached.append(len(x))
        return DROPOUTS[kind](x)

    model = Called(lambda x: checkpoint(compute, x, use_reentrant=False))
    name, tokens = "function" if kind == "module" else "", DrawSlice(2, 0, ((1, 2),), is_of_tokens=True)
    x = torch.randn(num_rows, 4, requires_grad=True)
    slices = DrawSlices(2)
    slices.learn([FoundDraw(name, tokens), FoundDraw("", tokens)])
    with SplitDropout(model, slices).installed():
        model(x).sum().backward()
    assert reached == [num_rows] * 2


def test_a_checkpoint_that_does_not_restore_the_state_is_refused():
    x = torch.ones(4, 4, requires_grad=True)
    model = Called(
        lambda t: checkpoint(lambda u: F.dropout(u, P).sin(), t, use_reentrant=False, preserve_rng_state=False)
    )
    slices = DrawSlices(2)
    slices.learn([FoundDraw("", split(0, 4))])
    with SplitDropout(model, slices).installed(), pytest.raises(TaskError, match="preserve_rng_state=True"):
        model(x).sum().backward()


# ---- what is not known ------------------------------------------------------------------------------


class Shared(nn.Module):
    """One dropout for split and for whole features."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.number = nn.Dropout(P), 2

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.dropout(x) for _ in range(self.number)]


def test_a_module_may_draw_for_split_and_for_whole_tensors():
    slices = [split(0, 40), split(40, 80)]
    (first, whole), (second, again) = (
        drawn(Shared(), {"dropout": [each, None]}, torch.ones(2, 40))[0] for each in slices
    )
    assert not torch.equal(first, second)
    assert torch.equal(whole, again)
    for number in (1, 3):
        model = Shared()
        model.number = number
        with pytest.raises(TaskError, match=f"2 times in the dry run and {number} times now"):
            drawn(model, {"dropout": [split(0, 4), None]}, torch.ones(2, 4))


@pytest.mark.parametrize(("found", "message"), [
    ({"elsewhere": [split(0, 4)]}, "dropout = 0.5 in dropout, which drew nothing in the dry run"),
    ({"dropout": [split(0, 8)]}, r"dropout = 0.5 in dropout, for \[2, 4\], with 8 split features in dim 1 before"),
])  # fmt: skip
def test_draws_that_the_dry_run_has_not_seen_are_refused(found, message):
    with pytest.raises(TaskError, match=message):
        drawn(Shared(), found, torch.ones(2, 4))


def test_dropout_is_refused_where_nothing_was_compared():
    model = Shared()
    with SplitDropout(model, DrawSlices(2)).installed():
        model.eval()(torch.ones(2, 4))
        with pytest.raises(
            TaskError, match=r"tp = 2 and dropout = 0\.5 in dropout, where the tensor rules are unchecked"
        ):
            model.train()(torch.ones(2, 4))


def test_an_evaluation_tells_nothing_of_training():
    slices, model = DrawSlices(2), Shared()
    slices.learn([], training=False)
    with SplitDropout(model, slices).installed(), pytest.raises(TaskError, match="drew nothing in the dry run"):
        model(torch.ones(2, 4))


def test_ranks_with_other_draws_are_refused():
    known = [FoundDraw("a", split(0, 4)), FoundDraw("b", None)]
    assert slices_mismatch([known, [FoundDraw("a", split(4, 8)), FoundDraw("b", None)]]) is None
    for other in ([known[0]], [FoundDraw("a", None), FoundDraw("b", None)]):
        assert slices_mismatch([known, other]) is not None


# ---- how a slice is found ---------------------------------------------------------------------------

WHOLE = torch.arange(2 * 3 * 16.0).view(2, 3, 16)
FUSED = TensorShard((16,), 0, (ShardPiece(4, 8), ShardPiece(12, 14, 1, 2)))
CASES = {
    "whole": (WHOLE, WHOLE, 1, None),
    "features": (WHOLE, WHOLE[..., 4:8], 1, DrawSlice(3, 2, ((4, 8),))),
    "fewer parts than ranks": (WHOLE, WHOLE[..., 8:], 3, DrawSlice(3, 2, ((8, 16),))),
    "parts of a fused layer": (
        WHOLE, WHOLE[..., [4, 5, 6, 7, 12, 13]], 1, DrawSlice(3, 2, ((4, 8), (12, 14))),
    ),
    "heads folded into samples": (
        WHOLE.flatten(0, 1).T, WHOLE[..., 4:8].flatten(0, 1).T, 1, DrawSlice(2, 0, ((4, 8),)),
    ),
    "samples by heads": (
        WHOLE.transpose(1, 2).flatten(0, 1), WHOLE.transpose(1, 2)[:, 4:8].flatten(0, 1), 1,
        DrawSlice(2, 0, ((4, 8),), fold=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_slice_is_found_by_its_numbers(case):
    whole, local, number, expected = CASES[case]
    found = find_slice(whole, local, TensorPlace(number, 4), [FUSED])
    assert found == expected
    assert found is None or found.fits(local)
    assert FoundDraw.from_json("a", None if found is None else [*found]).part == expected


@pytest.mark.parametrize("local", [WHOLE[..., 5:9], WHOLE[:1, :, 4:8], WHOLE + 1, WHOLE[..., 0]], ids=range(4))
def test_what_is_no_slice_is_not_taken_for_one(local):
    with pytest.raises(LookupError):
        find_slice(WHOLE, local, TensorPlace(1, 4), [FUSED])
