"""Channels split over the tensor axis: convolutional models train as on one device."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourfold.axes.tensor.show import format_tensor
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import digits
from fourfold.testing import oracle, threads
from fourfold.words.errors import TaskError
from tests import cases
from tests.cases import SEED_LOCK

TOLERANCE = 1e-9
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
MESHES = [(8 // tp, tp) for tp in (1, 2, 4, 8)]


class Mixed(nn.Module):
    """Convolutions of each number of dims, transposed ones and one of groups, with biases and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv1d(3, 16, 3, padding=1), nn.GroupNorm(8, 16)
        self.each, self.plain = nn.Conv1d(16, 32, 3, padding=1, groups=8), nn.GroupNorm(8, 32, affine=False)
        self.up = nn.ConvTranspose1d(32, 8, 2, stride=2)
        self.wide, self.back = nn.ConvTranspose2d(8, 16, 2), nn.Conv2d(16, 4, 2, padding_mode="reflect", padding=1)
        self.deep, self.last = nn.Conv3d(4, 8, (1, 2, 2)), nn.ConvTranspose3d(8, 3, (1, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.plain(self.each(torch.tanh(self.norm(self.down(x))))))
        x = self.back(torch.tanh(self.wide(x.unsqueeze(-1))))
        return self.last(torch.tanh(self.deep(x.unsqueeze(2)))).flatten(1)


MIXED_RULES = {
    "down": "column", "norm": "channels", "each": "channels", "plain": "channels", "up": "row",
    "wide": "column", "back": "row", "deep": "column", "last": "row",
}  # fmt: skip


def model(kind: str) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(7)
        return (digits.Network(channels=64) if kind == "digits" else Mixed()).double()


def batches(kind: str) -> list[Any]:
    generator = torch.Generator().manual_seed(11)
    shape = (8, 1, 8, 8) if kind == "digits" else (8, 3, 6)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [(each, torch.randint(0, 10, (8,), generator=generator)) for each in inputs]


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def rules(kind: str) -> dict[str, str]:
    return digits.TENSOR_RULES if kind == "digits" else MIXED_RULES


@functools.cache
def one_device(kind: str) -> oracle.TrainingResult:
    return oracle.train(model(kind), loss, ADAM, batches(kind), clip=0.5)


@pytest.mark.covering
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_digits_train_as_on_one_device(dp, tp, zero, without_dry_run):
    check("digits", Plan(dp=dp, tp=tp, zero=zero, bucket_bytes=8000))


def test_every_kind_of_convolution_trains_as_on_one_device():
    check("mixed", Plan(dp=2, tp=4, zero=1, bucket_bytes=2000))


def check(kind: str, plan: Plan) -> None:
    expected = one_device(kind)

    def body(comm):
        step = TrainStep(model(kind), loss, ADAM, plan=plan, communicator=comm, clip=0.5, tensor=rules(kind))
        metrics = [step(cases.local_batch(batch, plan.dp, step.dp_index)) for batch in batches(kind)]
        step.flush()
        assert [each.grad_norm for each in metrics] == pytest.approx(expected.grad_norms, rel=TOLERANCE)
        assert [each.loss for each in metrics] == pytest.approx(expected.losses, rel=TOLERANCE)
        weights = dict(step.named_weights())  # whole, on every rank
        return max((weights[name] - whole).abs().max().item() for name, whole in expected.weights.items())

    assert max(threads.run(plan.mesh.size, body)) <= TOLERANCE


def test_a_whole_norm_of_split_channels_is_named_before_the_first_step():
    wrong = {name: style for name, style in digits.TENSOR_RULES.items() if name != "layers.1"}

    def body(comm):
        step = TrainStep(model("digits"), loss, ADAM, plan=Plan(tp=2), communicator=comm, tensor=wrong)
        with pytest.raises(TaskError) as error:
            step(batches("digits")[0])
        return str(error.value)

    texts = threads.run(2, body)
    assert all("layers.1 (GroupNorm) gets split features" in text or "layers.1" in text for text in texts), texts[0]


def test_show_prints_what_convolutions_send():
    text = format_tensor(model("digits"), digits.TENSOR_RULES, Plan(tp=2))
    lines = [line.split() for line in text.splitlines()]
    assert [
        "layers.*",
        "column",
        *["64", "×", "1", "×", "3", "×", "3", "32", "×", "1", "×", "3", "×", "3", "–", "all-reduce"],
    ] in lines
    assert ["layers.*", "channels", "64", "32", "–", "–"] in lines
