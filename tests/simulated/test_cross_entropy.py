"""Cross entropy: losses and gradients are torch's, and one copy of the logits is kept."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fourfold as ff
from fourfold.axes.tensor.work import cross_entropy as module
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.saved_tensors import recording_saved
from fourfold.words.errors import TaskError
from tests import cases

cross_entropy = ff.losses.cross_entropy
# Of losses around 10 and gradients up to 1, against float64.
TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-6),
    torch.bfloat16: (1e-5, 2e-2),
    torch.float16: (1e-5, 2e-3),
}


def draw(shape: tuple[int, ...], classes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(*shape, classes, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(classes, shape, generator=generator)


def of_torch(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    flat = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none", **options)
    return flat.view(targets.shape)


def deviations(logits: Tensor, targets: Tensor, **options: Any) -> tuple[float, float]:
    """The largest of the losses and of the gradients, from torch's in float64."""
    wide = logits.detach().double().requires_grad_()
    losses, expected = cross_entropy(logits, targets, **options), of_torch(wide, targets, **options)
    assert losses.shape == targets.shape
    assert losses.dtype == torch.promote_types(logits.dtype, torch.float32)
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    grads = [torch.autograd.grad((each * weights).sum(), of)[0] for each, of in ((losses, logits), (expected, wide))]
    assert grads[0].dtype == logits.dtype
    return largest(losses - expected), largest(grads[0] - grads[1])


def largest(difference: Tensor) -> float:
    return difference.detach().abs().max().item() if difference.numel() else 0.0


@pytest.mark.parametrize("block", [1, 100, 1 << 17])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_losses_and_gradients_are_torchs(dtype, block, monkeypatch):
    monkeypatch.setattr(module, "CPU_BLOCK", block)
    for options in ({}, {"ignore_index": 3}, {"label_smoothing": 0.1}, {"ignore_index": 3, "label_smoothing": 1.0}):
        logits, targets = draw((5, 7), 41, dtype)
        found = deviations(logits, targets, **options)
        assert all(a <= b for a, b in zip(found, TOLERANCES[dtype], strict=True)), (options, found)


@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    classes=st.integers(1, 70),
    smoothing=st.floats(0, 1),
    ignored=st.integers(-2, 70),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]),
)
def test_any_shape_and_any_integers_are_taken(shape, classes, smoothing, ignored, dtype):
    logits, targets = draw(shape, classes)
    options = {"ignore_index": ignored, "label_smoothing": smoothing}
    losses = cross_entropy(logits, targets.to(dtype), **options)
    expected = of_torch(logits, targets, **options)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    assert max(deviations(logits, targets, **options)) <= 1e-12


def test_one_row_and_logits_that_are_not_contiguous_are_taken():
    logits, targets = draw((6, 5), 9)
    expected = of_torch(logits, targets)
    torch.testing.assert_close(cross_entropy(logits.mT.contiguous().mT, targets), expected)
    torch.testing.assert_close(cross_entropy(logits[:, ::2], targets[:, ::2]), expected[:, ::2])
    torch.testing.assert_close(cross_entropy(logits[0, 0], targets[0, 0]), expected[0, 0])


def test_extreme_logits_give_what_torch_gives():
    inf = float("inf")
    rows = [[0.0, -inf, 3.0], [-inf, 0.0, 1.0], [800.0, -800.0, 0.0], [1e-30, 0.0, 0.0], [-inf, -inf, 0.0]]
    logits, targets = torch.tensor(rows, dtype=torch.float64).requires_grad_(), torch.tensor([0, 0, 1, 2, 2])
    losses, expected = cross_entropy(logits, targets), of_torch(logits, targets)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    finite = expected.isfinite()
    grads = [torch.autograd.grad(each[finite].sum(), logits)[0] for each in (losses, expected)]
    torch.testing.assert_close(grads[0][finite], grads[1][finite], rtol=0, atol=1e-12)


