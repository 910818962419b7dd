"""Laws of models whose forward writes trained weights: trained as on one device, or refused."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.plan.plan import Plan
from fourfold.step.model_checks import check_plan_for_model
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import PlanError, TaskError
from tests.cases import SEED_LOCK
from tests.classification import batches, loss, sgd, train

# Writes of forward into `centers` that depend on its samples. Writes through `.data` do not change the version.
FROM_SAMPLES = {
    "data": lambda m, x: m.centers.data.mul_(0.9).add_(0.1 * x.mean(0)),
    "no_grad": lambda m, x: m.centers.mul_(0.9).add_(0.1 * x.mean(0)),
    "operator": lambda m, x: m.centers.__iadd__(0.1 * x.mean(0)),
    "item": lambda m, x: m.centers.data.__setitem__(0, x[0, 0]),
    "out": lambda m, x: torch.add(m.centers, x.mean(0), alpha=0.1, out=m.centers.data),
    "foreach": lambda m, x: torch._foreach_add_([m.centers.data], [0.1 * x.mean(0)]),  # type: ignore[attr-defined]
    "operator of torch.ops": lambda m, x: torch.ops.aten.add_(m.centers.data, 0.1 * x.mean(0)),
    "overload of torch.ops": lambda m, x: torch.ops.aten.add_.Tensor(m.centers.data, 0.1 * x.mean(0)),
    "view": lambda m, x: m.centers.detach().view(2, 4)[1].copy_(x.mean(0)[:4]),
    "counter": lambda m, x: m.centers.data.add_(0.01 * len(x)),
}
# Writes that do not depend on the samples.
EACH_TIME = {
    "decay": lambda m, x: m.centers.data.mul_(0.9),
    "cast": lambda m, x: m.first.weight.data.copy_(torch.round(m.first.weight.data + 0.3, decimals=1)),
}
ONCE = {
    "clamp": lambda m, x: m.first.weight.data.clamp_(-0.2, 0.2),
    "clamp without data": lambda m, x: m.first.weight.clamp_(-0.2, 0.2),
    "clamp that does nothing": lambda m, x: m.first.weight.data.clamp_(-100, 100),
    "clamp that does nothing at first": lambda m, x: m.centers.data.clamp_(0.5, 1.5),
    "norm": lambda m, x: m.centers.data.copy_(m.centers.data / m.centers.data.abs().max()),
    "nothing": lambda m, x: None,
}
WRITES = {**FROM_SAMPLES, **EACH_TIME, **ONCE}


class Writing(nn.Module):
    """Eight features, three classes; forward writes weights before it uses them."""

    def __init__(self, kind: str, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.centers = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            WRITES[self.kind](self, x)
        return self.second(torch.tanh(self.norm(self.first(x))) * self.centers)


def model(kind: str, **options: bool) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(3)
        return Writing(kind, **options).double()


def refused(made, plan: Plan, match: str, given: list | None = None, **world) -> None:
    def body(comm):
        with pytest.raises(TaskError, match=match):
            train(comm, made(), plan, given or batches(9))

    threads.run(plan.dp, body, **world)


@pytest.mark.covering
@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(microbatches=2), Plan(dp=2, microbatches=2)])
@pytest.mark.parametrize("kind", FROM_SAMPLES)
def test_trained_weights_that_forward_writes_from_its_samples_are_refused_on_every_rank(kind, plan):
    refused(
        lambda: model(kind), plan, "forward writes the trained weight centers, and the values depend on its samples"
    )


# One sample per rank, so no two parts of a rank's batch differ.
@pytest.mark.parametrize("kind", ["data", "no_grad"])
def test_trained_weights_that_differ_only_between_ranks_are_refused(kind):
    match = "forward writes the trained weight centers, and the values depend on its samples"
    refused(lambda: model(kind), Plan(dp=3), match, batches(3))


@pytest.mark.parametrize("kind", EACH_TIME)
def test_trained_weights_that_forward_writes_each_time_are_refused_with_microbatches(kind):
    for plan in (Plan(microbatches=2), Plan(dp=2, microbatches=3)):
        refused(lambda: model(kind), plan, r"each forward changes the trained weight .*, and microbatches = .")


# In the third and the last batch some ranks have no samples.
@pytest.mark.covering
@pytest.mark.parametrize("plan", [Plan(dp=3), Plan(dp=3, update="in_forward"), Plan(dp=3, update="in_backward")])
@pytest.mark.parametrize("kind", [*EACH_TIME, *ONCE])
def test_trained_weights_that_forward_writes_equally_are_trained_as_in_one_process(kind, plan):
    given = batches(9, 7, 2, 9, 2)
    got = threads.run(plan.dp, lambda comm: train(comm, model(kind), plan, given))
    expected = oracle.train(model(kind), loss, sgd, given)
    assert max(oracle.deviation(each, expected) for each in got) <= TOLERANCE


@pytest.mark.parametrize("kind", ONCE)
def test_trained_weights_that_forward_writes_once_are_allowed_with_microbatches(kind):
    given = batches(9, 2, 9)
    got = threads.run(2, lambda comm: train(comm, model(kind), Plan(dp=2, microbatches=3), given))
    expected = oracle.train(model(kind), loss, sgd, given)
    assert max(oracle.deviation(each, expected) for each in got) <= TOLERANCE


# A write that changes nothing in the first batch may change something later.
@pytest.mark.covering
@pytest.mark.parametrize("kind", ["data", "no_grad", *EACH_TIME, *[kind for kind in ONCE if kind != "nothing"]])
@pytest.mark.parametrize(
    ("plan", "hosts", "why"),
    [
        (Plan(dp=2, zero=1), 1, "share one copy"),
        (Plan(dp=2, zero=2), 1, "share one copy"),
        (Plan(dp=2, zero=3), 2, "all-gathered"),
        (Plan(precision="bf16"), 1, "master weights"),
        (Plan(dp=2, precision="bf16"), 1, "master weights"),
    ],
)
def test_writes_to_trained_weights_are_refused_where_they_would_be_lost(kind, plan, hosts, why):
    def made():
        return model(kind).float() if plan.precision != "keep" else model(kind)

    given = [(inputs.float(), targets) for inputs, targets in batches(9)] if plan.precision != "keep" else batches(9)
    refused(made, plan, f"forward writes the trained weight .*, with .* {why}", given, hosts=hosts)


@pytest.mark.parametrize(("zero", "hosts"), [(1, 1), (2, 1), (3, 2)])
def test_a_forward_that_writes_nothing_is_trained_at_every_zero_level(zero, hosts):
    given, plan = batches(9, 2, 9), Plan(dp=2, zero=zero)
    got = threads.run(2, lambda comm: train(comm, model("nothing"), plan, given), hosts=hosts)
    expected = oracle.train(model("nothing"), loss, sgd, given)
    assert max(oracle.deviation(each, expected) for each in got) <= TOLERANCE


def test_trained_weights_may_not_differ_between_ranks():
    plan = Plan(dp=2, batch_norm="local")
    for kind in ("data", "clamp"):
        match = 'forward writes the trained weight .*, with batch_norm = "local"'
        refused(functools.partial(model, kind, batch_norm=True), plan, match)


@pytest.mark.parametrize("kind", [*EACH_TIME, *ONCE])
def test_weights_written_by_a_dry_run_are_restored(kind):
    def body(comm):
        step = TrainStep(model(kind), loss, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        before = {name: weight.clone() for name, weight in step.named_weights()}
        step.dry_run(batches(9)[0], training=True)
        return all(torch.equal(weight, before[name]) for name, weight in step.named_weights())

    assert all(threads.run(2, body))


class WritesWithNumpy(Writing):
    """Writes with numpy."""

    def forward(self, x: Tensor) -> Tensor:
        np.multiply(self.centers.detach().numpy(), 0.9, out=self.centers.detach().numpy())
        return super().forward(x)


class Replacing(Writing):
    def forward(self, x: Tensor) -> Tensor:
        self.centers.data = self.centers.data.clamp(-1, 1)
        return super().forward(x)


@pytest.mark.parametrize("zero", [0, 1])
def test_weights_that_are_written_without_a_torch_function_are_refused(zero):
    match = "forward writes the trained weight centers without a torch function"
    refused(lambda: WritesWithNumpy("nothing").double(), Plan(dp=2, zero=zero), match)


def test_weights_whose_storage_is_replaced_are_refused():
    match = "forward moves the trained weight centers to another storage"
    for plan in (Plan(dp=2), Plan(microbatches=2)):
        refused(lambda: Replacing("nothing").double(), plan, match)


class Centers(nn.Module):
    """A loss with a parameter, which it moves towards the samples if `kind` is "moves"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.centers = kind, nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.kind == "moves":
            self.centers.data.lerp_(outputs.detach().mean(0), 0.1)
        return F.cross_entropy(outputs + self.centers.detach(), targets, reduction="none")


