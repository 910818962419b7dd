"""Laws of the context axis in training; ranks are threads."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.feed.batches import Batch
from fourfold.model.rank_dropout import DrawSlices, RankDropout, TaggedDraws
from fourfold.model.sdpa_interception import AttentionCall, intercept_attention
from fourfold.orders.sample_order import BatchRange
from fourfold.plan.plan import Plan
from fourfold.step.model_checks import check_plan_on_ranks
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import PlanError, TaskError
from tests.cases import (
    SEED_LOCK,
    Case,
    batches,
    build_step,
    deviation,
    local_batch,
    optimizer,
    train_oracle,
    train_step,
)
from tests.cases import loss as loss_of
from tests.cases import model as make

pytestmark = pytest.mark.usefixtures("without_dry_run")

RING_LAYOUTS = [("zigzag", 1), ("plain", 1), ("rsa", 1), ("gather", 1), ("zigzag", 2), ("plain", 2)]
LM = Case(model="lm", batch_sizes=(4, 4, 4))


@pytest.mark.parametrize(("dp", "cp", "ring", "ulysses"), [
    (1, 3, "zigzag", 1), (1, 8, "zigzag", 2), (1, 4, "rsa", 1), (2, 4, "gather", 1), (1, 4, "plain", 1),
])  # fmt: skip
def test_a_sequence_may_be_split_over_three_or_eight_ranks_and_unevenly(dp, cp, ring, ulysses):
    case = dataclasses.replace(LM, cp=cp, ring=ring, ulysses=ulysses, length=11, batch_sizes=(5, 1, 3), zero=1)
    assert max(threads.run(dp * cp, lambda comm: deviation(case, dp * cp, comm))) <= TOLERANCE


def test_metrics_count_each_sample_token_and_target_once():
    case = dataclasses.replace(LM, cp=2, batch_sizes=(5, 3), length=13)

    def body(comm):
        step = build_step(case, 4, comm)
        rows = [step(local_batch(batch, 2, step.dp_index)) for batch in batches(case)]
        rows.append(step.evaluate(local_batch(batches(case)[0], 2, step.dp_index)))
        return [(m.samples, m.tokens, m.targets) for m in rows]

    assert threads.run(4, body) == [[(5, 65, 65), (3, 39, 39), (5, 65, 65)]] * 4


def test_an_evaluation_equals_that_of_one_process():
    case = dataclasses.replace(LM, batch_sizes=(5,), length=13)

    def body(comm):
        step = build_step(dataclasses.replace(case, cp=comm.size), comm.size, comm)
        return step.evaluate(batches(case)[0]).loss

    (expected,) = threads.run(1, body)
    assert threads.run(4, body) == pytest.approx([expected] * 4, abs=TOLERANCE)


def test_a_state_dict_loads_on_another_sequence_axis():
    case = dataclasses.replace(LM, batch_sizes=(4, 4, 4, 4), zero=1, bucket_bytes=3000)

    def begin(comm):
        step = build_step(dataclasses.replace(case, cp=4), 4, comm)
        for batch in batches(case)[:2]:
            step(batch)
        return step.state_dict()

    state = threads.run(4, begin)[0]

    def resume(comm):
        step = build_step(dataclasses.replace(case, cp=2, zero=2, ring="plain"), 4, comm)
        step.load_state_dict(state)
        return train_step(case, step, skip=2).weights

    expected = train_oracle(case).weights
    for weights in threads.run(4, resume):
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=TOLERANCE)


def test_a_mean_loss_is_refused_where_ranks_hold_unequal_numbers_of_tokens():
    even = dataclasses.replace(LM, loss="scalar", cp=2)
    assert max(threads.run(2, lambda comm: deviation(even, 2, comm))) <= TOLERANCE
    uneven = dataclasses.replace(even, length=13)
    with pytest.raises(
        TaskError,
        match=r"a mean, and 13 tokens, which do not divide evenly: \[5, 8\] targets.*try unreduced.*length 12 or 16",
    ):
        threads.run(2, lambda comm: deviation(uneven, 2, comm))


def test_a_mean_loss_is_refused_when_ranks_ignore_unequal_numbers_of_targets():
    def body(comm):
        step = build_step(dataclasses.replace(LM, loss="scalar", cp=2), 2, comm)
        inputs, targets = batches(LM)[0]
        step((inputs, targets))
        targets[0, 3] = -100  # on one rank only
        step((inputs, targets))

    with pytest.raises(TaskError, match=r"targets with -100, which is ignored: \[3?[0-9]+, 3?[0-9]+\] targets"):
        threads.run(2, body)


def test_heads_that_cannot_be_split_are_refused():
    with pytest.raises(TaskError, match=r"ulysses = 4, 4 heads, 2 heads of keys and values.*try ulysses = 1 or 2"):
        threads.run(4, lambda comm: deviation(dataclasses.replace(LM, cp=4, ulysses=4), 4, comm))


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    """Each output is compared with the next token's target; the last token of each range has none."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="none")


