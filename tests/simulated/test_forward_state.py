"""Laws of models that write into buffers in forward: the same on every mesh, or refused."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import TaskError
from tests import classification
from tests.cases import SEED_LOCK
from tests.classification import batches, loss, sgd

WIDE = torch.float64


class Writing(nn.Module):
    """Eight features, three classes; `kind` is what forward writes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        if kind == "spectral norm":
            self.first = nn.utils.parametrizations.spectral_norm(self.first)
        if kind == "old spectral norm":
            self.first = nn.utils.spectral_norm(self.first)
        self.register_buffer("state", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("made", None)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.codes = nn.Parameter(torch.ones(8), requires_grad=False)
        # Averages of a weight, which begin as its copies: the first forward writes what is there.
        self.average = nn.Parameter(self.second.bias.detach().clone(), requires_grad=False)
        self.register_buffer("target", self.second.bias.detach().clone())
        self.target: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._write(x)
        outputs = self.second(torch.tanh(self.first(x)) + self.state.to(x) + self.codes.to(x))
        return outputs + self.average + self.target

    @torch.no_grad()
    def _write(self, x: Tensor) -> None:
        if self.kind == "moving mean":
            self.state.lerp_(x.mean(0).to(self.state), 0.1)
        elif self.kind == "replaced":
            self.state = 0.9 * self.state + 0.1 * x.mean(0).to(self.state)
        elif self.kind == "samples":
            self.calls += len(x)
        elif self.kind == "calls":
            self.calls += 1
            self.state.fill_(float(self.calls))
        elif self.kind == "frozen":
            self.codes.data.lerp_(x.mean(0).to(self.codes), 0.1)
        elif self.kind == "average of a weight":
            self.average.data.copy_(0.9 * self.average.data + 0.1 * self.second.bias)  # but for rounding
        elif self.kind == "target":
            self.target.lerp_(self.second.bias, 0.1)
        elif self.kind == "made once" and self.made is None:
            self.made = torch.ones(8, dtype=x.dtype, device=x.device)


def model(kind: str) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(3)
        return Writing(kind).double()


def train(comm, kind: str, plan: Plan, given: list) -> oracle.TrainingResult:
    return classification.train(comm, model(kind), plan, given)


def expected(kind: str, given: list) -> oracle.TrainingResult:
    return oracle.train(model(kind), loss, sgd, given)


@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(dp=2, microbatches=2), Plan(microbatches=2), Plan(dp=2, zero=2)])
@pytest.mark.parametrize("kind", ["moving mean", "replaced", "samples", "frozen"])
def test_state_that_depends_on_the_samples_is_refused_on_every_rank(kind, plan):
    def body(comm):
        with pytest.raises(TaskError, match=r"forward writes (state|calls|codes), and the values depend on"):
            train(comm, kind, plan, batches(9))

    threads.run(plan.dp, body)


# One sample per rank, so no two parts of a rank's batch differ.
@pytest.mark.parametrize("kind", ["moving mean", "replaced", "frozen"])
def test_state_that_differs_only_between_ranks_is_refused(kind):
    def body(comm):
        with pytest.raises(TaskError, match=r"forward writes (state|codes), and the values depend on its samples"):
            train(comm, kind, Plan(dp=3), batches(3))

    threads.run(3, body)


@pytest.mark.parametrize("plan", [Plan(microbatches=2), Plan(dp=2, microbatches=3)])
@pytest.mark.parametrize("kind", ["spectral norm", "old spectral norm", "calls", "average of a weight", "target"])
def test_state_that_counts_forwards_is_refused_with_microbatches(kind, plan):
    def body(comm):
        with pytest.raises(TaskError, match=r"each forward changes .*, and microbatches = ."):
            train(comm, kind, plan, batches(9))

    threads.run(plan.dp, body)


# In batches of 2 and 1, some ranks have no samples; in the next batch they have some again.
@pytest.mark.covering
@pytest.mark.parametrize("plan", [Plan(dp=3), Plan(dp=3, zero=2), Plan(dp=3, zero=1, update="in_forward"), Plan()])
@pytest.mark.parametrize(
    "kind",
    ["none", "spectral norm", "old spectral norm", "calls", "made once", "average of a weight", "target"],
)
def test_state_that_does_not_depend_on_samples_is_trained_as_in_one_process(kind, plan):
    given = batches(9, 7, 2, 9, 1, 9)
    got = threads.run(plan.dp, lambda comm: train(comm, kind, plan, given))
    assert max(oracle.deviation(each, expected(kind, given)) for each in got) <= TOLERANCE


@pytest.mark.parametrize("kind", ["none", "made once"])
def test_state_that_repeated_forwards_do_not_change_is_allowed_with_microbatches(kind):
    given = batches(9, 2, 9)
    got = threads.run(2, lambda comm: train(comm, kind, Plan(dp=2, microbatches=3), given))
    assert max(oracle.deviation(each, expected(kind, given)) for each in got) <= TOLERANCE


@pytest.mark.parametrize("kind", ["moving mean", "spectral norm", "frozen"])
def test_state_per_rank_can_be_allowed(kind):
    plan = Plan(dp=2, microbatches=2, batch_norm="local")
    first, second = threads.run(2, lambda comm: train(comm, kind, plan, batches(9, 9)).losses)
    assert first == second


@pytest.mark.parametrize("kind", ["moving mean", "replaced", "calls", "made once", "spectral norm"])
def test_state_written_by_a_dry_run_is_restored(kind):
    def body(comm):
        step = TrainStep(model(kind), loss, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        before = {name: buffer.clone() for name, buffer in step.model.named_buffers()}
        with contextlib.suppress(TaskError):
            step.dry_run(batches(9)[0], training=True)
        after = dict(step.model.named_buffers())
        assert before.keys() == after.keys()
        return all(torch.equal(before[name], after[name]) for name in before)

    assert all(threads.run(2, body))


class Attending(nn.Module):
    """Tokens that interact in attention; forward keeps a moving mean of its tokens, or counts its calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(9, 4), nn.Linear(4, 9)
        self.register_buffer("state", torch.zeros(4, dtype=torch.float64))
        self.state: Tensor

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.table(tokens) + 0.1 * positions[..., None]
        if self.training and self.kind != "none":
            new = x.detach().mean((0, 1)) if self.kind == "moving mean" else torch.ones(4, dtype=torch.float64)
            self.state.add_(new, alpha=0.1)
        heads = x[:, None]
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        return self.head(attended + self.state)


@pytest.mark.parametrize("kind", ["none", "calls", "moving mean"])
def test_state_that_depends_on_the_tokens_is_refused_where_ranks_share_sequences(kind):
    tokens = torch.arange(64).view(4, 16) % 9
    batch = {"tokens": tokens, "positions": torch.arange(16).expand(4, 16)}, tokens

    def of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")

    def body(comm):
        with SEED_LOCK:
            torch.manual_seed(3)
            attending = Attending(kind).double()
        step = TrainStep(attending, of_tokens, sgd, plan=Plan(cp=2), communicator=comm, clip=None)
        if kind == "moving mean":
            with pytest.raises(TaskError, match="outputs depend on other ranks' tokens, first in head"):
                step(batch)
            return []
        return [step(batch).loss for _ in range(3)]

    first, second = threads.run(2, body)
    assert first == second


def test_a_first_batch_without_samples_on_some_rank_is_refused_if_forward_writes():
    def body(comm):
        with pytest.raises(TaskError, match="a first batch without samples on rank"):
            train(comm, "spectral norm", Plan(dp=3), batches(2))

    threads.run(3, body)
