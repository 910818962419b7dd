"""Laws of a train step as its user sees it: what it refuses, what it does not change, what it reports."""

import gc
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourfold.feed.feed import Feed
from fourfold.feed.source import TensorSource
from fourfold.launcher.traceback_text import format_error
from fourfold.model.loss_sum import sum_loss
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE, deviation
from fourfold.words.errors import OptimizerError, PlanError, TaskError, TrainingError
from tests.cases import LOSSES, Case, batches, build_step, local_batch, train_oracle, train_step


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def linear(comm, model=None, **options):
    """A step of a small float32 model; its loss is the sum of the outputs."""
    model = model or nn.Linear(2, 2)
    options = {"clip": None, "plan": Plan(dp=comm.size), "optimizer": sgd, **options}
    return TrainStep(model, lambda outputs, targets: outputs.sum(1), communicator=comm, **options)


BATCH = (torch.ones(2, 2), torch.zeros(2))


@pytest.mark.parametrize("update", ["after", "in_backward"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_backward_outside_the_step_changes_nothing(size, update):
    case = Case(batch_sizes=(8, 8, 8), update=update)

    def body(comm):
        step = build_step(case, size, comm)
        metrics = []
        for batch in batches(case):
            part = local_batch(batch, size, comm.rank)
            metrics.append(step(part))
            LOSSES["values"](step.model(part[0]) * 100, part[1]).mean().backward()  # stays in .grad
        weights = {name: p.detach().clone() for name, p in step.model.named_parameters()}
        return [m.loss for m in metrics], weights

    oracle = train_oracle(case)
    for losses, weights in threads.run(size, body):
        assert losses == pytest.approx(oracle.losses, abs=TOLERANCE)
        for name, weight in oracle.weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=TOLERANCE)


def test_a_step_after_a_failed_one_is_refused_and_names_the_cause():
    def body(comm):
        step = build_step(Case(model="unused"), 2, comm)
        batch = local_batch(batches(Case())[0], 2, comm.rank)
        with pytest.raises(TrainingError, match="got no gradient"):
            step(batch)
        with pytest.raises(TrainingError, match="after one that ended with TrainingError"):
            step(batch)

    threads.run(2, body)


def test_a_model_belongs_to_its_last_step_alone():
    def body(comm):
        model = nn.Linear(2, 2)
        first, second = linear(comm, model), linear(comm, model)
        second(BATCH)
        with pytest.raises(TaskError, match="weight and 1 more with another storage"):
            first(BATCH)

    threads.run(1, body)


def test_the_trainable_parameters_may_not_change_after_the_build():
    def body(comm):
        step = linear(comm)
        step.model.get_parameter("bias").requires_grad_(False)
        with pytest.raises(TaskError, match="other trainable parameters than when"):
            step(BATCH)
        step = linear(comm)
        step.model.add_module("more", nn.Linear(2, 2))
        with pytest.raises(TaskError, match="other trainable parameters than when"):
            step(BATCH)

    threads.run(1, body)


def exchange_members(optimizer):
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def exchange_groups(optimizer):
    optimizer.param_groups.reverse()


def replace_parameter(optimizer):
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize("change", [exchange_members, exchange_groups, replace_parameter])
def test_parameters_may_not_move_between_optimizer_groups(change):
    def two_groups(parameters):
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [bias]}], lr=1.0)

    def body(comm):
        step = linear(comm, optimizer=two_groups)
        step(BATCH)
        change(step.optimizer)
        with pytest.raises(OptimizerError, match="other parameters in the optimizer than at the build, or in other"):
            step(BATCH)

    threads.run(1, body)


@pytest.mark.parametrize("difference", ["order", "clip", "plan"])
def test_the_first_difference_between_ranks_is_reported(difference):
    class Two(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(2, 2))

    def body(comm):
        other = comm.rank == 1
        model = Two("ba" if other and difference == "order" else "ab")
        plan = Plan(dp=2, bucket_bytes=8 if other and difference == "plan" else 4096)
        linear(comm, model, plan=plan, clip=1.0 if other and difference == "clip" else None)

    with pytest.raises(PlanError, match=r"rank 0 has .*; rank 1 has"):
        threads.run(2, body)


def test_an_optimizer_of_other_parameters_is_refused():
    stranger = nn.Linear(2, 2)

    def body(comm):
        linear(comm, optimizer=lambda parameters: torch.optim.SGD([*parameters, stranger.weight], lr=1.0))

    with pytest.raises(OptimizerError, match="1 parameters that are not the model's"):
        threads.run(1, body)


def test_parameters_without_elements_are_allowed():
    def body(comm):
        model = nn.Linear(2, 2)
        model.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
        step = linear(comm, model)
        before = model.weight.detach().clone()
        step(local_batch((torch.ones(4, 2), torch.zeros(4)), 2, comm.rank))
        step.state_dict()
        return torch.allclose(model.weight, before - 1.0)

    assert threads.run(2, body) == [True, True]


def test_autograd_detects_weights_that_a_step_has_changed():
    def body(comm):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        step = linear(comm, model)
        stale: torch.Tensor = step.model(torch.ones(2, 2, requires_grad=True)).sum()
        step(BATCH)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    threads.run(1, body)


@pytest.mark.parametrize("zero", [0, 1])
def test_after_an_edit_every_rank_has_rank_0s_weights(zero):
    def body(comm):
        step = linear(comm, plan=Plan(dp=2, zero=zero))
        with step.edit() as model:
            model.get_parameter("weight").fill_(float(comm.rank + 1))
        return step.model.get_parameter("weight").flatten().tolist()

    assert threads.run(2, body) == [[1.0] * 4] * 2


