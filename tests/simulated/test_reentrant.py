"""Laws of reentrant checkpoints: they train as in one process, or are refused with a remedy."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import FourfoldError, TaskError, TrainingError

LENGTH, WIDTH = 16, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Net(nn.Module):
    """Two layers in reentrant checkpoints. "twice": one is used again; "in a dict": the input is in a dict."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.tokens, self.places = kind, nn.Embedding(50, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for layer in (*self.layers, *([self.layers[0]] if self.kind == "twice" else [])):
            if self.kind == "in a dict":
                x = checkpoint(lambda inputs, layer=layer: layer(inputs["x"]), {"x": x}, use_reentrant=True)
            else:
                x = checkpoint(layer, x, use_reentrant=True)
        assert isinstance(x, Tensor)
        return self.head(x)


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        tokens, targets = torch.randint(0, 50, (2, 4, LENGTH), generator=generator)
        found.append(({"tokens": tokens, "positions": torch.arange(LENGTH).expand(4, LENGTH)}, targets))
    return found


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")


adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
PLANS = [
    {"cp": 2},
    {"cp": 2, "zero": 3},
    {"dp": 2, "zero": 3},
    {"dp": 2, "zero": 2, "microbatches": 2},
    {"dp": 2, "update": "in_forward"},
    {"dp": 2, "update": "in_backward"},
    {"update": "in_backward"},
]


def step_of(model: nn.Module, comm, plan: Plan) -> TrainStep:
    return TrainStep(copy.deepcopy(model), loss, adamw, plan=plan, communicator=comm, clip=None)


def part_of(batch: Any, step: TrainStep) -> Any:
    inputs, targets = batch
    each = len(targets) // step.plan.dp
    mine = slice(each * step.dp_index, each * (step.dp_index + 1))
    return {name: tensor[mine] for name, tensor in inputs.items()}, targets[mine]


@pytest.fixture(scope="module")
def expected():
    torch.manual_seed(1)
    model = Net("once").double()
    return model, oracle.train(copy.deepcopy(model), loss, adamw, batches(3))


@pytest.mark.parametrize("fields", PLANS)
def test_a_reentrant_checkpoint_trains_as_in_one_process(fields, expected):
    plan, (model, in_one_process) = Plan(**fields), expected

    def body(comm):
        step = step_of(model, comm, plan)
        losses = [step(part_of(batch, step)).loss for batch in batches(3)]
        return oracle.deviation(oracle.snapshot(step, losses, []), in_one_process)

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


REFUSED = {
    "twice": (TaskError, "two gradients of layers"),
    "in a dict": (TrainingError, "parameter layers.0.norm.weight got no gradient"),
}


@pytest.mark.parametrize("fields", PLANS)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_reentrant_checkpoint_that_cannot_be_trained_is_refused_on_every_rank_with_a_remedy(kind, fields):
    (error, message), plan = REFUSED[kind], Plan(**fields)
    torch.manual_seed(1)
    model = Net(kind)

    def body(comm):
        step = step_of(model, comm, plan)
        with pytest.raises(FourfoldError) as caught:
            step(part_of(batches(1)[0], step))
        return type(caught.value), str(caught.value)

    for found, text in threads.run(plan.mesh.size, body):
        assert found is error
        assert message in text
        assert "use_reentrant=False" in text
        # With cp > 1, a rank that fails in the middle of backward leaves others waiting in attention.
        assert ("in the model" in text) == (kind == "twice" and plan.cp > 1)