def test_a_loss_that_shifts_its_targets_is_refused():
    def body(comm):
        step = build(comm, LM.plan(1), shifted)
        step(batches(LM)[0])

    with pytest.raises(TaskError, match=r"over 30 elements for all tokens.* over 28 .*that the data has shifted"):
        threads.run(2, body)


def test_a_small_term_over_neighbouring_tokens_is_refused():
    def smooth(logits: Tensor, targets: Tensor) -> Tensor:
        steps = (logits[:, 1:] - logits[:, :-1]).square().mean(-1)
        return values(logits, targets) + 1e-6 * F.pad(steps, (0, 1))

    with pytest.raises(TaskError, match=r"a loss of .* for all tokens, but .* for the ranks' tokens"):
        threads.run(2, lambda comm: build(comm, LM.plan(1), smooth)(batches(LM)[0]))


def test_a_loss_whose_gradient_alone_depends_on_other_tokens_is_refused():
    def weighted(logits: Tensor, targets: Tensor) -> Tensor:
        each = values(logits, targets)
        return each / each.detach().mean()

    with pytest.raises(TaskError, match="a loss whose gradient for a token depends on other ranks' tokens"):
        threads.run(2, lambda comm: build(comm, Plan(), weighted)(batches(LM)[0]))


def test_a_loss_that_is_not_finite_is_checked_with_the_next_batch():
    def body(comm):
        factors = iter([math.nan, math.nan, math.nan])
        step = build(comm, Plan(), lambda o, t: shifted(o, t) * next(factors, 1.0), skip_nan=2)
        step(batches(LM)[0])
        step(batches(LM)[0])

    with pytest.raises(TaskError, match=r"a loss of \d.* over 30 elements for all tokens"):
        threads.run(2, body)


SCALARS = {
    "shifted": (
        lambda logits, targets: F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()),
        r"over 30 elements for all tokens.* over 28 .*that the data has shifted",
    ),
    "weighted": (
        lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=WEIGHTS),
        r"a scalar loss made by NllLossBackward0.*without weights.*try unreduced values",
    ),
    "masked": (
        lambda logits, targets: (values(logits, targets) * (targets >= 0)).sum() / (targets >= 0).sum(),
        r"a scalar loss made by DivBackward0.*try unreduced values",
    ),
    "picked": (
        lambda logits, targets: F.cross_entropy(logits[targets >= 0], targets[targets >= 0]),
        r"a scalar loss made by NllLossBackward0.*try unreduced values",
    ),
}
WEIGHTS = torch.linspace(0.9, 1.1, 256, dtype=torch.float64)


