"""Values that cross a stage: what a model keeps, returns and decides trains as on one device, or is refused by name."""

import copy
import functools
import itertools
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import TaskError
from tests import cases

WORDS, WIDTH, LENGTH, SAMPLES, DEPTH = 13, 8, 6, 6, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """An embedding, blocks and a head; subclasses say what else crosses from stage to stage."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.emb: Any = nn.Embedding(WORDS, WIDTH)
        self.define()
        self.blocks: Any = nn.ModuleList(self.block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def define(self) -> None:
        """What is defined in front of the blocks."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.through(self.emb(x)))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Keeping(Block):
    """Keeps what a balancing loss needs, and a number."""

    aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.aux, self.rank = x.square().mean(-1), x.dim()
        return x


class KeptInBlocks(Net):
    block = Keeping

    def forward(self, x: Tensor) -> Any:
        outputs = super().forward(x)
        return outputs + torch.stack([block.aux * block.rank for block in self.blocks]).sum(0)[..., None]


class Hiding(Block):
    """Keeps it in a private attribute, which has another value at first."""

    def __init__(self) -> None:
        super().__init__()
        self._aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self._aux = x.square().mean(-1)
        return x


class Private(Net):
    block = Hiding

    def forward(self, x: Tensor) -> Any:
        outputs = super().forward(x)
        return outputs + torch.stack([block._aux for block in self.blocks]).sum(0)[..., None]


class Counting(Block):
    """Counts the forwards that are trained."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        return super().forward(x)


class Counted(Net):
    block = Counting


class ReadByLoss(Net):
    """The loss reads what the blocks keep."""

    block = Keeping


class Deciding(Net):
    """Decides on a hidden state, by sample and by a branch."""

    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](self.emb(x))
        hard, scale = x.mean((1, 2)) > 0, 2.0 if bool((x.mean() > 0).item()) else 1.0
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x) * (scale + hard[:, None, None])


class TrainingOnly(Net):
    """A second head on a middle block, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Any:
        x = middle = self.blocks[0](self.emb(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x) + 0.5 * self.auxiliary(middle) if self.training else self.head(x)


class InPlace(Net):
    """Writes into the output of a module of the first stage, which the last one needs too."""

    def define(self) -> None:
        self.pos = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = entered = self.emb(x)
        x += self.pos(torch.arange(x.shape[1], device=x.device))
        x[:, 0] = x[:, 0] * 0.5
        return self.head(self.through(x) + entered)


class Hooked(Net):
    """Hooks change what modules return."""

    def __init__(self) -> None:
        super().__init__()
        for each in (self.emb, *self.blocks):
            each.register_forward_hook(lambda module, args, output: 0.5 * output)


class Seldom(Block):
    """Keeps something of odd numbers of samples only, so that only some data ranks see it in the first batch."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            self.kept = x.detach()
        return super().forward(x)


class SeldomKept(Net):
    block = Seldom


class Maybe(nn.Module):
    """Returns a mask only for batches that need one, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Any:
        keep = x != 0
        scale = float(keep.sum()) / keep.numel()
        return {"x": self.table(x), "keep": None if bool(keep.all()) else keep, "scale": scale}


class PlainValues(Net):
    def define(self) -> None:
        self.emb = Maybe()

    def forward(self, x: Tensor) -> Any:
        found = self.emb(x)
        x = found["x"]
        for block in self.blocks:
            x = block(x if found["keep"] is None else x * found["keep"][..., None])
        return self.head(x) * found["scale"]


class SequenceFirst(Net):
    """Sizes are read off the embedding's output, whose first dim is not that of samples."""

    def forward(self, x: Tensor) -> Any:
        x = self.emb(x.T)
        x = self.through(x + torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None, None] / x.shape[1])
        return self.head(x.transpose(0, 1))


class Packed(Net):
    """A recurrent layer over packed sequences, whose lengths an operation reads beside the embedding's output."""

    def define(self) -> None:
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        packed = pack_padded_sequence(self.emb(x), (x > 2).sum(1).clamp(min=1).cpu(), True, enforce_sorted=False)
        return self.head(self.through(pad_packed_sequence(self.recurrent(packed)[0], True, total_length=x.shape[1])[0]))


