"""Operations that draw or write in uncommon ways, on weights whose initialization is deferred."""

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.step.initial_model import make_initial_model
from fourfold.torch_kit import deferred_init
from fourfold.torch_kit.deferred_init import NotDeferrable, deferred_model
from tests.cases import SEED_LOCK

CPU = torch.device("cpu")
SIZE = 32
unchecked: Any = torch


@pytest.fixture(autouse=True)
def _small_handles(monkeypatch):
    monkeypatch.setattr(deferred_init, "MIN_ELEMENTS", 256)


class Doubled(torch.autograd.Function):
    """Writes its input, and draws."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2).add_(torch.rand_like(x))

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[0] * 2


@torch.library.custom_op("fourfold_test::noisy_", mutates_args=("x",))
def noisy_(x: Tensor) -> None:
    """Draws, and its schema does not say so."""
    x.add_(torch.rand(x.shape))


def rrelu_(one: Tensor, other: Tensor) -> None:
    one.copy_(F.rrelu(one, training=True))
    F.rrelu_(other, training=True)


def rrelu_with_noise_that_is_kept(one: Tensor, other: Tensor) -> None:
    noise = torch.empty_like(one)
    torch.ops.aten.rrelu_with_noise_(one, noise, 0.1, 0.3, True, torch.Generator().manual_seed(3))
    other.copy_(noise)


def rrelu_with_plain_noise(one: Tensor, other: Tensor) -> None:
    noise = torch.ones(SIZE, SIZE).tril()  # not recorded as it is made
    other.copy_(torch.ops.aten.rrelu_with_noise(one, noise, 0.1, 0.3, True))
    other.add_(noise)


def dropout_and_bernoulli(one: Tensor, other: Tensor) -> None:
    one.copy_(F.dropout(one, 0.5))
    F.dropout(other, 0.2, inplace=True)
    one.add_(torch.bernoulli(other.clamp(0, 1)))
    other.bernoulli_(one.sigmoid())
    one.add_(F.alpha_dropout(one, 0.3, training=True)).add_(F.feature_alpha_dropout(one, 0.3, training=True))
    one.add_(F.dropout1d(one, 0.5)).add_(F.gumbel_softmax(one, hard=True))


def draws_of_many_kinds(one: Tensor, other: Tensor) -> None:
    one.copy_(torch.normal(one, other.abs())).add_(torch.normal(0.5, other.abs())).add_(torch.normal(one, 0.5))
    other.copy_(torch.poisson(one.abs())).add_(torch.multinomial(one.abs() + 0.1, SIZE).float())
    one.add_(torch.binomial(torch.full_like(one, 5.0), other.sigmoid())).add_(
        torch.distributions.Gamma(2.0, 1.0).sample()
    )
    one.add_(torch.distributions.Dirichlet(other.abs() + 0.1).sample())
    other.add_(torch.distributions.Exponential(one.abs() + 0.1).sample())
    other.cauchy_().clamp_(-3, 3).add_(torch.empty_like(one).geometric_(0.3)).add_(torch.empty_like(one).log_normal_())


def draws_like(one: Tensor, other: Tensor) -> None:
    one.copy_(torch.randint_like(one, 9)).add_(torch.randint_like(other, 3, 9))
    one.add_(torch.rand_like(one)).add_(torch.randn_like(other)).add_(torch.randint(3, 7, (SIZE, SIZE)))
    other.copy_(one[torch.randperm(SIZE)]).add_(torch.randperm(SIZE))


def out_variants(one: Tensor, other: Tensor) -> None:
    torch.normal(one, other.abs(), out=other)
    torch.bernoulli(one.sigmoid(), out=one)
    torch.add(one, other, out=other)
    indices = torch.empty(SIZE, SIZE, dtype=torch.long)
    torch.sort(other, dim=1, out=(one, indices))
    other.add_(indices)


def lists(one: Tensor, other: Tensor) -> None:
    small = torch.ones(3)
    unchecked._foreach_mul_([one, small, other], 0.5)
    unchecked._foreach_add_([one[:7], one[7:]], 1.0)
    unchecked._foreach_add_([small, other], [small + 1, one])
    other.add_(small.sum())
    for each in unchecked._foreach_exp([one, other]):
        one.add_(each)


def written_with_a_plain_tensor(one: Tensor, other: Tensor) -> None:
    """An operation that reads and writes a tensor which is no handle, and runs again each time."""
    momentum, options = torch.eye(SIZE), {"weight_decay": 0.0, "momentum": 0.5, "lr": 0.1, "dampening": 0.0}
    options |= {"nesterov": False, "maximize": False, "is_first_step": False}
    for _ in range(2):
        torch.ops.aten._fused_sgd_([one], [torch.eye(SIZE)], [momentum], **options)
    other.add_(momentum)


def moved_by_an_optimizer(one: Tensor, other: Tensor) -> None:
    parameters = [nn.Parameter(one.clone()), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=True)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    one.copy_(parameters[0])
    other.add_(parameters[1].sum())


def custom_function(one: Tensor, other: Tensor) -> None:
    Doubled.apply(one)
    other.copy_(Doubled.apply(other.clone()))


def overlapping(one: Tensor, other: Tensor) -> None:
    """A view of as many elements as its storage that does not reach all of them."""
    torch.as_strided(one, (2, SIZE * SIZE // 2), (1, 1)).fill_(3.0)
    other.t().normal_()


WITH_RECORD: list[Callable[[Tensor, Tensor], None]] = [
    rrelu_, rrelu_with_noise_that_is_kept, rrelu_with_plain_noise, dropout_and_bernoulli, draws_of_many_kinds,
    draws_like, out_variants, lists,
    written_with_a_plain_tensor, moved_by_an_optimizer, custom_function, overlapping,
]  # fmt: skip


def factory_with_out(one: Tensor, other: Tensor) -> None:
    torch.randn(SIZE, SIZE, out=one)


def resized_by_out(one: Tensor, other: Tensor) -> None:
    torch.cat([one, one], out=other)


def resized_as(one: Tensor, other: Tensor) -> None:
    other.t_().resize_as_(one[:4, :4])


def set_at_an_offset(one: Tensor, other: Tensor) -> None:
    cast(Any, other).set_(one, 0, (SIZE, SIZE), (SIZE, 1))


def custom_operation(one: Tensor, other: Tensor) -> None:
    noisy_(one)


def native_dropout(one: Tensor, other: Tensor) -> None:
    one.copy_(torch.native_dropout(one, 0.5, True)[0])


def written_and_read(one: Tensor, other: Tensor) -> None:
    count = torch.ones(())
    unchecked._foreach_mul_([count, one], count)


def running_statistics(one: Tensor, other: Tensor) -> None:
    mean, variance = one.view(-1), other.view(-1)
    F.batch_norm(torch.rand(3, SIZE * SIZE), mean, variance, training=True)


def inference(one: Tensor, other: Tensor) -> None:
    with torch.inference_mode():
        kept = F.dropout(one.clone(), 0.5, training=False)
        one.copy_(kept.mul_(2))
        other.copy_(one.reshape(-1, SIZE).to(torch.float64))
        other.copy_(F.dropout(other, 0.5))


WITHOUT: dict[Callable[[Tensor, Tensor], None], str] = {
    factory_with_out: "aten.resize_",
    resized_by_out: "aten.cat.out",
    resized_as: "aten.resize_as_",
    set_at_an_offset: "aten.set_.source",
    custom_operation: "fourfold_test.noisy_",
    native_dropout: "aten.native_dropout",
    written_and_read: "aten._foreach_mul_",
    running_statistics: "aten.native_batch_norm",
    inference: "aten.dropout",
}


def maker(change: Callable[[Tensor, Tensor], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(2)])
        with torch.no_grad():
            change(model[0].weight.data, model[1].weight.data)
        nn.init.normal_(model[0].bias)
        return model

    return make


def made(make: Callable[[], nn.Module]) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(3)
    return [each.detach() for each in make().parameters()], torch.get_rng_state()


@pytest.mark.parametrize("change", WITH_RECORD, ids=lambda each: each.__name__)
def test_draws_and_writes_are_recorded_as_they_are(change):
    with SEED_LOCK:
        expected, state = made(maker(change))
        torch.manual_seed(3)
        model, weights = deferred_model(maker(change), CPU)
        assert torch.equal(torch.get_rng_state(), state)
        for _ in range(2):  # a value does not depend on how often values were computed
            for parameter, wanted in reversed(list(zip(model.parameters(), expected, strict=True))):
                assert torch.equal(weights.whole(parameter), wanted)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("change", WITHOUT, ids=lambda each: each.__name__)
def test_what_cannot_be_recorded_is_named_and_the_model_is_made_at_once(change, caplog):
    with SEED_LOCK, caplog.at_level(logging.WARNING, logger="fourfold"):
        with pytest.raises(NotDeferrable, match=WITHOUT[change]):
            deferred_model(maker(change), CPU)
        expected, state = made(maker(change))
        torch.manual_seed(3)
        model, weights = make_initial_model(maker(change), CPU, defers=True, is_log_rank=True)
        assert torch.equal(torch.get_rng_state(), state)
    assert not weights.are_deferred
    assert all(torch.equal(p, wanted) for p, wanted in zip(model.parameters(), expected, strict=True))
    assert WITHOUT[change] in caplog.text


def test_hooks_of_a_deferred_weight_are_called():
    called: list[str] = []

    def make() -> nn.Module:
        model = nn.Linear(SIZE, SIZE, bias=False)
        model.weight.register_hook(lambda gradient: gradient * 3)
        model.weight.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
        return model

    model, weights = deferred_model(make, CPU)
    weight = model.weight
    weight.data = weights.whole(weight)
    model(torch.ones(1, SIZE)).sum().backward()
    assert torch.equal(weight.grad, torch.full((SIZE, SIZE), 3.0))
    assert called == ["accumulated"]