def values(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


@pytest.mark.parametrize("kind", SCALARS)
def test_a_scalar_loss_that_may_not_be_a_mean_of_all_elements_is_refused(kind):
    loss, message = SCALARS[kind]
    with pytest.raises(TaskError, match=message):
        threads.run(2, lambda comm: build(comm, Plan(), loss, bidirectional())(batches(LM)[0]))


def test_a_batch_without_samples_runs_no_dry_run():
    def body(comm):
        step = build(comm, Plan(), lambda logits, targets: values(logits, targets).sum().sqrt())  # no mean
        inputs, targets = batches(LM)[0]
        assert math.isnan(step.evaluate(({name: tensor[:0] for name, tensor in inputs.items()}, targets[:0])).loss)
        step((inputs, targets))

    with pytest.raises(TaskError, match="1 problem in the loss"):
        threads.run(2, body)


def test_different_batches_within_a_sequence_group_are_refused():
    with pytest.raises(TaskError, match=r"different batches on some of ranks 0, 1, .*ff\.shard\(loader, plan\)"):
        threads.run(2, lambda comm: build(comm, Plan(), values)(batches(LM)[comm.rank]))


def test_a_mean_loss_is_refused_when_ranks_ignore_unequal_numbers_of_targets_in_a_microbatch():
    def body(comm):
        step = build_step(dataclasses.replace(LM, loss="scalar", cp=2, microbatches=2, ring="plain"), 2, comm)
        inputs, targets = batches(LM)[0]
        step((inputs, targets))
        targets[0, 3] = targets[2, 13] = -100  # equally many on each rank, but not in each microbatch
        step((inputs, targets))

    with pytest.raises(TaskError, match=r"targets with -100, which is ignored: \[15, 16\] targets"):
        threads.run(2, body)


def build(comm, plan, loss, model=None, **options):
    plan = dataclasses.replace(plan, dp=1, cp=comm.size)
    return TrainStep(model or make("lm"), loss, optimizer(LM), plan=plan, communicator=comm, clip=None, **options)


BATCHES = {
    "a tensor": ((torch.zeros(2, 16), torch.zeros(2, 16)), r"inputs that are a Tensor.*position_ids or positions"),
    "no positions": (({"tokens": torch.zeros(2, 16)}, torch.zeros(2, 16)), r"inputs tokens.*torch\.arange"),
    "one target": (
        ({"tokens": torch.zeros(2, 16), "positions": torch.zeros(2, 16)}, torch.zeros(2)),
        r"targets of shape \[2\].*a target for each of the 16 tokens",
    ),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_whose_tokens_cannot_be_sharded_is_refused(kind):
    batch, message = BATCHES[kind]
    with pytest.raises(TaskError, match=message):
        threads.run(2, lambda comm: build(comm, Plan(), shifted)(batch))


def test_local_steps_are_refused():
    def body(comm):
        check_plan_on_ranks(nn.Linear(2, 2), Plan(cp=2, sync="local"), comm)

    with pytest.raises(PlanError, match=r'sync = "local" with cp = 2'):
        threads.run(2, body)


class Bidirectional(nn.Module):
    """Bidirectional attention, with a key mask on request."""

    def __init__(self, mask: str = "none", dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.places, self.qkv, self.mask, self.p = nn.Embedding(32, 16), nn.Linear(16, 48), mask, dropout

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places(positions)
        q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mask = None
        if self.mask == "keys":
            mask = (tokens > 40)[:, None, None, :]
        elif self.mask == "added":
            mask = torch.zeros(tokens.shape, dtype=x.dtype).masked_fill(tokens < 40, float("-inf"))[:, None, None]
        dropout = self.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.head(x + out.transpose(1, 2).flatten(2))


def bidirectional(*options) -> nn.Module:
    with SEED_LOCK, torch.random.fork_rng([]):  # ranks are threads and share torch's generator
        torch.manual_seed(3)
        return Bidirectional(*options).double()


@pytest.mark.parametrize("length", [16, 13, 3])
@pytest.mark.parametrize("mask", ["none", "keys", "added"])
def test_no_query_attends_to_padding(mask, length):
    case = dataclasses.replace(LM, length=length)
    expected = oracle.train(bidirectional(mask), loss_of(case), optimizer(case), batches(case))

    def body(comm):
        step = build(comm, Plan(), loss_of(case), bidirectional(mask))
        return oracle.deviation(train_step(case, step), expected)

    assert max(threads.run(4, body)) <= TOLERANCE


def dropped(comm, plan, sizes):
    """The weights of a model with attention dropout, trained on batches with a sample range."""
    case = dataclasses.replace(LM, batch_sizes=sizes)
    plan = dataclasses.replace(plan, dp=comm.size // plan.cp)
    step = TrainStep(
        bidirectional("keys", 0.5), loss_of(case), optimizer(case), plan=plan, communicator=comm, clip=None, seed=5
    )
    for number, whole in enumerate(batches(case)):
        batch = local_batch(whole, plan.dp, step.dp_index)
        first = 100 * number + len(whole[1]) * step.dp_index // plan.dp
        place = BatchRange(1000, 0, 0, 100 * number, 100 * number + len(whole[1]), first, first + len(batch[1]))
        step(Batch.wrap(batch, place))
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}


@pytest.mark.parametrize(
    ("size", "plan"),
    [(4, Plan(cp=4)), (4, Plan(cp=2)), (2, Plan(cp=2, microbatches=2)), (2, Plan(cp=2, ulysses=2)), (3, Plan(cp=3))],
)
def test_attention_dropout_does_not_depend_on_the_mesh(size, plan):
    expected = threads.run(2, lambda comm: dropped(comm, Plan(cp=2), (4, 4, 4)))[0]
    for weights in threads.run(size, lambda comm: dropped(comm, plan, (4, 4, 4))):
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=TOLERANCE)


def test_data_ranks_without_sample_ranges_have_different_dropout_masks():
    (batch,) = batches(dataclasses.replace(LM, batch_sizes=(4,)))

    def body(comm):
        plan = Plan(dp=comm.size // 2, cp=2)
        model = bidirectional("keys", 0.5)
        step = TrainStep(model, loss_of(LM), optimizer(LM), plan=plan, communicator=comm, clip=None, seed=5)
        step(batch)  # the same on both data ranks: with the same masks, their mean would be the gradient of one
        return [p.detach().clone() for p in step.model.parameters()]

    alone, together = (threads.run(size, body)[0] for size in (2, 4))
    assert not all(map(torch.allclose, alone, together))


def test_token_dropout_differs_between_ranks_and_other_random_numbers_do_not():
    x, found = torch.ones(400), []
    for index in (0, 1, 0):
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            dropout = RankDropout(TaggedDraws(DrawSlices(1)), index, 2)
            with intercept_attention(AttentionCall.run_sdpa, overrides=dropout.overrides):
                dropped = [F.dropout(x, 0.5), nn.Dropout(0.5)(x), torch.dropout(x, 0.5, True)]
                kept = F.dropout(x, 0.5, training=False)
            found.append((dropped, torch.rand(3)))
        assert torch.equal(kept, x)
        assert all(0.3 < (each == 0).float().mean() < 0.7 for each in dropped)
    (first, drawn), (second, other), (again, _) = found
    assert torch.equal(drawn, other)
    assert not any(map(torch.equal, first, second))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])


class Packed(Bidirectional):
    """Attention within documents, by a mask [B, 1, L, L]."""

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.embedding(tokens) + self.places(positions % 32)
        q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.head(x + out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [264, 13])
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_documents_may_be_packed_by_a_mask_of_any_length(kind, length):
    case = dataclasses.replace(LM, length=length, batch_sizes=(2, 2))
    given = batches(case)
    for inputs, _ in given:
        documents = (torch.arange(length) > length // 3).long().expand(2, length)
        mask = (documents[:, :, None] == documents[:, None, :]) & torch.ones(length, length).tril().bool()
        added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
        inputs["mask"] = mask if kind == "boolean" else added
    with SEED_LOCK, torch.random.fork_rng([]):
        torch.manual_seed(3)
        model = Packed().double()
    expected = oracle.train(copy.deepcopy(model), loss_of(case), optimizer(case), given)

    def body(comm):
        step = build(comm, Plan(), loss_of(case), copy.deepcopy(model))
        metrics = [step(batch) for batch in given]
        return oracle.deviation(oracle.snapshot(step, [m.loss for m in metrics], []), expected)

    assert max(threads.run(2, body)) <= TOLERANCE


LOSSLESS: dict[str, dict[str, Any]] = {  # codecs that drop nothing
    "topk": {"codec": "topk", "codec_density": 1.0},
    "powersgd": {"codec": "powersgd", "codec_rank": 64},
    "dct": {"codec": "dct", "codec_density": 1.0},
}


@settings(max_examples=6)
@given(
    mesh=st.sampled_from([(1, 2), (2, 2), (1, 4)]),
    ring_layout=st.sampled_from(RING_LAYOUTS),
    codec=st.sampled_from(sorted(LOSSLESS)),
    zero=st.integers(0, 2),
    update=st.sampled_from(["after", "in_backward", "in_forward"]),
    microbatches=st.integers(1, 2),
)
def test_a_lossless_codec_does_not_change_training(mesh, ring_layout, codec, **fields):
    (dp, cp), (ring, ulysses) = mesh, ring_layout
    layout = {"cp": cp, "ring": ring, "ulysses": ulysses if cp % ulysses == 0 else 1}
    case = dataclasses.replace(LM, **layout, **LOSSLESS[codec], **fields)
    assert max(threads.run(dp * cp, lambda comm: deviation(case, dp * cp, comm))) <= TOLERANCE


@pytest.mark.parametrize(("dp", "cp", "fields"), [
    (2, 2, {"codec": "topk", "codec_density": 0.1}),
    (1, 4, {"codec": "int8"}),
    (2, 2, {"codec": "bf16", "zero": 2}),
    (1, 4, {"precision": "bf16"}),
    (2, 2, {"precision": "bf16", "reduce_dtype": "fp32", "zero": 2, "microbatches": 2}),
    (1, 4, {"precision": "fp16", "zero": 1, "clip": 1.0}),
    (2, 2, {"precision": "bf16", "zero": 3, "update": "in_forward"}),
])  # fmt: skip
def test_lossy_codecs_train_nearly_the_same_and_equally_on_all_ranks(dp, cp, fields):
    case = dataclasses.replace(LM, cp=cp, batch_sizes=(4,) * 4, **fields)

    def body(comm):
        module, how = make("lm").float(), optimizer(case, foreach=True)
        step = TrainStep(module, loss_of(case), how, plan=case.plan(dp * cp), communicator=comm, clip=case.clip)
        return train_step(case, step)

    first, *others = threads.run(dp * cp, body, hosts=dp)
    expected = train_oracle(dataclasses.replace(LM, batch_sizes=case.batch_sizes, clip=case.clip))
    assert first.losses == pytest.approx(expected.losses, rel=2e-2)
    for other in others:
        assert all(torch.equal(weight, other.weights[name]) for name, weight in first.weights.items())