class ListInFront(Net):
    def define(self) -> None:
        self.stem = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Any:
        x = self.emb(x)
        for layer in self.stem.values():
            x = torch.tanh(layer(x))
        return self.head(self.through(x))


class CalledTwice(Net):
    """A module in front of the blocks that is called twice; the last stage needs what it returned the second time."""

    def forward(self, x: Tensor) -> Any:
        first, second = self.emb(x), self.emb(x.flip(0))
        return self.head(self.through(first) + second)


class OwnWeight(Net):
    """A weight of the model itself, used behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.logit_scale.exp()


class LayerScale(Net):
    """A weight of the model itself that every stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.scale * block(x)
        return x


class Buffers(Net):
    """Buffers of the model itself that forward writes in front of the blocks, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        calls, average = self.get_buffer("calls"), self.get_buffer("average")
        x = self.emb(x)
        if self.training:
            calls += 1
        x = self.through(x)
        if self.training:
            average.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return self.head(x - average)


class Frozen(Net):
    """What is in front of the second block is not trained."""

    def __init__(self) -> None:
        super().__init__()
        for each in (self.emb, self.blocks[0]):
            each.requires_grad_(False)

    def through(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x


class Checkpointed(Net):
    """A checkpoint of its own around each block."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Around(Net):
    """Checkpoints around each block and what follows it, one inside another."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:

            def inner(x: Tensor, block: nn.Module = block) -> Tensor:
                return x + checkpoint(lambda x: block(x.sin()).tanh() * 1.1, x, use_reentrant=False)

            x = checkpoint(inner, x, use_reentrant=False)
        return x


class Segments(Net):
    """Checkpoints around several blocks."""

    def through(self, x: Tensor) -> Tensor:
        return checkpoint(super().through, x, use_reentrant=False)


class Penalty(Net):
    """The loss reads all weights."""


class Listening(Net):
    """The loss reads what hooks have kept of what the blocks return."""


class Stolen(Net):
    """A weight of the first block is used behind the last one."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.through(self.emb(x)) * self.blocks[0].up.bias)


class Late(Net):
    """A module that is defined behind the blocks and called in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.through(self.pos(self.emb(x))))


class Again(Net):
    """A module in front of the blocks that is called again behind them, as in the prediction of several tokens."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.through(self.emb(x)) + self.emb(x.roll(-1)))


class Transformed(Net):
    """Blocks that are called inside of vmap, for each sample."""

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.func.vmap(self.through)(self.emb(x)))


LEFT = threading.local()


class Leaving(Block):
    """Leaves a value outside of the model."""

    def forward(self, x: Tensor) -> Tensor:
        LEFT.total = getattr(LEFT, "total", 0.0) + x.detach().mean()
        return super().forward(x)


class Scaling(torch.autograd.Function):
    """Passes values on, and scales gradients by how many blocks have left something outside of the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale, LEFT.calls = getattr(LEFT, "calls", 0), 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.scale


class Square(torch.autograd.Function):
    """A function of the user's own, which saves what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Saving(Net):
    """Values are saved for backward between blocks, also where a stage has not got them."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Square.apply(checkpoint(block, x, use_reentrant=False)) / 4  # pyright: ignore[reportOptionalOperand]
        return x


class Calling(Block):
    def forward(self, x: Tensor) -> Tensor:
        LEFT.calls = getattr(LEFT, "calls", 0) + 1
        return super().forward(x)


class HiddenGradient(Net):
    """Neither outputs nor the loss show what the backward depends on."""

    block = Calling

    def through(self, x: Tensor) -> Any:
        return Scaling.apply(super().through(x))


class Held:
    """An object that is no dataclass."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Holding(Block):
    def forward(self, x: Any) -> Any:
        return Held(super().forward(getattr(x, "x", x)))


class Objects(Net):
    block = Holding

    def through(self, x: Tensor) -> Tensor:
        held: Any = super().through(x)
        return held.x


