"""Laws of interacting samples: a batch is split only if its samples are independent, in forward and in gradients."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.plan.plan import Plan
from fourfold.proof.grad_hook_check import hook_problems
from fourfold.step.model_checks import check_plan_for_model
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import PlanError, TaskError

sgd = functools.partial(torch.optim.SGD, lr=0.1)
PLANS = [Plan(dp=2), Plan(dp=2, microbatches=2, zero=3), Plan(microbatches=2)]


class Net(nn.Module):
    """Four features, three classes; `mix` makes samples interact."""

    def __init__(self, mix=lambda x: x):
        super().__init__()
        self.first, self.second, self.mix = nn.Linear(4, 4), nn.Linear(4, 3), mix
        generator = torch.Generator().manual_seed(1)
        for parameter in self.double().parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.mix(self.first(x)))


def values(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    rows = F.normalize(outputs, dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)), reduction="none")


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    return values(outputs, targets).topk(len(targets) // 2 + 1).values


def step(comm, model, plan, loss=values):
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    TrainStep(model, loss, sgd, plan=plan, communicator=comm, clip=None)((inputs, torch.arange(8) % 3))
    return [p.detach().clone() for p in model.parameters()]


def plain_torch_step(model, loss, num_ranks):
    """One step on the mean of the ranks' losses, each over the rank's own samples."""
    optimizer, losses = sgd(model.parameters()), []
    for rank in range(num_ranks):
        inputs = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        losses.append(loss(model(inputs), torch.arange(8) % 3).mean())
    torch.stack(losses).mean().backward()
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def trains(mix, plan, loss, plain_loss):
    expected = plain_torch_step(Net(mix), plain_loss, plan.dp)
    for got in threads.run(plan.dp, lambda comm: step(comm, Net(mix), plan, loss)):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


MIXING = {
    "less the mean": lambda x: x - x.mean(0),
    "statistics by hand": lambda x: (x - x.mean(0)) / x.std(0),
    "attention among samples": lambda x: (x @ x.T).softmax(1) @ x,
    "batch normalization": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize(("kind", "plan"), [*itertools.product([*MIXING, "contrastive"], PLANS), ("hardest", PLANS[0])])
def test_unreduced_values_that_depend_on_other_samples_are_refused_on_every_rank(kind, plan):
    def body(comm):
        model = Net(MIXING.get(kind, lambda x: x))
        loss = {"contrastive": contrastive, "hardest": hardest}.get(kind, values)
        before = [p.detach().clone() for p in model.parameters()]
        what = (
            "a model whose outputs for a sample change" if kind in MIXING else "values that depend on their own sample"
        )
        with pytest.raises(TaskError, match=what):
            step(comm, model, plan, loss)
        if plan.zero == 0:
            assert all(map(torch.equal, model.parameters(), before))

    threads.run(plan.dp, body)


def test_a_sum_count_pair_allows_samples_of_a_rank_to_interact():
    def loss(outputs, targets):
        return contrastive(outputs, targets).sum(), len(targets)

    trains(MIXING["less the mean"], PLANS[0], loss, contrastive)


def test_one_process_may_mix_samples():
    trains(MIXING["less the mean"], Plan(), values, values)


def test_a_model_with_a_fixed_batch_size_is_trained():
    trains(lambda x: x.view(8, 4), PLANS[0], values, values)


@pytest.mark.parametrize("loss", [values, F.cross_entropy])
def test_samples_of_a_model_with_a_fixed_batch_size_may_not_interact(loss):
    def body(comm):
        with pytest.raises(TaskError, match="for 8 samples together"):
            step(comm, Net(lambda x: x.view(8, 4) - x.view(8, 4).mean(0)), PLANS[0], loss)

    threads.run(2, body)


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
@pytest.mark.parametrize("loss", [values, F.cross_entropy])
def test_batch_statistics_are_refused_however_few_samples_a_microbatch_has(samples, loss):
    def body(comm):
        model, plan = Net(MIXING["batch normalization"]), Plan(dp=2, microbatches=2)
        inputs = torch.randn(2 * samples, 4, dtype=torch.float64)
        with pytest.raises(TaskError, match="a model whose outputs for a sample change"):
            TrainStep(model, loss, sgd, plan=plan, communicator=comm, clip=None)(
                (inputs, torch.arange(2 * samples) % 3)
            )

    threads.run(2, body)


BOUNDED = {
    "clamped": lambda g: g.clamp(-0.01, 0.01),
    "normalized": lambda g: g / (g.norm() + 1e-6),
    "a sign": torch.sign,
    "a threshold": lambda g: g * (g.abs() > 1e-3),
    "noise": lambda g: g + torch.randn_like(g),
}
SCALED = {"half": lambda g: g / 2, "masked": lambda g: g * torch.eye(4).to(g), "seen": lambda g: None}
SCALED["finite"] = lambda g: torch.nan_to_num(g)


def hooked(hook, dtype=torch.float64):
    model = Net().to(dtype)
    model.first.weight.register_hook(hook)
    return model


@pytest.mark.covering
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", BOUNDED)
def test_a_hook_that_bounds_gradients_is_refused_where_a_batch_is_split(kind, plan):
    def body(comm):
        with pytest.raises(TaskError, match=r"a hook of first\.weight"):
            step(comm, hooked(BOUNDED[kind]), plan)

    threads.run(plan.dp, body)
    threads.run(1, lambda comm: step(comm, hooked(BOUNDED[kind]), Plan()))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SCALED)
def test_a_hook_that_scales_or_masks_is_trained(kind, dtype):
    model = hooked(SCALED[kind], dtype)
    state = torch.get_rng_state()
    assert not hook_problems(dict(model.named_parameters()), 2)
    assert torch.equal(state, torch.get_rng_state())
    if dtype == torch.float64:
        threads.run(2, lambda comm: step(comm, hooked(SCALED[kind]), PLANS[1]))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_depend_on_the_full_batch_are_refused_where_it_is_split(kind):
    by_count, by_length = kind(5, 3, scale_grad_by_freq=True), kind(5, 3, max_norm=1.0)
    for plan in PLANS:
        with pytest.raises(PlanError, match="scale_grad_by_freq at the model"):
            check_plan_for_model(by_count, plan, clip=None)
    with pytest.raises(PlanError, match="max_norm at the model"):
        check_plan_for_model(by_length, PLANS[0], clip=None)
    check_plan_for_model(by_length, PLANS[2], clip=None)
    check_plan_for_model(by_count, Plan(), clip=None)


def test_lazy_modules_are_refused_by_name():
    with pytest.raises(PlanError, match=r"lazy modules .* 0\.weight, 0\.bias"):
        check_plan_for_model(nn.Sequential(nn.LazyLinear(3)), Plan(), clip=None)
