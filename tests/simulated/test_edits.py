"""Laws of weights that the user writes between steps: training continues from them, or they are refused."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.plan.plan import Plan
from fourfold.step.model_checks import check_plan_for_model, check_plan_on_ranks
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import DivergenceError, PlanError, TaskError, TrainingError
from tests import cases
from tests.cases import Case, batches, build_step, loss, model, optimizer
from tests.precision_oracle import batch_of_rank

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(batch_sizes=(8,) * 5, bucket_bytes=1500, optimizer="SGD")
OTHER = {name: torch.full_like(p, 0.02) for name, p in model("mlp").named_parameters()}


def load(net):
    net.load_state_dict(OTHER)


@torch.no_grad()
def clamp(net):
    for p in net.parameters():
        p.clamp_(-0.05, 0.05)


def clamp_data(net):
    for p in net.parameters():
        p.data.clamp_(-0.05, 0.05)


@torch.no_grad()
def halve(net):
    for p in net.parameters():
        p.mul_(0.5)


def head(net):
    nn.init.constant_(net.head.weight, 0.01)


EDITS = pytest.mark.parametrize("edit", [load, clamp, clamp_data, halve, head])


def make(case, comm, **options):
    net = cases.model(case.model) if case.precision == "keep" else cases.model(case.model).float()
    return TrainStep(
        net, loss(case), optimizer(case), plan=case.plan(comm.size), communicator=comm, clip=None, **options
    )


def train_with_edit(case, edit, *, how=None, options=None):
    """The weights of every rank after training with an edit after the second step."""

    def body(comm):
        step = make(case, comm, **(options or {}))
        for number, batch in enumerate(batches(case)):
            step(batch_of_rank(step, batch))
            if number == 1:
                (how or (lambda step: edit(step.model)))(step)
        return step.state_dict()["model"]

    return threads.run(2, body)


def plain_torch_with_edit(case, edit):
    """The same in one process, in plain torch."""
    net = cases.model(case.model)
    stepper = optimizer(case)(net.parameters())
    for number, (inputs, targets) in enumerate(batches(case)):
        stepper.zero_grad()
        loss(case)(net(inputs), targets).mean().backward()
        stepper.step()
        if number == 1:
            edit(net)
    return net.state_dict()


@pytest.mark.covering
@EDITS
@pytest.mark.parametrize("fields", [{"zero": 0}, {"zero": 1, "transport": "gloo"}, {"zero": 0, "unused": "allow"}])
def test_training_continues_from_an_edit_where_every_rank_holds_all_weights(fields, edit):
    case = dataclasses.replace(CASE, **fields)
    for got in train_with_edit(case, edit):
        for name, weight in plain_torch_with_edit(case, edit).items():
            torch.testing.assert_close(got[name], weight, rtol=1e-9, atol=1e-9)


REFUSED = [{"precision": precision, "zero": zero} for precision in ("bf16", "fp16") for zero in (0, 1, 2)]
REFUSED += [
    {"zero": 1},
    {"zero": 2},
    {"zero": 1, "update": "in_backward"},
    {"precision": "bf16", "reduce_dtype": "fp32"},
]


@pytest.mark.covering
@EDITS
@pytest.mark.parametrize("fields", REFUSED)
def test_an_edit_that_would_be_lost_or_applied_once_per_rank_is_refused(fields, edit):
    with pytest.raises(TaskError, match=r"written outside of step\.edit\(\) .*try with step\.edit\(\) as model"):
        train_with_edit(dataclasses.replace(CASE, **fields), edit)


@pytest.mark.parametrize("fields", [*REFUSED, {"zero": 3, "transport": "gloo"}, {"zero": 0}])
def test_training_continues_from_the_same_edit_within_step_edit(fields):
    def how(step):
        with step.edit() as net:
            halve(net)

    case = dataclasses.replace(CASE, **fields)
    for got in train_with_edit(case, halve, how=how):
        for name, weight in plain_torch_with_edit(case, halve).items():
            torch.testing.assert_close(got[name].double(), weight, rtol=0.02, atol=2e-3)


def test_an_edit_of_one_unsampled_element_is_found_in_the_first_steps():
    def poke(net):
        net.second.weight.data[3, 7] += 1.0

    with pytest.raises(TaskError, match=r"second\.weight, written outside"):
        train_with_edit(dataclasses.replace(CASE, precision="bf16"), poke)


def test_an_edit_of_one_unsampled_element_is_found_when_all_weights_are_checked():
    def body(comm):
        step = make(dataclasses.replace(CASE, precision="bf16"), comm, drift_check=6)
        for number in range(6):
            step(batch_of_rank(step, batches(CASE)[number % 5]))
        step.model.get_parameter("second.weight").data[3, 7] += 1.0
        with pytest.raises(TaskError, match=r"second\.weight, written outside"):
            step(batch_of_rank(step, batches(CASE)[0]))
        with pytest.raises(TaskError, match=r"second\.weight, written outside"):
            step.state_dict()

    threads.run(2, body)


def test_nonfinite_weights_are_not_taken_for_an_edit():
    def body(comm):
        step = make(dataclasses.replace(CASE, precision="bf16"), comm)
        step.load_weights({"scale": torch.tensor(float("nan"))})
        for _ in range(2):
            with pytest.raises(TrainingError, match="the loss is nan"):
                step(batch_of_rank(step, batches(CASE)[0]))

    threads.run(2, body)


@pytest.mark.parametrize("fields", [{"precision": "bf16"}, {"zero": 1}])
def test_an_edit_on_one_rank_is_reported_on_all(fields):
    def body(comm):
        step = make(dataclasses.replace(CASE, **fields), comm)
        step(batch_of_rank(step, batches(CASE)[0]))
        comm.all_gather_json(None)
        if comm.rank == 1:
            clamp(step.model)
        comm.all_gather_json(None)
        try:
            step(batch_of_rank(step, batches(CASE)[1]))
        except (TaskError, DivergenceError) as error:
            return str(error)

    for message in threads.run(2, body):
        assert "written" in message


def test_weights_written_by_a_later_forward_are_refused_with_master_weights():
    class ClampsLater(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.clamps = nn.Linear(4, 4), False

        def forward(self, x):
            if self.clamps:
                with torch.no_grad():
                    self.layer.weight.clamp_(-0.1, 0.1)
            return self.layer(x).float()

    def body(comm):
        make_sgd = functools.partial(torch.optim.SGD, lr=0.1)
        plan = Plan(dp=2, precision="bf16")
        model = ClampsLater()
        step = TrainStep(model, lambda out, _: out.square().mean(1), make_sgd, plan=plan, communicator=comm, clip=None)
        for number in range(3):
            model.clamps = number > 0  # the dry run of the first step sees nothing
            step((torch.full((2, 4), number + 1.0 + comm.rank), torch.zeros(2)))

    with pytest.raises(TaskError, match=r"layer\.weight, written outside"):
        threads.run(2, body)


def test_an_embedding_with_max_norm_is_refused_with_rounded_weights():
    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(4, 4, max_norm=1.0)

    check_plan_for_model(Embedding(), Plan(), clip=None)
    with pytest.raises(PlanError, match=r"max_norm at words"):
        check_plan_for_model(Embedding(), Plan(precision="bf16"), clip=None)


def test_sharded_weights_cannot_be_read_or_written_between_steps():
    def body(comm):
        step = make(dataclasses.replace(CASE, zero=3, transport="gloo"), comm)
        step(batch_of_rank(step, batches(CASE)[0]))
        uses = (lambda: clamp_data(step.model), lambda: halve(step.model), lambda: head(step.model))
        for use in (*uses, step.model.state_dict, lambda: step.model(batches(CASE)[0][0])):
            with pytest.raises(TrainingError, match=r"a weight used between steps.*try step\.unsharded\(\)"):
                use()
        with pytest.raises(RuntimeError, match="a weight used between steps"):  # torch's error contains ours
            load(step.model)
        with step.unsharded() as net:
            assert net(batches(CASE)[0][0]).isfinite().all()
        step(batch_of_rank(step, batches(CASE)[1]))
        return all(value.isfinite().all() for value in step.state_dict()["model"].values())

    assert all(threads.run(2, body))


LOCAL = dataclasses.replace(CASE, sync="local", local_steps=2, outer_lr=0.7, outer_momentum=0.9, optimizer="descent")


@EDITS
def test_local_sgd_continues_from_an_edit_after_averaging(edit):
    def in_block(step):
        with step.edit() as net:
            edit(net)

    case = dataclasses.replace(LOCAL, batch_sizes=(8,) * 4)
    for got, expected in zip(train_with_edit(case, edit), train_with_edit(case, edit, how=in_block), strict=True):
        for name, weight in expected.items():
            assert torch.equal(got[name], weight)


@pytest.mark.parametrize("edit", [clamp, clamp_data, halve])
def test_an_edit_between_averages_is_refused_with_an_outer_optimizer(edit):
    case = dataclasses.replace(LOCAL, local_steps=4, batch_sizes=(8,) * 4)
    with pytest.raises(TaskError, match=r"between two averages of the weights"):
        train_with_edit(case, edit)
    mean = dataclasses.replace(case, outer_lr=1.0, outer_momentum=0.0)
    one, two = train_with_edit(mean, edit)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_weights_loaded_between_averages_are_not_an_outer_step():
    case = dataclasses.replace(LOCAL, local_steps=4, batch_sizes=(8,) * 4)
    value = torch.tensor(0.25, dtype=torch.float64)

    def load_weights(step):
        step.load_weights({n: value if n == "scale" else p.detach().clone() for n, p in step.model.named_parameters()})

    def edit(step):
        with step.edit() as net:
            net.get_parameter("scale").copy_(value)

    def body(comm, how):
        step = make(case, comm)
        for number, batch in enumerate(batches(case)):
            if number == 3:
                how(step)
            step(batch_of_rank(step, batch))
        return step.state_dict()["model"]

    # With one rank, both ways give rank 0's weights.
    by_load, by_edit = (threads.run(1, functools.partial(body, how=how))[0] for how in (load_weights, edit))
    assert all(torch.equal(by_load[name], by_edit[name]) for name in by_edit)


@pytest.mark.parametrize("unused", ["error", "allow"])
def test_a_module_replaced_after_the_build_is_refused(unused):
    def body(comm):
        step = make(dataclasses.replace(CASE, unused=unused), comm)
        step(batch_of_rank(step, batches(CASE)[0]))
        step.model.head = nn.Linear(24, 10).double()
        step(batch_of_rank(step, batches(CASE)[1]))

    with pytest.raises(TaskError, match="other trainable parameters than when the step was built"):
        threads.run(2, body)


@pytest.mark.parametrize("precision", ["keep", "bf16"])
def test_a_model_rounded_by_an_earlier_step_is_refused(precision):
    def body(comm):
        step = make(dataclasses.replace(CASE, precision="bf16"), comm)
        step(batch_of_rank(step, batches(CASE)[0]))
        inner = nn.Sequential(step.model) if precision == "keep" else step.model
        plan = Plan(dp=2, precision=precision)
        with pytest.raises(
            PlanError, match=r"an earlier TrainStep has rounded.*try a new model, and model\.load_state"
        ):
            check_plan_on_ranks(inner, plan, comm)
        fresh = cases.model("mlp").float()
        fresh.load_state_dict(step.state_dict()["model"])
        check_plan_on_ranks(fresh, plan, comm)

    threads.run(2, body)


@pytest.mark.parametrize("fields", [{"zero": 0}, {"zero": 1}, {"precision": "bf16"}, {"zero": 3, "transport": "gloo"}])
def test_load_weights_refuses_other_names_and_shapes_on_every_rank(fields):
    wrong = {
        "nope": torch.ones(4),
        "second.weight": torch.ones(24),  # it would be broadcast over the rows
        "first.weight": torch.ones(16, 24),  # it would be reshaped
        "head.bias": [0.0] * 10,
        "scale": torch.tensor(1j),
    }

    def body(comm):
        step = make(dataclasses.replace(CASE, **fields), comm)
        before = step.state_dict()["model"]
        messages = []
        for name, value in wrong.items():
            with pytest.raises(TaskError, match=name) as caught:
                step.load_weights({name: value} if comm.rank else {"scale": torch.tensor(3.0)})
            messages.append(str(caught.value))
        no_dict: Any = torch.ones(3)
        with pytest.raises(TaskError, match="dict of tensors by name"):
            step.load_weights(no_dict)
        assert all(torch.equal(value, before[name]) for name, value in step.state_dict()["model"].items())
        return messages

    first, second = threads.run(2, body)
    assert first == second


@pytest.mark.parametrize(
    ("fields", "hosts"),
    [({"transport": "gloo"}, 1), ({"zero": 1}, 1), ({"zero": 1}, 2), ({"zero": 3, "transport": "gloo"}, 1)],
)
def test_after_an_edit_every_rank_has_the_weights_of_the_first(fields, hosts):
    case, size = dataclasses.replace(Case(), **fields), 2 * hosts

    def body(comm):
        step = build_step(case, size, comm)
        with step.edit() as edited:
            edited.get_parameter("first.weight").fill_(1.0 + comm.rank)
        return dict(step.named_weights())["first.weight"].clone()

    for weight in threads.run(size, body, hosts=hosts):
        assert torch.equal(weight, torch.ones_like(weight))
