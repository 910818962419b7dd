"""Split logits: losses and gradients are those of whole logits, and cross entropy gathers none."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

import fourfold as ff
from fourfold.axes.tensor.work.split_logits import SplitLogits, split_logits, whole_logits
from fourfold.testing import threads
from fourfold.testing.saved_tensors import recording_saved
from fourfold.words.errors import DivergenceError, TaskError
from tests.simulated.test_split_cross_entropy import Counting, draw, split

cross_entropy = ff.losses.cross_entropy
Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES = 57
CLASS_WEIGHTS = torch.linspace(0.1, 2.0, CLASSES, dtype=torch.float64)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """As in models of transformers before they had one loss function for all."""
    logits = logits[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, CLASSES), labels[:, 1:].reshape(-1))


def padded(logits: Tensor, labels: Tensor) -> Tensor:
    """As in models of transformers now."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1), ignore_index=-100)


SPLIT: dict[str, Loss] = {
    "unreduced": lambda logits, targets: cross_entropy(logits, targets).sum(),
    "smoothed": lambda logits, targets: cross_entropy(logits, targets, label_smoothing=0.1).mean(),
    "ignoring": lambda logits, targets: cross_entropy(logits, targets, ignore_index=3).mean(),
    "shifted": shifted,
    "padded, in float32": padded,
    "sum": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"),
    "none": lambda logits, targets: F.cross_entropy(
        logits.reshape(-1, CLASSES), targets.ravel(), reduction="none"
    )[1:].sum(),
    "weighted": lambda logits, targets: F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), weight=CLASS_WEIGHTS, ignore_index=3
    ),
    "torch's, smoothed": lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=0.2, ignore_index=3
    ),
    "float32 of a slice": lambda logits, targets: F.cross_entropy(
        logits[:, :-1].to(torch.float32).view(-1, CLASSES).double(), targets[:, :-1].flatten()
    ).float(),
    "one row": lambda logits, targets: F.cross_entropy(logits[0, 1], targets[0, 1]),
    "some tokens": lambda logits, targets: cross_entropy(
        logits[:, [1, 2, 5]][:, torch.tensor([0, 2])], targets[:, [1, 5]]
    ).sum(),
    "masked": lambda logits, targets: F.cross_entropy(logits[targets > 9], targets[targets > 9]),
    "scaled": lambda logits, targets: cross_entropy(torch.tanh(logits / 3.0) * 3, targets).sum(),
    "scaled left": lambda logits, targets: cross_entropy(2 * logits.mul(0.5), targets).sum(),
    "cast": lambda logits, targets: cross_entropy(logits.to(torch.float64).to("cpu"), targets).sum(),
    "two losses": lambda logits, targets: cross_entropy(logits, targets).sum()
    + cross_entropy(logits[:1], targets[:1]).sum(),
    "no tokens": lambda logits, targets: cross_entropy(logits[:, :0], targets[:, :0]).sum()
    + 0 * cross_entropy(logits, targets).sum(),
    "checkpointed": lambda logits, targets: checkpoint(cross_entropy, logits, targets, use_reentrant=False).sum(),
}  # fmt: skip


