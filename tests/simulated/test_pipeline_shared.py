"""What blocks of several stages share, and what stages first need in another mode: exact, or refused by name."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import FourfoldError
from tests.simulated.test_pipeline_values import DEPTH, WIDTH, Block, Net, alone, batches, cross_entropy, divided, made

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Angles(nn.Module):
    """A buffer, and what is computed of it when it is first needed."""

    table: Any = None
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.5, 1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = self.frequencies.cos()
        return x * self.table


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


class Average(Counter):
    """Reads what it has written in its last call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.calls


class WrittenBehind(Net):
    """A buffer of the model itself that the first stage reads, and the last one writes."""

    def define(self) -> None:
        self.register_buffer("number", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        outputs = self.head(self.through(self.emb(x) * self.number))
        self.number = self.number + 1
        return outputs


class WithShared(Block):
    shared: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shared(x))


class Shared(Net):
    block = WithShared
    kind: Callable[[], nn.Module] = Angles

    def __init__(self) -> None:
        super().__init__()
        shared = self.kind()
        for block in self.blocks:
            block.shared = shared


class SharedCounter(Shared):
    kind = Counter


class SharedNorm(Shared):
    kind = functools.partial(nn.LayerNorm, WIDTH)


class Between(Net):
    """A module that is called between the blocks: a stage makes its calls up to the stage's end only."""

    def define(self) -> None:
        self.average = Average()

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.average(block(x))
        return x


class Appending(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Tensor:
        x = super().forward(x)
        kept.append(x)
        return x


class WritesArguments(Net):
    block = Appending

    def through(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept)
        return x + kept[0]


class NeededList(Net):
    """A list in front of the blocks that also has weights of its own; every stage needs what it returns."""

    def define(self) -> None:
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])

    def forward(self, x: Tensor) -> Any:
        memory = x = self.emb(x)
        for layer, scale in zip(self.encoder, self.scales, strict=True):
            memory = torch.tanh(layer(memory)) * scale
        for block in self.blocks:
            x = block(x + memory * self.scales[0])
        return self.head(x)


class Sparse(Net):
    def define(self) -> None:
        self.emb = nn.Embedding(self.emb.num_embeddings, WIDTH, sparse=True)


class SkipsInTraining(Net):
    def forward(self, x: Tensor) -> Any:
        first = self.emb(x)
        return self.head(self.through(first) + (first if self.training else 0))


class Scaled(Block):
    """A weight between the two layers that split rules divide."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * self.scale)


class NetOfScaled(Net):
    block = Scaled


@pytest.mark.parametrize("kind", [Shared, NeededList])
@pytest.mark.parametrize("pp", [2, DEPTH])
def test_what_stages_share_or_need_again_trains_as_on_one_device(kind, pp):
    expected = alone(kind)
    for got in threads.run(pp, functools.partial(divided, kind, {"pp": pp})):
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        for name, wanted in expected.state.items():
            torch.testing.assert_close(got.state[name], wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize(("kind", "fields", "got"), [
    (SharedCounter, {"pp": 2}, r"blocks\.0\.shared\.calls, which other stages write"),
    (Between, {"pp": 2}, r"average\.calls, which other stages write"),
    (WrittenBehind, {"pp": 2}, r"number, which other stages write"),
    (WritesArguments, {"pp": 2}, r"blocks\.\d writes into one of its arguments"),
    (SharedNorm, {"pp": 2}, r"one weight, blocks\.0\.shared\.weight and .*, on several stages"),
    (Sparse, {"pp": 2}, r"emb\.weight has a sparse gradient"),
    (NetOfScaled, {"pp": 2, "tp": 2}, r"blocks\.0 \(Scaled\) fails where the model is cut"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused_on_all_ranks(kind, fields, got):
    rules = {"blocks.*.up": "column", "blocks.*.down": "row"} if "tp" in fields else {}
    plan = Plan(**fields)

    def body(comm: Any) -> None:
        with pytest.raises(FourfoldError, match=got):
            TrainStep(made(kind), cross_entropy, SGD, plan=plan, communicator=comm, tensor=rules)(batches()[0])

    threads.run(plan.pp * plan.tp, body)


def test_an_evaluation_first_does_not_hide_what_training_needs():
    def body(comm: Any) -> list[float]:
        model = made(SkipsInTraining)
        step = TrainStep(model, cross_entropy, SGD, plan=Plan(pp=2), communicator=comm)
        model.eval()
        step.evaluate(batches()[0])
        model.train()
        return [step(batch).loss for batch in batches()]

    for losses in threads.run(2, body):
        assert losses == pytest.approx(alone(SkipsInTraining).losses[:-1], rel=TOLERANCE)


class Dropping(Block):
    """Dropout of features that tensor ranks have parts of."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.5, self.training))


class DroppingNet(Net):
    block = Dropping


def test_an_evaluation_first_does_not_hide_where_tensor_ranks_drop() -> None:
    def body(comm: Any) -> list[float]:
        model, rules = made(DroppingNet).eval(), {"blocks.*.up": "column", "blocks.*.down": "row"}
        plan = Plan(pp=2, tp=2)
        step = TrainStep(model, cross_entropy, SGD, plan=plan, communicator=comm, tensor=rules)
        step.evaluate(batches()[0])
        model.train()
        return [step(batch).loss for batch in batches()]

    first, *others = threads.run(4, body)
    assert all(each == first for each in others)
    assert len(set(first)) == len(first)


class Spectral(Block):
    """A weight that is viewed as complex numbers, behind one of an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.odd = nn.Parameter(torch.ones(WIDTH // 2 + 1, 2) / 2), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=2) * torch.view_as_complex(self.filter)
        return super().forward(x + torch.fft.irfft(spectrum, n=WIDTH, dim=2) * self.odd.mean())


class SpectralNet(Net):
    block = Spectral


@pytest.mark.parametrize("fields", [{"pp": 2}, {"dp": 1, "recompute": "full"}, {"dp": 1, "update": "in_forward"}])
def test_weights_may_be_viewed_as_complex_numbers(fields: dict[str, Any]) -> None:
    expected = alone(SpectralNet)
    found = threads.run(fields.get("pp", 1), functools.partial(divided, SpectralNet, fields))[0]
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert all(torch.allclose(found.state[name], value) for name, value in expected.state.items())