def test_a_loss_that_writes_its_own_parameters_is_refused():
    def body(comm, kind):
        step = TrainStep(model("nothing"), Centers(kind), sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        step.dry_run(batches(9)[0], training=True)

    def refusing(comm):
        with pytest.raises(TaskError, match="the loss writes its own centers each time"):
            body(comm, "moves")

    threads.run(2, refusing)
    threads.run(2, lambda comm: body(comm, "rests"))


class Attending(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.table(tokens) + 0.1 * positions[..., None]
        if self.kind == "moving mean" and self.training:
            self.head.bias.data[:4].lerp_(x.detach().mean((0, 1)), 0.1)
        elif self.kind == "clamp always" or (self.kind == "clamp" and self.training):
            self.head.bias.data.clamp_(-0.1, 0.1)
        heads = x[:, None]
        return self.head(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0])


def attending(kind: str) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(3)
        return Attending(kind).double()


TEXTS = torch.arange(64).view(4, 16) % 9
TEXTS_BATCH = {"tokens": TEXTS, "positions": torch.arange(16).expand(4, 16)}, TEXTS


def of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("moving mean", "outputs depend on other ranks' tokens, first in head"),
        ("clamp always", r"cp > 1 and a forward that writes the trained weight head\.bias"),
    ],
)
def test_weights_that_forward_writes_are_refused_where_ranks_share_sequences(kind, match):
    def body(comm):
        step = TrainStep(attending(kind), of_tokens, sgd, plan=Plan(cp=2), communicator=comm, clip=None)
        with pytest.raises(TaskError, match=match):
            step(TEXTS_BATCH)

    threads.run(2, body)


