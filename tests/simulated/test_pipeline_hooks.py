"""Hooks and attributes in the backward of a divided model: as on one device, or refused by name."""

import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import TaskError
from tests.simulated.test_pipeline_values import WIDTH, Block, Net, alone, batches, cross_entropy, divided, made


class Sharing(Block):
    """Reads what the first block of its stage, or of an earlier one, has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.source = torch.zeros(()), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x / 2
        return super().forward(x + sum(block.kept for block in self.source) / 4)


class Shared(Net):
    block = Sharing

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].source, self.blocks[3].source = [self.blocks[0]], [self.blocks[0], self.blocks[2]]


class Checkpointing(Shared):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Hooked(Net):
    """Hooks of all blocks change gradients, and need those of inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / 2 + outputs[0] / 4,))
            block.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] / 3,))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / 2,))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Around(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = Inner()

    def through(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Normalized(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight.register_hook(lambda gradient: gradient / gradient.norm())


class Between(Net):
    """A weight of the model itself is used in front of each block: on two stages of one rank, if these interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale)
        return x


class OldWeightNorm(Net):
    """torch computes the weights in hooks, and keeps them as tensors with a graph."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            for block in self.blocks:
                nn.utils.weight_norm(block.up)


class Computing(Net):
    """Hooks of the blocks themselves compute weights: torch's old weight_norm, and spectral_norm, which has buffers."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            blocks = [nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))]
            blocks += [nn.Linear(WIDTH, WIDTH), nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))]
        self.blocks = nn.Sequential(*blocks)


class CountingHook(Net):
    """A hook of each block counts its calls in a buffer, and scales what the block returns."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("calls", torch.zeros(()))
            block.register_forward_pre_hook(lambda module, args: (args[0] * (1 + module.calls.add_(1) / 8),))


class ReadingBuffer(Net):
    """The last stage reads a buffer of a block that its rank has, if stages interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_buffer("gain", torch.full((), 1.5))

    def through(self, x: Tensor) -> Tensor:
        return super().through(x) * self.blocks[1].gain


class FrozenBetween(Between):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 0.5), requires_grad=False)


class Storing(Net):
    """Hooks of the blocks write into a dict of the model, which the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.store = dict[int, Tensor]()
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(lambda module, args, output, i=index: self.store.update({i: output}))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        squares = [each.square().mean(-1) for each in self.store.values()]
        return cross_entropy(outputs, targets) + torch.stack(squares).sum(0).flatten()


class Normalizing(Block):
    """What is in front of its batch normalization has a bias whose gradient is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.mT).mT)


class NormalizedBlocks(Net):
    block = Normalizing


INTERLEAVED = {"pp": 2, "schedule": "interleaved", "interleave": 2, "microbatches": 2}
ONE_MICROBATCH = {
    "pp": 2,
    "interleave": 2,
    "schedule": "written",
    "program": "0: F0.0 F2.0 B2.0 B0.0\n1: F1.0 F3.0 B3.0 B1.0",
}


@pytest.mark.parametrize(("kind", "fields"), [
    (Shared, {"pp": 2, "microbatches": 3, "recompute": "full"}),
    (Shared, INTERLEAVED | {"recompute": "full"}),
    (Checkpointing, {"pp": 2, "microbatches": 3}),
    (Hooked, {"pp": 2, "microbatches": 2, "recompute": "full"}),
    (Hooked, INTERLEAVED),
    (Between, INTERLEAVED),
    (FrozenBetween, INTERLEAVED),
    (ReadingBuffer, INTERLEAVED),
    (OldWeightNorm, INTERLEAVED),
    *itertools.product([Computing, CountingHook], [{"pp": 2}, ONE_MICROBATCH]),
    (Storing, {"pp": 2, "microbatches": 2}),
    (NormalizedBlocks, {"pp": 2, "batch_norm": "sync"}),
], ids=str)  # fmt: skip
def test_backward_is_that_of_one_device(kind, fields):
    expected = alone(kind)
    for got in threads.run(fields["pp"], functools.partial(divided, kind, fields)):
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        for name, wanted in expected.state.items():
            torch.testing.assert_close(got.state[name], wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("fields", [{"pp": 2, "microbatches": 2}, INTERLEAVED], ids=str)
def test_a_backward_hook_of_all_modules_sees_the_gradients_of_one_device(fields):
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return (inputs[0] / 2 + outputs[0] / 4,) if isinstance(module, Block) else None

    handle = nn.modules.module.register_module_full_backward_hook(hook)
    try:
        expected, found = alone(Net), threads.run(2, functools.partial(divided, Net, fields))
    finally:
        handle.remove()
        # torch keeps in a global whether hooks are full ones, and would refuse others from now on.
        nn.modules.module._global_is_full_backward_hook = None
    for got in found:
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.parametrize(("kind", "microbatches", "got"), [
    (Around, 1, r"a full backward hook of blocks, whose forward several stages share"),
    (ReadingBuffer, 1, r"stage 1 \(.*\) needs buffer blocks\.1\.gain"),
    (Normalized, 2, r"a hook of blocks\.0\.up\.weight, blocks\.1\.up\.weight that is not additive"),
])  # fmt: skip
def test_what_a_stage_sees_otherwise_than_one_device_is_refused(kind, microbatches, got):
    def body(comm: Any) -> None:
        plan, sgd = Plan(pp=2, microbatches=microbatches), functools.partial(torch.optim.SGD, lr=0.1)
        step = TrainStep(made(kind), cross_entropy, sgd, plan=plan, communicator=comm)
        with pytest.raises(TaskError, match=got):
            step(batches()[0])

    threads.run(2, body)