@pytest.mark.parametrize("microbatches", [1, 2])
def test_metrics_count_the_global_batch(microbatches):
    case = Case(model="lm", batch_sizes=(5, 3), microbatches=microbatches)

    def body(comm):
        step = build_step(case, 2, comm)
        metrics = [step(local_batch(batch, 2, comm.rank)) for batch in batches(case)]
        checked = step.evaluate(local_batch(batches(case)[0], 2, comm.rank))
        return [(m.samples, m.tokens, m.targets, m.loss) for m in (*metrics, checked)]

    first, second = threads.run(2, body)
    assert first == second
    assert [row[:3] for row in first] == [(5, 80, 80), (3, 48, 48), (5, 80, 80)]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_two_byte_weights_are_updated_as_torch_does(kind):
    def make(parameters):
        return getattr(torch.optim, kind)(parameters, lr=0.05)

    def body(comm):
        torch.manual_seed(0)
        model = nn.Linear(24, 16).to(torch.bfloat16)
        theirs = nn.Linear(24, 16).to(torch.bfloat16)
        theirs.load_state_dict(model.state_dict())
        step, plain = linear(comm, model, optimizer=make), make(theirs.parameters())
        batch = (torch.randn(4, 24, dtype=torch.bfloat16), torch.zeros(4))
        for _ in range(3):
            step(batch)
            plain.zero_grad()
            theirs(batch[0]).sum(1).mean().backward()
            plain.step()
        return [(model.weight - theirs.weight).abs().max().item(), (model.bias - theirs.bias).abs().max().item()]

    (differences,) = threads.run(1, body)
    assert max(differences) <= 0.02  # a step of SGD is 0.05 here, and bfloat16 has 8 bits


def test_the_mean_of_many_float16_losses_does_not_overflow():
    weight = torch.ones((), dtype=torch.float16, requires_grad=True)
    loss = sum_loss(weight * 2, 70_000)
    (loss.total / loss.count).backward()
    assert (loss.total.item(), loss.count) == (140_000.0, 70_000.0)
    assert weight.grad is not None
    assert weight.grad.item() == 2.0


def test_the_deviation_from_the_oracle_of_another_training_is_large():
    # The laws in this folder prove nothing unless `deviation` can be large.
    case, other = Case(), Case(optimizer="SGD")

    def body(comm):
        return deviation(train_step(case, build_step(case, 2, comm)), train_oracle(other))

    assert min(threads.run(2, body)) > 1e-3


def test_an_unreferenced_step_frees_its_shared_memory():
    def files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def body(comm):
        train_step(Case(zero=1), build_step(Case(zero=1), 2, comm))

    threads.run(2, body)
    before = files()
    for _ in range(3):
        threads.run(2, body)
    assert files() <= before


FAILING = {
    "shape": (
        torch.ones(4, 3),
        torch.zeros(4).long(),
        "RuntimeError: mat1",
        "  in module 1, Linear(in_features=2, out",
    ),
    "dtype": (torch.ones(4, 2).double(), torch.zeros(4).long(), "RuntimeError: mat1", "  in module 1, Linear(in_f"),
    "class": (torch.ones(4, 2), torch.full((4,), 9), "IndexError: Target 9 is out", "  in the loss, cross_entropy"),
    "float": (torch.ones(4, 2), torch.zeros(4), "RuntimeError: expected target", "  in the loss, cross_entropy"),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_error_of_model_or_loss_is_told_in_lines_that_name_module_batch_and_samples(name):
    inputs, targets, message, where = FAILING[name]

    def body(comm):
        model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
        step = TrainStep(model, F.cross_entropy, sgd, plan=Plan(dp=2), communicator=comm, clip=None)
        feed = Feed.of_data_rank(TensorSource(inputs, targets), size=2, index=comm.rank, batch_size=4, shuffle=False)
        with pytest.raises((RuntimeError, IndexError)) as raised:
            step(next(iter(feed)))
        error = raised.value
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next  # without this test's own frame
        return format_error(error).splitlines()

    for rank, lines in enumerate(threads.run(2, body)):
        assert len(lines) == 5 + 3 * (name == "dtype")  # with a hint of what a model of another dtype needs
        assert lines[0].startswith(message)
        assert lines[-4].startswith(where)
        kind = str(inputs.dtype).removeprefix("torch.")
        assert lines[-3].startswith(f"  batch: inputs {kind} [2, {inputs.shape[1]}], targets ")
        assert lines[-2].startswith(f"  samples: {2 * rank}, {2 * rank + 1} (positions 0 to 4 of epoch 0")


class AddsNone(nn.Linear):
    def forward(self, input):
        return super().forward(input) + None  # type: ignore[operator]


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Embedding(3, 2), torch.ones(4).double()),
        (nn.Sequential(nn.Embedding(3, 2), AddsNone(2, 2)), torch.arange(3)),
    ],
)
def test_dtypes_of_weights_are_no_advice_for_indices_and_for_other_errors(model, inputs):
    def body(comm):
        with pytest.raises((RuntimeError, TypeError)) as raised:
            linear(comm, model)((inputs, torch.zeros(len(inputs), 2)))
        return raised.value.__notes__

    (notes,) = threads.run(1, body)
    assert not any("need" in note for note in notes)


def test_an_error_in_backward_says_so_and_names_the_batch():
    class Written(nn.Linear):
        def forward(self, input):
            return super().forward(input).exp().add_(1)

    def body(comm):
        with pytest.raises(RuntimeError, match="inplace operation") as raised:
            linear(comm, Written(2, 2))(BATCH)
        return raised.value.__notes__

    (notes,) = threads.run(1, body)
    assert notes == ["  in backward", "  batch: inputs float32 [2, 2], targets float32 [2]"]