@pytest.mark.parametrize("kind", ["none", "clamp"])
def test_weights_that_forward_writes_equally_are_trained_where_ranks_share_sequences(kind):
    def body(comm):
        step = TrainStep(attending(kind), of_tokens, sgd, plan=Plan(cp=2), communicator=comm, clip=None)
        return oracle.snapshot(step, [step(TEXTS_BATCH).loss for _ in range(3)], [])

    expected = oracle.train(attending(kind), of_tokens, sgd, [TEXTS_BATCH] * 3)
    assert max(oracle.deviation(got, expected) for got in threads.run(2, body)) <= TOLERANCE


class Renormed(nn.Module):
    """An embedding that renormalizes the rows that it looks up."""

    def __init__(self, *, by_function: bool = False) -> None:
        super().__init__()
        self.by_function = by_function
        self.table = nn.Embedding(9, 4, max_norm=None if by_function else 1.0)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = F.embedding(tokens, self.table.weight, max_norm=1.0) if self.by_function else self.table(tokens)
        return self.head(rows)


def renormed(*, by_function: bool = False) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(3)
        return Renormed(by_function=by_function).double()


TOKENS = [(torch.arange(9), torch.arange(9) % 3), (torch.arange(8) % 4, torch.arange(8) % 3)]


@pytest.mark.parametrize("by_function", [False, True])
def test_an_embedding_with_max_norm_trains_in_microbatches(by_function):
    made = functools.partial(renormed, by_function=by_function)
    (got,) = threads.run(1, lambda comm: train(comm, made(), Plan(microbatches=3), TOKENS))
    assert oracle.deviation(got, oracle.train(made(), loss, sgd, TOKENS)) <= TOLERANCE


def test_an_embedding_with_max_norm_is_refused_where_its_write_is_lost():
    with pytest.raises(PlanError, match='max_norm at table, and precision = "bf16"'):
        check_plan_for_model(renormed().float(), Plan(precision="bf16"), clip=None)
    match = r"forward writes the trained weight table\.weight, and the values depend on its samples"
    refused(functools.partial(renormed, by_function=True), Plan(dp=2), match, TOKENS)
