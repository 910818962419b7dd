"""Stages of any chain: what can travel trains as on one device, what breaks the chain is refused with its name."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourfold.axes.pipeline.rules.division import StageSpec
from fourfold.axes.pipeline.work.chain import find_chain, map_stages
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import PlanError, TaskError
from tests import cases

WIDTH, CLASSES = 8, 4


class Blocks(nn.Module):
    """Five blocks between an embedding and a head; subclasses say how they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Again(Blocks):
    """Calls its third block twice."""

    def forward(self, x):
        x = self.embed(x)
        for index in (0, 1, 2, 2, 3, 4):
            x = self.blocks[index](x)
        return self.head(x)


class Swapped(Blocks):
    """Calls its blocks in another order than they are listed."""

    def forward(self, x):
        x = self.embed(x)
        for index in (1, 0, 2, 3, 4):
            x = self.blocks[index](x)
        return self.head(x)


class Skipping(Blocks):
    """Adds what its first block has returned behind the last one: it travels with the activations."""

    def forward(self, x):
        first = x = self.blocks[0](self.embed(x))
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.head(x + first)


class InDict(nn.Module):
    """A model whose blocks are in an nn.ModuleDict, not in a list."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({f"l{index}": nn.Linear(WIDTH, WIDTH) for index in range(4)})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return self.head(x)


class TwoDevices(nn.Module):
    """The model of PyTorch's tutorial on model parallelism: a chain that no list has."""

    def __init__(self) -> None:
        super().__init__()
        self.net2, self.net1 = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, WIDTH)
        self.relu, self.scale = nn.ReLU(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.net2(self.relu(self.net1(x * self.scale)))


class Carrying(nn.Module):
    """A block that returns its output, what it was given, and the number of blocks so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        x, skip, count = given
        return torch.tanh(self.linear(x)), x + 0.5 * skip, count + 1


class Carried(Blocks):
    """Its skip connections are in what blocks return, so they travel: values, gradients, and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Carrying() for _ in range(5))

    def forward(self, x):
        given = (self.embed(x), torch.zeros_like(x), torch.zeros(len(x), 1, dtype=torch.int64))
        for block in self.blocks:
            given = block(given)
        x, skip, count = given
        return self.head(x + skip * torch.sin(count))


class Rotated(Blocks):
    """Each block is given an angle computed from the embedding's dtype and the batch, on every stage."""

    def forward(self, x):
        x = self.embed(x)
        angles = torch.arange(WIDTH, dtype=x.dtype) / 3
        for block in self.blocks:
            x = torch.tanh(block(x)) * angles.cos()
        return self.head(x)


def in_place() -> nn.Module:
    layers = [(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(3)]
    return nn.Sequential(*(each for pair in layers for each in pair), nn.Linear(WIDTH, CLASSES))


def made(kind) -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(3)
        return kind().double()


def batches():
    generator = torch.Generator().manual_seed(5)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(draw(size, WIDTH), torch.randint(0, CLASSES, (size,), generator=generator)) for size in (6, 5, 4)]


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


def train(kind, fields, comm):
    step = TrainStep(made(kind), loss, adamw, plan=Plan(microbatches=2, **fields), communicator=comm)
    metrics = [step(batch) for batch in batches()]
    return oracle.snapshot(step, [m.loss for m in metrics], [])


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(("kind", "pp", "stages"), [
    (Blocks, 2, "even"),
    (Blocks, 5, "even"),
    (Carried, 2, "2,3"),
    (Carried, 3, "1,3,1"),
    (Rotated, 3, "even"),
    (in_place, 2, "3,4"),
    (in_place, 4, "1,2,2,2"),
    (Skipping, 2, "3,2"),
    (TwoDevices, 2, "net1; relu net2"),
    (TwoDevices, 2, "net1 relu; net2"),
    (Blocks, 2, "blocks.0; 1 2 3 blocks.4"),
    (InDict, 2, "l0 l1; l2 l3"),
])  # fmt: skip
def test_the_stages_of_a_chain_train_as_one_device(kind, pp, stages, schedule):
    expected = oracle.train(made(kind), loss, adamw, batches())
    body = functools.partial(train, kind, {"pp": pp, "stages": stages, "schedule": schedule})
    for got in threads.run(pp, body):
        assert oracle.deviation(got, expected) <= TOLERANCE


@pytest.mark.parametrize(("kind", "got"), [
    (Again, r"blocks\.2 called 2 times"),
    (Swapped, "blocks in another order"),
])  # fmt: skip
def test_what_breaks_the_chain_is_refused_by_name(kind, got):
    with pytest.raises(TaskError, match=got):
        threads.run(2, functools.partial(train, kind, {"pp": 2, "stages": "3,2"}))


@pytest.mark.parametrize(("kind", "stages", "parts"), [
    (TwoDevices, "net1; rellu net2 net1", ["'rellu'", "try relu", "'net1' 2 times"]),
    (TwoDevices, "net1; relu", ["without net2"]),
    (InDict, "even", ["2 stages and a model without a list of blocks", "nn.ModuleList or nn.Sequential", 'stages = "']),
    (TwoDevices, "net1; relu; net2", ["3 stages", "need 2"]),
    (Blocks, "0 1; 3 2 4", ["the order of the chain"]),
    (Blocks, "0 1; 2 head", ["'head'", "without blocks.3, blocks.4"]),
])  # fmt: skip
def test_stages_that_a_model_has_not_are_said_all_at_once(kind, stages, parts):
    with pytest.raises(PlanError) as caught:
        map_stages(made(kind), StageSpec(stages, 2, 2))
    for part in parts:
        assert part in str(caught.value)


def test_a_chain_is_the_list_with_most_blocks_and_what_lies_around_it():
    chain = find_chain(Blocks())
    assert chain.blocks == tuple(f"blocks.{index}" for index in range(5))
    assert (chain.before, chain.behind, chain.own) == (("embed",), ("head",), ())
    assert find_chain(in_place()).blocks == tuple(map(str, range(7)))
    assert find_chain(nn.Linear(2, 2)).blocks == ()


def test_a_short_list_inside_a_block_is_no_chain():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(2))
    assert find_chain(model).blocks == ("layers.0", "layers.1")