class Differentiating(Net):
    """Takes the gradient through its blocks in forward."""

    def through(self, x: Tensor) -> Tensor:
        y = super().through(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Misplaced(Net):
    """Outputs depend on what blocks have left outside of the model."""

    block = Leaving

    def through(self, x: Tensor) -> Tensor:
        return super().through(x) * (1 + LEFT.total.square())


class Outside(Net):
    """The loss reads what blocks have left outside of the model."""

    block = Leaving


class Later(Net):
    """A branch of a later batch needs what the first one did not."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.emb(x)
        outputs = self.head(self.through(hidden))
        return outputs + hidden.mean() if int(x[0, 0]) == 0 else outputs


class KeepingLater(Block):
    aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if FIRST.is_over:
            self.aux = x.mean(-1, keepdim=True)
        return x


class KeptLater(Net):
    """Blocks keep in a later batch what they did not in the first one."""

    block = KeepingLater

    def forward(self, x: Tensor) -> Any:
        outputs = super().forward(x)
        return outputs + sum(block.aux for block in self.blocks)


class WritingLater(nn.Module):
    """Writes into what it is given, in later batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, into: Any) -> Tensor:
        if FIRST.is_over and isinstance(into, list):
            into.append(x.mean())
        elif FIRST.is_over and isinstance(into, dict):
            into["mean"] = x.mean()
        elif FIRST.is_over and isinstance(into, Tensor):
            into.add_(x.detach().mean())
        elif FIRST.is_over:
            into.mean = x.mean()
        return self.inner(x)


class WrittenLater(Net):
    block, make = WritingLater, list

    def through(self, x: Tensor) -> Tensor:
        into = self.make()
        for block in self.blocks:
            x = block(x, into)
        return x


class WrittenDict(WrittenLater):
    make = dict


class WrittenObject(WrittenLater):
    make = types.SimpleNamespace


class WrittenTensor(WrittenLater):
    make = staticmethod(lambda: torch.zeros((), dtype=torch.float64))


class Skipping(Net):
    """Leaves a block out in later batches."""

    def through(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if FIRST.is_over and index == 1 else block(x)
        return x


class BufferLater(Net):
    """A buffer of the model is written in front of the blocks, not in the first batch."""

    average: Tensor

    def define(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def through(self, x: Tensor) -> Tensor:
        if FIRST.is_over:
            self.average = x.detach().mean((0, 1))
        return super().through(x)


FIRST = threading.local()
"""Whether the first batch `is_over` on this rank."""


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")


def loss_of(model: Any) -> Callable[[Any, Tensor], Tensor]:
    if hasattr(model, "loss"):
        return model.loss
    if isinstance(model, ReadByLoss):
        return lambda o, t: cross_entropy(o, t) + 0.1 * torch.stack([b.aux for b in model.blocks]).sum(0).flatten()
    if isinstance(model, Penalty):
        return lambda o, t: cross_entropy(o, t) + 0.01 * sum(p.square().sum() for p in model.parameters())
    if isinstance(model, Outside):
        return lambda o, t: cross_entropy(o, t) * (1 + LEFT.total.square())
    if isinstance(model, Listening):
        kept: dict[int, Tensor] = {}
        for index, block in enumerate(model.blocks):
            block.register_forward_hook(lambda m, args, output, index=index: kept.update({index: output}))
        return lambda o, t: (
            cross_entropy(o, t) + 0.1 * torch.stack([h.square().mean(-1) for h in kept.values()]).sum(0).flatten()
        )
    return cross_entropy


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randint, generator=generator)
    sizes = (SAMPLES, SAMPLES - 1, SAMPLES)
    found = [(draw(1, WORDS, (size, LENGTH)), draw(0, WORDS, (size, LENGTH))) for size in sizes]
    found[1][0][2:, 3:] = 0  # padding, not in the first batch
    return found


def made(kind: type[nn.Module]) -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(1)
        return kind().double()


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, Tensor]


def alone(kind: type[nn.Module]) -> Trained:
    model = made(kind)
    loss, optimizer, losses = loss_of(model), torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches():
        # Buffers are written once in each microbatch: there is one.
        value = loss(model(x), y).mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    x, y = batches()[0]
    losses.append(loss(model.eval()(x), y).mean().item())
    return Trained(losses, {name: each.detach() for name, each in model.state_dict().items()})


