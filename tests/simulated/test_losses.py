"""Laws of scalar losses: however a batch is split, they train as in one process, or are refused."""

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.feed.source import TensorSource
from fourfold.model.torch_losses import COUNT_FUNCTIONS, _safe_mean, observing
from fourfold.orders.sample_order import shard_range
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from fourfold.trainer.evaluate import evaluate
from fourfold.words.errors import TaskError, TrainingError
from fourfold.words.task import Data, Task
from tests.cases import SEED_LOCK

SAMPLES, FEATURES, CLASSES, LENGTH = 13, 6, 5, 4
WIDE = torch.float64
SPLITS = [(2, 1, 0), (1, 3, 0), (2, 3, 0), (3, 2, 2), (3, 5, 1)]  # dp, microbatches, zero
sgd = functools.partial(torch.optim.SGD, lr=0.1)
weights = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.25], dtype=WIDE)
own_weight = nn.Parameter(torch.ones(1))


class Net(nn.Module):
    """Class scores for each token [samples, tokens, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def net() -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(2)
        return Net().double()


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    """Three batches. Half of the targets are ignored in the first, fewer later; all targets of four samples always."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for number in range(3):
        inputs = torch.randn(SAMPLES, LENGTH, FEATURES, generator=generator, dtype=WIDE)
        targets = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
        targets[torch.rand(SAMPLES, LENGTH, generator=generator) < 0.5 / (1 + number)] = -100
        targets[[2, 5, 6, 9]] = -100
        found.append((inputs, targets))
    return found