class Exp(torch.autograd.Function):
    """A function of the user's, to which torch passes tensor classes as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0].exp()


def in_place(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.clone()
    flat[..., 4] = -3.0
    return cross_entropy(flat, targets).sum()


def in_place_of_a_copy(logits: Tensor, targets: Tensor) -> Tensor:
    double, rows = logits * 2, logits[0] * 1.0
    double[..., 4] = -3.0
    double[:, 0].mul_(2.0)
    return cross_entropy(double, targets).sum() + cross_entropy(double[1], targets[1]).sum() + rows.exp().sum()


def in_place_of_a_view(logits: Tensor, targets: Tensor) -> Tensor:
    double = logits * 2
    flat = double.view(-1, CLASSES)
    double[..., 4] = -3.0
    return cross_entropy(flat, targets.flatten()).sum()


def without_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        rows = logits[:, 1:] * 2.0
    return (logits[:, 1:] * rows).sum() + cross_entropy(logits, targets).sum()


def reused_index(logits: Tensor, targets: Tensor) -> Tensor:
    index = [0, 2]
    rows = logits[index]
    index[0] = 1
    return rows.exp().sum() + 0 * cross_entropy(rows, targets[:2]).sum()


def behind_autograd(logits: Tensor, targets: Tensor) -> Tensor:
    double = logits * 2
    double.data[..., 4] = -3.0
    return cross_entropy(double, targets).sum()


def hooked(logits: Tensor, targets: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient * 3)
    return cross_entropy(logits, targets).sum()


def observed(logits: Tensor, targets: Tensor) -> Tensor:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    module = Module()
    module.register_full_backward_hook(lambda _, given, upstream: (given[0] * 2,))
    return cross_entropy(module(logits), targets).sum()


def differentiated(logits: Tensor, targets: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(logits.square().sum(), logits, create_graph=True)
    return (gradient * logits.detach()).sum()


WHOLE: dict[str, Loss] = {
    "log softmax": lambda logits, targets: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), targets.flatten()),
    "softmax": lambda logits, targets: (logits.softmax(-1) * torch.arange(CLASSES)).sum(-1).square().mean(),
    "classes second": lambda logits, targets: F.cross_entropy(logits.transpose(1, 2), targets),
    "probabilities": lambda logits, targets: F.cross_entropy(logits[0], torch.eye(CLASSES).double()[targets[0]]),
    "weights and smoothing": lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), weight=CLASS_WEIGHTS, label_smoothing=0.1
    ),
    "deprecated": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduce=True),
    "some classes": lambda logits, targets: logits[..., 2:9].exp().sum(),
    "loss of some classes": lambda logits, targets: cross_entropy(logits[..., :20], targets % 20).sum()
    + cross_entropy(logits[0, :, 5:], targets[0] % 50).sum(),
    "one class": lambda logits, targets: logits[:, 1:, 5].exp().sum() + logits[..., [1, 3]].sum(),
    "new dim": lambda logits, targets: (logits[..., None] * logits[..., None, :]).sum(),
    "every row": lambda logits, targets: sum(row.exp().sum() for row in logits),  # type: ignore[return-value, misc]
    "other shape": lambda logits, targets: logits.reshape(CLASSES, -1).cumsum(0).square().mean(),
    "two in one": lambda logits, targets: torch.cat([logits, logits[:, :2] * 2.0], 1).exp().mean(),
    "function": lambda logits, targets: Exp.apply(logits).sum() + Exp.apply(logits[:, 1:].tanh()).sum(),  # type: ignore[no-untyped-call]
    "vmap": lambda logits, targets: torch.func.vmap(cross_entropy)(logits, targets).sum(),
    "in a vmap": lambda logits, targets: torch.func.vmap(
        lambda row: (logits[0] * row[:, None]).exp().sum()
    )(targets / CLASSES).sum(),
    "operator": lambda logits, targets: torch.ops.aten.exp(logits).sum(),
    "in place": in_place,
    "in place of a copy": in_place_of_a_copy,
    "in place of a view": in_place_of_a_view,
    "reused index": reused_index,
    "without gradient": without_gradient,
    "behind autograd": behind_autograd,
    "hooked": hooked,
    "module hooks": observed,
    "differentiated": differentiated,
    "two uses, one in float32": lambda logits, targets: logits.exp().sum()
    + cross_entropy(logits.float(), targets).sum(),
    "reentrant": lambda logits, targets: checkpoint(cross_entropy, logits, targets, use_reentrant=True).sum(),
    "loss, then another use": lambda logits, targets: cross_entropy(logits[:, :-1] * 2, targets[:, :-1]).sum()
    + logits[:, -1].logsumexp(-1).sum(),
}  # fmt: skip


def value_and_gradient(loss: Loss, logits: Tensor, leaf: Tensor, targets: Tensor) -> list[Tensor]:
    value = loss(logits, targets)
    value.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return [value.detach(), leaf.grad]


def num_gathers(group: Counting) -> int:
    return sum(name == "all_gather" for name, _ in group.elements)


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize(("ranks", "uses"), [(2, SPLIT), (4, SPLIT), (2, WHOLE)], ids=["split", "split on 4", "whole"])
def test_every_use_gives_what_it_gives_for_whole_logits(ranks, uses):
    whole, targets = draw(CLASSES)
    expected = {}
    for name, loss in uses.items():
        leaf = whole.clone().requires_grad_()
        expected[name] = value_and_gradient(loss, leaf * 1.0, leaf, targets)

    def body(comm):
        for name, loss in uses.items():
            local, vocabulary, group = split(comm, whole)
            logits = split_logits(local * 1.0, vocabulary)
            value, gradient = value_and_gradient(loss, logits, local, targets)
            stop = vocabulary.start + local.shape[-1]
            own = expected[name][1][..., vocabulary.start : stop]
            tolerance = 1e-5 if "float" in name else 1e-9
            for a, b in ((value, expected[name][0]), (gradient, own)):
                torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
            assert num_gathers(group) == (uses is WHOLE), (name, group.elements)

    threads.run(ranks, body)


def on_two_ranks(body: Callable[[SplitLogits, Tensor, Counting], None]) -> None:
    """Run a body on two ranks with split logits [3, 7, CLASSES], the whole ones, and their group."""
    whole, _ = draw(CLASSES)

    def on_rank(comm):
        local, vocabulary, group = split(comm, whole)
        logits = split_logits(local * 1.0, vocabulary)
        assert isinstance(logits, SplitLogits)
        body(logits, whole, group)

    threads.run(2, on_rank)


def test_what_is_known_of_logits_is_read_without_gathering_them():
    def body(logits, whole, group):
        assert isinstance(logits, Tensor)
        assert torch.is_tensor(logits)
        assert logits.shape == logits.size() == whole.shape
        assert (logits.dtype, logits.device, logits.ndim, logits.dim()) == (whole.dtype, whole.device, 3, 3)
        assert (logits.numel(), len(logits), logits.nbytes) == (whole.numel(), 3, whole.nbytes)
        assert logits.requires_grad
        assert not logits.is_leaf
        assert logits.is_floating_point()
        assert logits.grad_fn is not None
        assert logits.grad is None
        assert logits.is_contiguous()
        assert not logits[:, 1:].is_contiguous()
        assert logits[:, 1:].float().shape == (3, 6, CLASSES)
        assert logits.float().dtype == torch.float32
        assert {logits: 1}[logits] == 1
        assert group.elements == []

    on_two_ranks(body)


def test_values_are_those_of_whole_logits_for_everyone_who_reads_them():
    def body(logits, whole, group):
        assert torch.equal(logits.detach(), whole)
        assert logits.tolist() == whole.tolist()
        assert (logits.detach().numpy() == whole.numpy()).all()
        assert repr(logits) == repr(whole_logits(logits))
        assert torch.equal(torch.as_tensor(logits).detach(), whole)
        assert torch.equal(copy.deepcopy(logits.detach()), whole)
        assert logits.data_ptr() == whole_logits(logits).data_ptr()
        assert type(logits + 1) is Tensor
        assert num_gathers(group) == 1

    on_two_ranks(body)


def test_logits_have_no_memory_that_could_be_read():
    def body(logits, whole, group):
        with torch._C.DisableTorchFunctionSubclass():
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                logits.data_ptr()
            # What autograd and others call without asking the class has the values all the same.
            assert torch.equal(logits.detach() * 1, whole)
            with pytest.raises(TaskError, match="changes logits in place"), torch.no_grad():
                logits.add_(1)
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            to_dlpack(logits)

    on_two_ranks(body)


GRADIENTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "retain_grad": lambda loss, logits: logits.retain_grad(),
    "register_hook": lambda loss, logits: logits.register_hook(print),
    "grad of": lambda loss, logits: logits.grad,
    "autograd.grad": lambda loss, logits: torch.autograd.grad(loss, [logits], allow_unused=True),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_whole_logits_cannot_be_asked_for_after_a_loss_of_split_ones(name):
    def body(logits, whole, group):
        loss = cross_entropy(logits[:, 1:], torch.zeros(3, 6).long()).sum()
        with pytest.raises(TaskError, match=f"{name} .*which was computed of each tensor rank's part"):
            GRADIENTS[name](loss, logits)

    on_two_ranks(body)


def test_a_gradient_that_is_retained_before_the_loss_is_that_of_whole_logits():
    def body(logits, whole, group):
        logits.retain_grad()
        cross_entropy(logits.float(), torch.zeros(3, 7).long()).sum().backward()
        leaf = whole.clone().requires_grad_()
        cross_entropy(leaf.float(), torch.zeros(3, 7).long()).sum().backward()
        assert torch.equal(logits.grad, leaf.grad)

    on_two_ranks(body)


def test_logits_that_were_changed_in_place_cannot_go_back_to_the_head():
    def body(logits, whole, group):
        double = logits * 2
        double.mul_(3)
        assert torch.equal(double.detach(), whole * 2 * 3)
        with pytest.raises(TaskError, match="changed in place"):
            Exp.apply(double).sum().backward()

    on_two_ranks(body)


def test_without_gradients_logits_are_gathered_at_once():
    whole, _ = draw(CLASSES)

    def body(comm):
        local, vocabulary, group = split(comm, whole)
        with torch.no_grad():
            assert type(split_logits(local, vocabulary)) is Tensor
        assert type(split_logits(local.detach(), vocabulary)) is Tensor
        assert num_gathers(group) == 2
        logits = split_logits(local * 1.0, vocabulary)
        with torch.no_grad():
            assert torch.equal(logits[:, 1:].argmax(-1), whole[:, 1:].argmax(-1))
        # The whole logits still have a graph.
        assert logits.exp().requires_grad

    threads.run(2, body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_copy_of_the_local_logits_is_kept(dtype):
    """Half precision is not copied to float32 either."""
    whole = draw(1024, dtype)[0]

    def body(comm):
        local, vocabulary, _ = split(comm, whole)
        made = local * 1.0
        reference = weakref.ref(made)
        logits = split_logits(made, vocabulary)
        del made
        with recording_saved() as saved:
            wide = logits.float() if dtype != torch.float64 else logits
            loss = F.cross_entropy(wide.view(-1, 1024), torch.arange(21))
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        del logits, wide
        assert reference() is None
        return saved.num_bytes / local.nbytes

    assert max(threads.run(2, body)) <= 1.1


@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_of_half_precision_has_the_dtype_of_torchs(autocast):
    whole, targets = draw(CLASSES, torch.bfloat16)

    def body(comm):
        local, vocabulary, group = split(comm, whole)
        logits = split_logits(local * 1.0, vocabulary)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            wide = F.cross_entropy(logits[:, :-1].float().view(-1, CLASSES), targets[:, :-1].flatten())
        assert num_gathers(group) == 0
        assert loss.dtype == expected.dtype
        assert wide.dtype == torch.float32
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-2, atol=0)

    threads.run(2, body)


GATHERS: dict[str, list[Callable[[Any, Tensor], Any]]] = {
    "before the loss": [lambda logits, targets: str(logits), lambda logits, targets: cross_entropy(logits, targets)],
    "in place of the loss": [
        lambda logits, targets: logits.exp().sum().backward(),
        lambda logits, targets: cross_entropy(logits, targets).sum().backward(),
    ],
    "after the loss": [
        lambda logits, targets: (cross_entropy(logits, targets), logits.argmax(-1)),
        lambda logits, targets: cross_entropy(logits, targets).sum().backward(),
    ],
}


@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("when", GATHERS)
def test_a_rank_that_gathers_alone_ends_all_of_them(when, transport):
    whole, targets = draw(CLASSES)

    def body(comm):
        local, vocabulary, group = split(comm, whole, transport)
        logits = split_logits(local * 1.0, vocabulary)

        def use() -> None:
            GATHERS[when][comm.rank](logits, targets)
            group.all_reduce(torch.ones(3))  # as the layers before the head, in backward

        with pytest.raises(DivergenceError) as caught:
            use()
        return str(caught.value)

    other = "the backward" if when == "after the loss" else "the cross entropy"
    gloo = f"rank 0 is at the whole logits; rank 1 is at {other} of logits that are split by vocabulary"
    for message in threads.run(2, body):
        assert ("rank 0: all-gather of" if transport == "shared" else gloo) in message