def divided(kind: type[nn.Module], fields: dict[str, Any], comm: Any) -> Trained:
    model = made(kind)
    step = TrainStep(
        model, loss_of(model), functools.partial(torch.optim.SGD, lr=0.1), plan=Plan(**fields), communicator=comm
    )
    losses = [step(batch).loss for batch in batches()]
    losses.append(step.evaluate(batches()[0]).loss)
    return Trained(losses, copy.deepcopy(step.state_dict()["model"]))


OF_SAMPLES = [
    *(KeptInBlocks, Counted, ReadByLoss, TrainingOnly, InPlace, Hooked, ListInFront, OwnWeight, Frozen, Checkpointed),
    *(Listening, Private, Around),
]
OF_BATCHES = [Deciding, PlainValues, SequenceFirst, CalledTwice, Buffers, Packed]
"""What these compute depends on which samples are in one microbatch."""
PLANS = [{"pp": 2}, {"pp": 4, "schedule": "zero-bubble"}]
INTERLEAVED = {"pp": 2, "schedule": "interleaved", "interleave": 2, "microbatches": 2}


@pytest.mark.parametrize(("kind", "fields"), [
    *zip(OF_BATCHES, itertools.cycle(PLANS), strict=False),
    *zip(OF_SAMPLES, itertools.cycle([*PLANS, INTERLEAVED]), strict=False),
], ids=str)  # fmt: skip
def test_what_crosses_a_stage_trains_as_on_one_device(kind, fields):
    expected = alone(kind)
    for got in threads.run(fields["pp"], functools.partial(divided, kind, fields)):
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert got.state.keys() == expected.state.keys()
        for name, wanted in expected.state.items():
            torch.testing.assert_close(got.state[name], wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize(("kind", "got"), [
    (Segments, r"a stage that ends with blocks\.1, which is in one checkpoint with blocks\.2"),
    (Penalty, r"stage 1 \(blocks\.2 to blocks\.3\) needs weight blocks\.0"),
    (Stolen, r"stage 1 \(blocks\.2 to blocks\.3\) needs weight blocks\.0\.up\.bias"),
    (Objects, r"needs what blocks\.1 returned .*: Held, an object   need tensors.* try Held as a dataclass, or pp = 1"),
    (Differentiating, r"torch\.autograd\.grad of the model's own, which fails through blocks .* try pp = 1"),
    (Late, r"pos, which has weights and is defined behind the blocks, called in front of them"),
    (Again, r"emb, which has weights and is defined in front of the blocks, called behind blocks\.1"),
    (Transformed, r"blocks\.0, called inside of a transform of torch\.func, .* try a transform inside of one block"),
    (HiddenGradient, r"other gradients of stage 1 \(blocks\.2 to blocks\.3\) by itself"),
    (Misplaced, r"other outputs of stage 1 \(blocks\.2 to blocks\.3\) by itself"),
    (Outside, r"another loss of stage 1 \(blocks\.2 to blocks\.3\) by itself"),
])  # fmt: skip
def test_what_cannot_cross_is_refused_before_the_first_update(kind, got):
    def body(comm: Any) -> None:
        model = made(kind)
        before = copy.deepcopy(model.state_dict())
        step = TrainStep(
            model, loss_of(model), functools.partial(torch.optim.SGD, lr=0.1), plan=Plan(pp=2), communicator=comm
        )
        with pytest.raises(TaskError, match=got):
            step(batches()[0])
        for name, each in model.named_parameters():
            assert torch.equal(each, before[name])

    threads.run(2, body)


def test_what_only_some_data_ranks_have_seen_is_no_error():
    def body(comm: Any) -> tuple[float, ...]:
        step = TrainStep(
            made(SeldomKept), cross_entropy, functools.partial(torch.optim.SGD, lr=0.1),
            plan=Plan(pp=2, dp=2), communicator=comm,
        )  # fmt: skip
        # 1 and 2 samples on the data ranks, then 3 on each.
        few = tuple(tensor[:3] for tensor in batches()[0])
        return tuple(step(cases.local_batch(batch, 2, step.dp_index)).loss for batch in (few, batches()[0]))

    assert len(set(threads.run(4, body))) == 1


def test_the_last_stage_has_the_buffers_that_it_writes():
    def body(comm: Any) -> list[bool]:
        step = TrainStep(
            made(Buffers), cross_entropy, functools.partial(torch.optim.SGD, lr=0.1), plan=Plan(pp=2), communicator=comm
        )
        step(batches()[0])
        return [step.pipeline.is_own(name) for name in ("average", "emb.weight")]

    assert threads.run(2, body) == [[False, True], [True, False]]


def test_a_buffer_that_the_first_stage_writes_later_is_saved():
    def body(comm: Any) -> float:
        FIRST.is_over = False
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        step = TrainStep(made(BufferLater), cross_entropy, sgd, plan=Plan(pp=2), communicator=comm)
        for batch in batches()[:2]:
            step(batch)
            FIRST.is_over = True
        return step.state_dict()["model"]["average"].abs().sum().item()

    first, last = threads.run(2, body)
    assert first == last > 0


RANK = threading.local()


class FailsOnOne(Block):
    """Fails on the ranks of odd numbers, in front of a sum over the tensor ranks."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(RANK, "number", 0) % 2:
            raise ValueError("odd")
        return super().forward(x)


class OneFails(Net):
    block = FailsOnOne


def test_no_tensor_rank_waits_for_one_that_fails():
    def body(comm: Any) -> str:
        RANK.number = comm.rank
        rules = {"blocks.*.up": "column", "blocks.*.down": "row"}
        plan, sgd = Plan(pp=2, tp=2), functools.partial(torch.optim.SGD, lr=0.1)
        step = TrainStep(made(OneFails), cross_entropy, sgd, plan=plan, communicator=comm, tensor=rules)
        with pytest.raises((ValueError, TaskError)) as caught:
            step(batches()[0])
        return type(caught.value).__name__

    assert threads.run(4, body) == ["TaskError", "ValueError", "TaskError", "ValueError"]


@pytest.mark.parametrize(("kind", "got"), [
    (Later, r"stage 1 needs what emb returned, which it did not in the first batch"),
    (KeptLater, r"stage 1 needs attribute blocks\.0\.aux, which it did not in the first batch"),
    (Skipping, r"a forward that does not call blocks\.1, which ends stage 0"),
    *((kind, r"blocks\.\d, which writes into one of its arguments")
      for kind in (WrittenLater, WrittenDict, WrittenObject, WrittenTensor)),
])  # fmt: skip
def test_what_a_later_batch_needs_is_named_where_it_is_used(kind, got):
    def body(comm: Any) -> None:
        FIRST.is_over = False
        step = TrainStep(
            made(kind), cross_entropy, functools.partial(torch.optim.SGD, lr=0.1), plan=Plan(pp=2), communicator=comm
        )
        first, second = batches()[:2]
        step(first)
        FIRST.is_over = True
        second[0][:] = 0
        step(second)

    with pytest.raises(TaskError, match=got):
        threads.run(2, body)


@pytest.mark.covering
@pytest.mark.parametrize("hosts", [1, 4], ids=["shared memory", "process groups"])
@pytest.mark.parametrize(("kind", "fields"), [
    *((LayerScale, fields) for fields in (
        {}, {"zero": 1, "update": "in_forward"}, {"zero": 2, "schedule": "zero-bubble"}, {"zero": 3},
        {"zero": 3, "update": "in_forward"}, {"zero": 3, "schedule": "interleaved", "interleave": 2},
        {"zero": 3, "recompute": "full"},
    )),
    (Saving, {"zero": 3}), (Saving, {"zero": 3, "schedule": "interleaved", "interleave": 2}),
], ids=str)  # fmt: skip
def test_what_crosses_a_stage_trains_as_on_one_device_wherever_weights_rest(kind, fields, hosts):
    def body(comm: Any) -> Trained:
        plan = Plan(pp=2, dp=2, microbatches=2, **fields)
        step = TrainStep(
            made(kind), cross_entropy, functools.partial(torch.optim.SGD, lr=0.1), plan=plan, communicator=comm
        )
        losses = [step(cases.local_batch(batch, 2, step.dp_index)).loss for batch in batches()]
        losses.append(step.evaluate(cases.local_batch(batches()[0], 2, step.dp_index)).loss)
        return Trained(losses, copy.deepcopy(step.state_dict()["model"]))

    expected = alone(kind)
    for got in threads.run(4, body, hosts=hosts):
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        for name, wanted in expected.state.items():
            torch.testing.assert_close(got.state[name], wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