def test_small_probabilities_and_those_near_one_have_gradients_in_half_precision():
    logits = torch.tensor([[0.0, -9.0, -20.0]], dtype=torch.float16).requires_grad_()
    (grad,) = torch.autograd.grad(1024 * cross_entropy(logits, torch.tensor([0])).sum(), logits)
    wide = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(1024 * of_torch(wide, torch.tensor([0])).sum(), wide)
    torch.testing.assert_close(grad.double(), expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_one_copy_of_the_logits_is_kept_and_its_memory_becomes_the_gradient(dtype):
    logits, targets = draw((64,), 256, dtype)
    with recording_saved() as saved:
        losses = cross_entropy(logits, targets)
    assert saved.num_bytes <= 1.1 * logits.nbytes
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert grad.untyped_storage().data_ptr() in saved
    with torch.autograd.graph.saved_tensors_hooks(lambda _: pytest.fail("kept"), lambda tensor: tensor):
        cross_entropy(logits.detach(), targets)


def test_a_graph_that_is_kept_gives_the_same_gradient_again():
    logits, targets = draw((5,), 9)
    total = cross_entropy(logits, targets).sum()
    first, second, third = (torch.autograd.grad(total, logits, retain_graph=keep)[0] for keep in (True, True, False))
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_a_second_derivative_is_refused():
    logits, targets = draw((5,), 9)
    for power in (1, 2):
        total = cross_entropy(logits, targets).pow(power).sum()
        (grad,) = torch.autograd.grad(total, logits, create_graph=True)
        with pytest.raises(TaskError, match="a second derivative of cross_entropy"):
            torch.autograd.grad(grad.square().sum() + logits.square().sum(), logits)


def test_compiled_and_transformed_code_gets_torchs_operations():
    logits, targets = draw((5,), 9)
    expected = of_torch(logits, targets)
    compiled = torch.compile(cross_entropy, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, targets), expected)
    torch.testing.assert_close(torch.func.vmap(cross_entropy)(logits, targets), expected)


@pytest.mark.parametrize(("logits", "targets", "options", "message"), [
    (torch.zeros(4, 9), torch.tensor([0, 9, -1, -100]), {}, r"2 of 4 targets that are not classes: -1 to 9 .* 0 to 8"),
    (torch.zeros(2, 9), torch.tensor([-100, 1]), {"ignore_index": 1}, "1 of 2 targets that are not classes: -100"),
    (torch.zeros(2, 9, 4), torch.zeros(2, 4).long(), {}, r"logits \[2, 9, 4\] and targets \[2, 4\].*movedim"),
    (torch.zeros(2, 0), torch.zeros(2).long(), {}, r"logits \[2, 0\]"),
    (torch.tensor(0.0), torch.tensor(0), {}, r"logits \[\]"),
    (torch.zeros(2, 9), torch.zeros(2, 9), {}, "targets of torch.float32"),
    (torch.zeros(2, 9).long(), torch.zeros(2).long(), {}, "logits of torch.int64"),
    (torch.zeros(2, 9), torch.zeros(2).long(), {"label_smoothing": 1.5}, "label_smoothing = 1.5"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(logits, targets, options, message):
    with pytest.raises(TaskError, match=message):
        cross_entropy(logits, targets, **options)


LOSSES = {
    "unreduced": lm.loss,
    "mean": lambda logits, targets: cross_entropy(logits, targets).mean(),
    "ignoring": lambda logits, targets: cross_entropy(logits, targets, ignore_index=3),
    "pair": lambda logits, targets: (cross_entropy(logits, targets).sum(), targets.numel()),
}


def tiny() -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(2)
        return lm.LanguageModel(width=16, layers=1, heads=2, kv_heads=2).double()


@pytest.mark.covering
@pytest.mark.parametrize("fields", [{"dp": 2}, {"cp": 2}, {"microbatches": 2}], ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_of_the_users_made_with_it_trains_as_on_one_device(kind, fields):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(256, (2, 4, 8), generator=generator)
    batch = ({"tokens": tokens[0], "positions": torch.arange(8).expand(4, 8)}, tokens[1] % 7)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    expected = oracle.train(tiny(), LOSSES[kind], optimizer, [batch])
    plan = Plan(**fields)

    def body(comm):
        step = TrainStep(tiny(), LOSSES[kind], optimizer, plan=plan, communicator=comm)
        loss = step(cases.local_batch(batch, plan.dp, step.dp_index)).loss
        weights = {name: weight.clone() for name, weight in step.named_weights()}
        assert max((weights[name] - each).abs().max() for name, each in expected.weights.items()) <= 1e-12
        return loss

    assert threads.run(plan.mesh.size, body) == pytest.approx([expected.losses[0]] * plan.mesh.size, abs=1e-9)


def test_with_a_mean_over_tokens_ignored_targets_are_seen_as_torchs_are():
    """A mean over all elements counts ignored targets too; with cp it is refused where ranks ignore unevenly."""
    tokens = torch.zeros(2, 8, dtype=torch.long)
    targets = tokens.clone()
    targets[:, :3] = 5
    batch = ({"tokens": tokens, "positions": torch.arange(8).expand(2, 8)}, targets)

    def loss(outputs, targets):
        return cross_entropy(outputs, targets, ignore_index=5).mean()

    def body(comm):
        step = TrainStep(tiny(), loss, torch.optim.SGD, plan=Plan(cp=2), communicator=comm)
        with pytest.raises(TaskError, match="targets with 5, which is ignored"):
            step(batch)

    threads.run(2, body)