def flat(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.flatten(0, 1), targets.flatten()


def ones(targets: Tensor) -> Tensor:
    """Each target as probabilities: 0.8 for its class, the remainder for the other classes."""
    return F.one_hot(targets.clamp(min=0), CLASSES).to(WIDE) * 0.75 + 0.05


def kept(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs[targets >= 0], targets[targets >= 0]


def signs(targets: Tensor) -> Tensor:
    return torch.where(targets % 2 == 0, 1.0, -1.0).to(WIDE)


def three(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return outputs, outputs.roll(1, -1).tanh(), outputs.roll(2, -1).exp()


ce, bce = F.cross_entropy, F.binary_cross_entropy_with_logits
EXACT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "ignoring": lambda o, y: ce(*flat(o, y)),
    "a module": lambda o, y: nn.CrossEntropyLoss()(*flat(o, y)),
    "by dims": lambda o, y: ce(o.transpose(1, 2), y),
    "smoothed": lambda o, y: ce(*flat(o, y), label_smoothing=0.1),
    "weighted": lambda o, y: ce(*flat(o, y), weight=weights),
    "weighted, smoothed": lambda o, y: ce(*flat(o, y), weight=weights, label_smoothing=0.2),
    "ignoring another": lambda o, y: ce(*flat(o, y.where(y >= 0, 3)), ignore_index=3),
    "soft": lambda o, y: ce(o.flatten(0, 1), ones(y).flatten(0, 1)),
    "soft, weighted": lambda o, y: ce(o.flatten(0, 1), ones(y).flatten(0, 1), weight=weights, label_smoothing=0.1),
    "half": lambda o, y: 0.5 * ce(*flat(o, y)),
    "log of": lambda o, y: F.nll_loss(o.flatten(0, 1).log_softmax(-1), y.flatten(), weights),
    "shape [1]": lambda o, y: ce(*flat(o, y))[None],
    "by size_average": lambda o, y: ce(*flat(o, y), size_average=True),
    "plus an unused mean": lambda o, y: ce(*flat(o, y)) + 0 * F.mse_loss(o.detach(), o.detach() + 1),
    "two of one count": lambda o, y: ce(*flat(o, y)) + 0.1 * F.l1_loss(kept(o, y)[0], ones(kept(o, y)[1])),
    "mse of some": lambda o, y: F.mse_loss(kept(o, y)[0], ones(kept(o, y)[1])),
    "mse": lambda o, y: F.mse_loss(o, ones(y)),
    "mse, weighted": lambda o, y: F.mse_loss(o, ones(y), weight=ones(y).square()),  # type: ignore[call-arg]
    "l1, weighted": lambda o, y: F.l1_loss(o, 3 * ones(y), weight=ones(y).square()),  # type: ignore[call-arg]
    "smooth l1": lambda o, y: F.smooth_l1_loss(o, ones(y)),
    "huber": lambda o, y: F.huber_loss(o, ones(y), delta=0.3),
    "bce": lambda o, y: F.binary_cross_entropy(o.sigmoid(), ones(y)),
    "bce of logits": lambda o, y: bce(o, ones(y), pos_weight=weights),
    "kl": lambda o, y: F.kl_div(o.log_softmax(-1), ones(y), reduction="batchmean"),
    "kl, mean": lambda o, y: F.kl_div(o.log_softmax(-1), ones(y)),
    "poisson": lambda o, y: F.poisson_nll_loss(o, ones(y)),
    "gaussian": lambda o, y: F.gaussian_nll_loss(o, ones(y), o.exp()),
    "hinge": lambda o, y: F.hinge_embedding_loss(o.exp(), signs(y)[..., None].expand_as(o)),
    "soft margin": lambda o, y: F.soft_margin_loss(o, signs(y)[..., None].expand_as(o)),
    "multi margin": lambda o, y: F.multi_margin_loss(kept(o, y)[0], kept(o, y)[1]) if (y >= 0).any() else 0 * o.sum(),
    "multilabel": lambda o, y: F.multilabel_soft_margin_loss(o.flatten(0, 1), ones(y).flatten(0, 1).round()),
    "ranking": lambda o, y: F.margin_ranking_loss(o[..., 0], o[..., 1], signs(y)),
    "cosine": lambda o, y: F.cosine_embedding_loss(o.flatten(0, 1), ones(y).flatten(0, 1), signs(y).flatten()),
    "triplet": lambda o, y: F.triplet_margin_loss(*three(o)),
    "by hand": lambda o, y: (o - ones(y)).square().mean(),
    "by sample": lambda o, y: (o - ones(y)).square().sum() / len(o),
}


def with_penalty(model: nn.Module, o: Tensor, y: Tensor) -> Tensor:
    return ce(*flat(o, y)) + 0.01 * sum(p.square().sum() for p in model.parameters())


def contrastive(o: Tensor, y: Tensor) -> Tensor:
    rows = F.normalize(o.flatten(1))
    return ce(rows @ rows.detach().roll(1, 1).T / 0.1, torch.arange(len(rows)))


REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda o, y: ce(*flat(o, y), reduction="sum"),
    "sum by hand": lambda o, y: (o - ones(y)).square().sum(),
    "sum of shape [1]": lambda o, y: (o - ones(y)).square().sum()[None],
    "contrastive": contrastive,
    "variance of the batch": lambda o, y: (o - o.mean(0)).square().mean(),
    "normalized by the batch": lambda o, y: F.mse_loss((o - o.mean(0)) / (o.std(0, correction=0) + 1), ones(y)),
    "normalized by the batch, of two at least": lambda o, y: ((o - o.mean(0)) / o.std(0) * ones(y)).square().mean(),
    "root": lambda o, y: F.mse_loss(o, ones(y)).sqrt(),
    "largest": lambda o, y: (o - ones(y)).square().amax(),
    "masked by hand": lambda o, y: ((o - ones(y)).square().sum(-1) * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1),
    "two counts": lambda o, y: ce(*flat(o, y)) + F.mse_loss(o, ones(y)),
    "sum, divided by hand": lambda o, y: ce(*flat(o, y), reduction="sum") / (y != -100).sum(),
    "sum, divided by a root of the count": lambda o, y: ce(*flat(o, y), reduction="sum") / (y != -100).sum() ** 0.5,
}


def part(batch: tuple[Tensor, Tensor], size: int, index: int) -> tuple[Tensor, Tensor]:
    start, stop = shard_range(0, len(batch[1]), size, index)
    return batch[0][start:stop], batch[1][start:stop]


def trained(comm: Any, loss: Any, split: tuple[int, int, int], given: Sequence[Any], **options: Any) -> TrainingResult:
    dp, microbatches, zero = split
    model, plan = net(), Plan(dp=dp, microbatches=microbatches, zero=zero, **options)
    loss = functools.partial(loss, model) if loss is with_penalty else loss
    step = TrainStep(model, loss, sgd, plan=plan, communicator=comm, clip=None)
    metrics = [step(part(batch, dp, step.dp_index)) for batch in given]
    step.flush()
    return oracle.snapshot(step, [m.loss for m in metrics], [])


def train_in_one_process(loss: Any, given: Sequence[Any]) -> TrainingResult:
    """Training in plain torch on the loss of the whole batch, as the user's function returns it."""
    model = net()
    loss = functools.partial(loss, model) if loss is with_penalty else loss
    optimizer, losses = sgd(model.parameters()), []
    for inputs, targets in given:
        value = loss(model(inputs), targets).sum()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return TrainingResult(losses, [], {name: p.detach() for name, p in model.named_parameters()})


def in_turn(names: Iterable[str], values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Each name with two of the values, in turn: the full grid would test no more."""
    return [(name, values[(row + shift) % len(values)]) for row, name in enumerate(names) for shift in (0, 2)]


@pytest.mark.parametrize(("name", "split"), in_turn([*EXACT, "with a penalty"], SPLITS))
def test_a_mean_is_trained_as_in_one_process_however_the_batch_is_split(name, split):
    loss, given = EXACT.get(name, with_penalty), batches()
    expected = train_in_one_process(loss, given)
    assert all(map(math.isfinite, expected.losses))
    got = threads.run(split[0], lambda comm: trained(comm, loss, split, given))
    assert max(oracle.deviation(each, expected) for each in got) <= TOLERANCE


@pytest.mark.parametrize(("name", "split"), in_turn(REFUSED, [(2, 1, 0), (1, 3, 0), (3, 2, 2)]))
def test_a_scalar_loss_that_is_not_a_mean_is_refused_on_every_rank_before_a_weight_changes(name, split):
    def body(comm):
        model = net()
        before = [p.clone() for p in model.parameters()]
        plan = Plan(dp=split[0], microbatches=split[1], zero=split[2])
        step = TrainStep(model, REFUSED[name], sgd, plan=plan, communicator=comm, clip=None)
        with pytest.raises(TaskError, match=r"a loss that is one number|a scalar loss") as caught:
            step(part(batches()[0], split[0], step.dp_index))
        assert "try return (sum, count), or unreduced values" in str(caught.value)
        return all(map(torch.equal, before, model.parameters()))

    assert all(threads.run(split[0], body))


def test_a_small_deviation_is_reported_with_digits_that_differ():
    def slightly(o, y):
        return F.mse_loss(o, ones(y)) + 1e-6 * o.mean(0).square().sum()

    def body(comm):
        step = TrainStep(net(), slightly, sgd, plan=Plan(microbatches=2), communicator=comm, clip=None)
        with pytest.raises(TaskError) as caught:
            step(batches()[0])
        whole, mean = re.findall(r"(0\.\d+) (?:for|as)", str(caught.value))
        return whole != mean

    assert threads.run(1, body) == [True]


@pytest.mark.parametrize("name", REFUSED)
def test_no_loss_is_refused_if_the_batch_is_not_split(name):
    (got,) = threads.run(1, lambda comm: trained(comm, REFUSED[name], (1, 1, 0), batches()))
    assert oracle.deviation(got, train_in_one_process(REFUSED[name], batches())) <= TOLERANCE


def wide(dtype: torch.dtype, given: Sequence[Any]) -> list[Any]:
    return [(inputs.to(dtype), targets) for inputs, targets in given]


DTYPES, SCALES = [torch.float32, torch.bfloat16, torch.float16], [1e-3, 1.0, 30.0]
ROUNDED = ["ignoring", "smoothed", "mse of some", "by hand", "with a penalty"]


@pytest.mark.parametrize(
    ("name", "scale", "dtype"),  # all pairs
    [(name, scale, DTYPES[(i + j) % 3]) for i, name in enumerate(ROUNDED) for j, scale in enumerate(SCALES)],
)
def test_no_loss_is_refused_for_rounding_alone(name, scale, dtype):
    def body(comm):
        model = net().to(dtype)
        with torch.no_grad():
            model.get_parameter("second.weight").mul_(scale)
        loss = EXACT.get(name) or functools.partial(with_penalty, model)
        step = TrainStep(model, loss, sgd, plan=Plan(dp=2, microbatches=2), communicator=comm, clip=None)
        step.dry_run(part(wide(dtype, batches())[0], 2, step.dp_index), training=True)

    threads.run(2, body)


def test_a_loss_near_zero_is_not_refused_for_its_rounding():
    def certain(o, y):
        return ce(40 * ones(y).flatten(0, 1) + 0 * o.flatten(0, 1), y.clamp(min=0).flatten())

    def body(comm):
        step = TrainStep(net().float(), certain, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        return step(part(wide(torch.float32, batches())[0], 2, step.dp_index)).loss

    assert max(threads.run(2, body)) < 1e-6


@pytest.mark.parametrize("split", SPLITS)
def test_counts_that_differ_in_a_later_batch_are_refused_before_a_weight_changes(split):
    inputs, targets = batches()[0]
    given = [(inputs, targets.clamp(min=0)), (inputs, targets)]

    def body(comm):
        plan = Plan(dp=split[0], microbatches=split[1], zero=split[2])
        step = TrainStep(net(), REFUSED["two counts"], sgd, plan=plan, communicator=comm, clip=None)
        step(part(given[0], split[0], step.dp_index))
        before = {name: weight.clone() for name, weight in step.named_weights()}
        with pytest.raises(TaskError, match=r"means over different elements \(cross_entropy, mse_loss\)"):
            step(part(given[1], split[0], step.dp_index))
        return all(torch.equal(weight, before[name]) for name, weight in step.named_weights())

    assert all(threads.run(split[0], body))


@pytest.mark.parametrize("dp", [1, 3])
def test_a_global_batch_without_a_loss_element_is_refused(dp):
    inputs, targets = batches()[0]
    nothing = inputs, torch.full_like(targets, -100)

    def body(comm):
        step = TrainStep(net(), EXACT["ignoring"], sgd, plan=Plan(dp=dp, microbatches=2), communicator=comm, clip=None)
        match = r"step 1: a global batch without a loss element: all targets are ignored, .* no samples   need"
        with pytest.raises(TrainingError, match=match) as raised:
            step(part(nothing, dp, step.dp_index))
        assert "skip_nan" in str(raised.value)

    threads.run(dp, body)


@pytest.mark.parametrize(
    ("position", "split", "update"),  # all pairs
    [
        ((i + j) % 2, split, update)
        for i, split in enumerate(SPLITS)
        for j, update in enumerate(["after", "in_backward", "in_forward"])
    ],
)
def test_a_batch_whose_targets_are_all_ignored_can_be_skipped(position, split, update):
    given = batches()
    empty = given[position][0], torch.full_like(given[position][1], -100)

    def body(comm):
        plan = Plan(dp=split[0], microbatches=split[1], zero=split[2], update=update)
        step = TrainStep(net(), EXACT["ignoring"], sgd, plan=plan, communicator=comm, clip=None, skip_nan=1)
        metrics = [
            step(part(batch, split[0], step.dp_index)) for batch in (*given[:position], empty, *given[position:])
        ]
        skipped_step = metrics.pop(position)
        assert skipped_step.skipped is not None
        assert math.isnan(skipped_step.loss)
        step.flush()
        return oracle.snapshot(step, [m.loss for m in metrics], [])

    expected = train_in_one_process(EXACT["ignoring"], given)
    assert max(oracle.deviation(got, expected) for got in threads.run(split[0], body)) <= TOLERANCE


def test_a_first_batch_whose_targets_are_all_ignored_sets_no_nominal_count():
    inputs, targets = batches()[0]
    given = [(inputs.float(), torch.full_like(targets, -100)), (inputs.float(), targets)]

    def body(comm):
        options = {"plan": Plan(precision="fp16"), "communicator": comm, "clip": None, "skip_nan": 1}
        step = TrainStep(net().float(), EXACT["ignoring"], sgd, **options)
        return [step(batch).overflowed for batch in given]

    # The sum of the gradients overflows float16, their mean does not.
    assert threads.run(1, body) == [[False, False]]


@pytest.mark.parametrize("name", ["ignoring", "weighted", "mse of some", "shape [1]", "plus an unused mean"])
def test_an_evaluation_weights_the_parts_as_a_step_does(name):
    loss, (inputs, targets) = EXACT[name], batches()[0]
    with torch.no_grad():
        expected = loss(net()(inputs), targets).item()

    def body(comm):
        step = TrainStep(net(), loss, sgd, plan=Plan(dp=3), communicator=comm, clip=None)
        return step.evaluate(part((inputs, targets), 3, step.dp_index)).loss

    assert threads.run(3, body) == [pytest.approx(expected, rel=1e-12)] * 3


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("name", ["ignoring", "weighted", "by hand"])
def test_the_loss_of_a_source_equals_that_of_one_batch_with_all_samples(name, dp):
    source = TensorSource(*batches()[0])
    task = Task(model=net, loss=EXACT[name], data=lambda: Data(train=source), optimizer=sgd)
    with torch.no_grad():
        expected = EXACT[name](net()(source.inputs), source.targets).item()

    def body(comm):
        step = TrainStep(net(), task.loss, sgd, plan=Plan(dp=dp), communicator=comm, clip=None)
        return evaluate(step, task, source, 4).metrics["loss"]

    assert threads.run(dp, body) == [pytest.approx(expected, rel=1e-12)] * dp


def test_the_mean_without_device_synchronization_equals_torchs_own():
    generator = torch.Generator().manual_seed(6)
    outputs, targets = torch.randn(12, CLASSES, generator=generator, dtype=WIDE), batches()[0][1][:3].flatten()
    smoothed: dict[str, Any] = {"label_smoothing": 0.1}
    for options in ({}, {"weight": weights}, smoothed, {"weight": weights, **smoothed}):
        ours, theirs = (outputs.clone().requires_grad_() for _ in range(2))
        with observing() as calls:
            expected = ce(theirs, targets, **options)  # type: ignore[arg-type]
        given = {"input": ours, "target": targets, "reduction": "mean", **options}
        got = _safe_mean(F.cross_entropy, given, torch.tensor(calls[0].count, dtype=WIDE))
        for value in (got, expected):
            value.backward()
        assert torch.allclose(got, expected, rtol=1e-12)
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12)
        given["target"] = torch.full_like(targets, -100)
        (gradient,) = torch.autograd.grad(_safe_mean(F.cross_entropy, given, torch.tensor(0.0, dtype=WIDE)), ours)
        assert not gradient.any()


WRONG = (
    *(torch.rand(4), torch.rand(3), torch.tensor(1.0), torch.rand(4, 5, 6), torch.randint(0, 5, (3,))),
    *(torch.full((4,), 7), torch.zeros(4, dtype=torch.bool), None, 3, "a"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", COUNT_FUNCTIONS, ids=lambda function: function.__name__)
def test_of_wrong_arguments_torch_says_what_it_says_without_us(function: Callable[..., Any]) -> None:
    scores, parameters = torch.randn(4, 5, requires_grad=True), inspect.signature(function).parameters
    num_others = sum(each.default is each.empty for each in parameters.values()) - 1
    calls = [((scores, *others), {}) for others in itertools.product([scores, *WRONG], repeat=min(num_others, 2))]
    calls += [((scores,) * (len(parameters) + 1), {}), ((scores, scores), {"input": scores}), ((scores,), {"no": 1})]
    for args, kwargs in calls:
        with observing():
            found = error_of(function, *args, **kwargs)
        assert found == error_of(function, *args, **kwargs), args


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
