"""Laws of update = "in_forward": a bucket is updated just before its next use."""

import copy
import dataclasses
import functools
import gc
import os
import threading
import time
import warnings
from typing import Any, cast

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.feed.source import TensorSource
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.torch_kit.param_access import untracked_access
from fourfold.trace import utilization
from fourfold.trace.cost import measure_costs
from fourfold.trace.step_comparison import simulated_timeline
from fourfold.trainer.tracer import Tracer
from fourfold.words.errors import PlanError, TrainingError
from fourfold.words.program import Verb
from tests import cases as cases_module
from tests.cases import Case, batches, build_step, local_batch, train_step

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(batch_sizes=(8, 8, 8, 8), bucket_bytes=1000, update="in_forward", clip=0.05)
ZEROS = pytest.mark.parametrize("zero", [0, 1, 2])


def both(case, size, body):
    """The results of `body(case, step)` on every rank, with updates in forward and with updates after backward."""
    cases = [case, dataclasses.replace(case, update="after")]
    return [threads.run(size, lambda comm, one=one: body(one, build_step(one, size, comm))) for one in cases]


def same(got, expected):
    for mine, wanted in zip(got, expected, strict=True):
        assert mine.keys() == wanted.keys()
        assert all(torch.equal(mine[name], value) for name, value in wanted.items())


def weights(step):
    step.flush()
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}


def test_the_program_begins_with_the_updates_of_the_previous_step():
    step = threads.run(1, lambda comm: build_step(CASE, 1, comm))[0]
    verbs = [action.verb for action in step.program]
    assert verbs[: len(step.buckets)] == [Verb.UPDATE] * len(step.buckets)
    assert verbs.count(Verb.UPDATE) == len(step.buckets)


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 0), (2, 1), (2, 2)])
def test_a_bucket_is_updated_just_before_forward_uses_it(size, zero):
    case = dataclasses.replace(CASE, zero=zero, bucket_bytes=1)

    def body(comm):
        step, seen = build_step(case, size, comm), []
        step(local_batch(batches(case)[0], size, comm.rank))
        flats = {bucket.slots[0].name: flat for bucket, flat in zip(step.buckets, step._weights.flats, strict=True)}
        watched = {name: (flat, flat.clone()) for name, flat in flats.items() if name in ("first.bias", "head.bias")}

        def record(*_):
            seen.append({name: torch.equal(flat, old) for name, (flat, old) in watched.items()})

        step.model.get_submodule("second").register_forward_pre_hook(record)
        step.model.get_submodule("head").register_forward_hook(record)
        step(local_batch(batches(case)[1], size, comm.rank))
        return seen

    is_old = [{"first.bias": False, "head.bias": True}, {"first.bias": False, "head.bias": False}]
    assert threads.run(size, body) == [is_old] * size


@ZEROS
@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB"])
def test_an_update_uses_the_learning_rate_of_the_step_of_its_gradient(optimizer, zero):
    def body(case, step):
        schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, step_size=1, gamma=0.1)
        for batch in batches(case):
            step(local_batch(batch, 2, step.dp_index))
            schedule.step()
        return weights(step)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call of `lr_scheduler")  # it did not see our steps
        same(*both(dataclasses.replace(CASE, zero=zero, optimizer=optimizer), 2, body))


USES = {
    "evaluate": lambda step, batch: step.evaluate(batch),
    "state_dict": lambda step, batch: step.state_dict(),
    "state_refs": lambda step, batch: step.state_refs(),
    "load_state_dict": lambda step, batch: step.load_state_dict(step.state_dict()),
    "put": lambda step, batch: step.load_weights({"scale": torch.tensor(2.0, dtype=torch.float64)}),
    "edit": lambda step, batch: _edit(step),
    "flush": lambda step, batch: step.flush(),
}


def _edit(step):
    with step.edit() as model:
        model.get_parameter("scale").mul_(2.0)


# At every zero level, one use that a rank makes by itself and one that is collective.
EVERYWHERE = [(use, zero) for use in ("evaluate", "load_state_dict") for zero in (0, 1, 2)]


@pytest.mark.parametrize(("use", "zero"), sorted({*EVERYWHERE, *((use, n % 3) for n, use in enumerate(USES))}))
def test_weights_read_between_steps_are_updated_first(use, zero):
    def body(case, step):
        found = {}
        for number, batch in enumerate(batches(case)):
            mine = local_batch(batch, 2, step.dp_index)
            step(mine)
            metrics = USES[use](step, mine)
            if use == "evaluate":
                found[f"loss {number}"] = torch.tensor(metrics.loss)
            found |= {f"{name} {number}": p.detach().clone() for name, p in step.model.named_parameters()}
        return found

    same(*both(dataclasses.replace(CASE, zero=zero), 2, body))


@ZEROS
def test_training_resumes_bit_for_bit_from_a_state_between_steps(zero):
    case = dataclasses.replace(CASE, zero=zero)
    uninterrupted = threads.run(2, lambda comm: train_step(case, build_step(case, 2, comm)).weights)

    def begin(comm):
        step = build_step(case, 2, comm)
        for batch in batches(case)[:2]:
            step(local_batch(batch, 2, comm.rank))
        return step.state_dict()

    state = threads.run(2, begin)[0]

    def resume(comm):
        step = build_step(case, 2, comm)
        step.load_state_dict(state)
        return train_step(case, step, skip=2).weights

    same(threads.run(2, resume), uninterrupted)


class EitherOrder(nn.Module):
    """Two layers in either order, or only one of them; ranks may differ."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        way = int(x[0, 0].item())
        layers = [(self.left, self.right), (self.right, self.left), (self.left,), (self.right,)][way]
        for layer in layers:
            x = torch.tanh(layer(x))
        return self.last(x)


@ZEROS
def test_ranks_may_use_buckets_in_different_orders_or_not_at_all(zero):
    # By step: each rank's choice; None: it has no sample.
    ways = [(0, 1, 2), (1, 0, 3), (2, 3, 1), (None, 1, 0), (3, 2, None), (1, 1, 0)]

    start = EitherOrder().double()

    def body(comm, update):
        plan = Plan(dp=3, zero=zero, bucket_bytes=1, unused="allow", update=update)
        model, make = copy.deepcopy(start), functools.partial(torch.optim.AdamW, lr=0.1)
        step = TrainStep(model, lambda out, _: out.square(), make, plan=plan, communicator=comm, clip=None)
        for number, row in enumerate(ways):
            way = row[comm.rank]
            rows = 0 if way is None else 2
            step((torch.full((rows, 4), float(way or 0) + number / 100, dtype=torch.float64), torch.zeros(rows)))
        return weights(step)

    same(*(threads.run(3, functools.partial(body, update=update)) for update in ("in_forward", "after")))


class Pause(torch.autograd.Function):
    """The identity; its backward calls `act`."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        ctx.act()
        return gradients[0], None


class Slow(nn.Module):
    """Its backward calls `at_end` when all gradients have been computed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.at_end: Any = lambda: None

    def forward(self, x):
        return self.last(torch.tanh(self.first(Pause.apply(x.requires_grad_(), self.at_end))))


def slow_step(comm, zero):
    plan = Plan(dp=2, zero=zero, update="in_forward", bucket_bytes=1)
    make = functools.partial(torch.optim.SGD, lr=0.1)
    return TrainStep(Slow().double(), lambda out, _: out.square(), make, plan=plan, communicator=comm, clip=None)


def ones():
    return torch.ones(3, 16, dtype=torch.float64), torch.zeros(3)


@pytest.mark.parametrize("zero", [1, 2])
def test_no_weight_is_overwritten_while_another_ranks_backward_may_read_it(zero):
    next_forward = threading.Event()

    def body(comm):
        step, same = slow_step(comm, zero), []
        step(ones())  # ranks wait for each other at the end of the first step
        step.flush()
        flats = step._weights.flats
        before = [flat.clone() for flat in flats]

        def is_old():
            return all(map(torch.equal, before, flats))

        def at_end():
            # Rank 0 is in its next forward now, and must wait there.
            next_forward.wait(1)
            end = time.monotonic() + 0.3
            while time.monotonic() < end and is_old():
                time.sleep(0.01)
            same.append(is_old())

        model = cast(Slow, step.model)
        if comm.rank == 1:
            model.at_end = at_end
        step(ones())
        model.at_end = lambda: None
        if comm.rank == 0:
            step.model.register_forward_pre_hook(lambda *_: next_forward.set())
        step(ones())
        return same

    assert threads.run(2, body)[1] == [True]


@ZEROS
def test_a_rank_that_has_updated_lets_others_store_gradients_while_it_is_still_in_forward(zero):
    backward_has_ended, found = threading.Event(), []

    def body(comm):
        step = slow_step(comm, zero)
        step(ones())
        if comm.rank == 1:
            # All weights have been used here, so their updates have run.
            step.model.register_forward_hook(lambda *_: found.append(backward_has_ended.wait(5)))
        else:
            cast(Slow, step.model).at_end = backward_has_ended.set
        step(ones())
        step.flush()

    threads.run(2, body)
    assert found == [True]


@pytest.mark.parametrize("zero", [1, 2])
def test_no_weight_is_used_before_all_ranks_have_updated_their_shards_of_it(zero):
    case = dataclasses.replace(CASE, zero=zero)

    def body(one, step):
        update = step._parts.stage.optimizer.update

        def late(bucket, **terms):
            if step.rank == 1:
                time.sleep(0.02)
            update(bucket, **terms)

        step._parts.stage.optimizer.update = late
        losses = [step(local_batch(batch, 2, step.dp_index)).loss for batch in batches(one)]
        return weights(step) | {"losses": torch.tensor(losses)}

    same(*both(case, 2, body))


def test_a_use_between_steps_is_refused_until_pending_updates_are_flushed():
    def body(comm):
        step = build_step(CASE, 2, comm)
        step(local_batch(batches(CASE)[0], 2, comm.rank))
        for use in (
            lambda: step.model(batches(CASE)[0][0]),
            step.model.state_dict,
            lambda: step.model.get_parameter("scale").item(),
        ):
            with pytest.raises(TrainingError, match=r"used between steps.*try step\.flush\(\) on every rank"):
                use()
        step.flush()
        assert torch.isfinite(step.model(batches(CASE)[0][0])).all()

    threads.run(2, body)


@pytest.mark.parametrize("size", [1, 2])
def test_zero_grad_between_steps_loses_no_gradient(size):
    def body(case, step):
        for batch in batches(case):
            step(local_batch(batch, size, step.dp_index))
            assert all(p.grad is None for p in step.model.parameters())
            step.model.zero_grad()
        return weights(step)

    same(*both(CASE, size, body))


func = torch.func
TRANSFORMS: dict[str, Any] = {
    "vmap": lambda w, x: func.vmap(lambda row: x * row)(w).sum(0),
    "vmap in chunks": lambda w, x: func.vmap(lambda row: x * row, chunk_size=2)(w).sum(0),
    "grad": lambda w, x: x * func.grad(lambda each: each.pow(3).sum())(w).sum(0),
    "vjp": lambda w, x: x * func.vjp(lambda each: each.square(), w)[0].sum(0),
    "jacrev": lambda w, x: x * func.jacrev(lambda each: each.pow(3).sum())(w).sum(0),
    "functionalize": lambda w, x: func.functionalize(lambda each: x * each.sum(0))(w),
}


class Transformed(nn.Module):
    """A weight that is an argument of a transform of torch.func, before another weight of its bucket is used."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.weight, self.bias = way, nn.Parameter(torch.linspace(0.5, 1, 12).view(3, 4)), nn.Linear(4, 4)
        nn.init.eye_(self.bias.weight)
        nn.init.zeros_(self.bias.bias)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias(TRANSFORMS[self.way](self.weight, x))


@pytest.mark.covering
@pytest.mark.parametrize("way", TRANSFORMS)
@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 0), (2, 2)])
def test_a_weight_that_is_an_argument_of_a_transform_is_updated_first(way, size, zero):
    inputs = torch.linspace(-1, 1, 48).view(3, 4, 4).double()
    batches, sgd = [(x, x.flip(0)) for x in inputs], functools.partial(torch.optim.SGD, lr=0.05)
    square = lambda outputs, targets: (outputs - targets).square()  # noqa: E731
    expected = oracle.train(Transformed(way), square, sgd, batches)

    def body(comm):
        plan = Plan(dp=size, zero=zero, update="in_forward")
        step = TrainStep(Transformed(way), square, sgd, plan=plan, communicator=comm, clip=None)
        losses = [step(local_batch(batch, size, step.dp_index)).loss for batch in batches]
        step.flush()
        return oracle.snapshot(step, losses, [])

    for got in threads.run(size, body):
        assert oracle.deviation(got, expected) <= oracle.TOLERANCE


class UntrackedUse(nn.Module):
    """A bias that no torch operation gets with its class, as in an extension that torch.library does not know."""

    def __init__(self):
        super().__init__()
        self.bias, self.layer = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)

    def forward(self, x):
        outputs = self.layer(x)
        with untracked_access():
            return outputs + self.bias


def test_an_unreported_parameter_use_stops_training():
    def body(comm):
        plan = Plan(update="in_forward", bucket_bytes=1)
        make = functools.partial(torch.optim.SGD, lr=0.1)
        step = TrainStep(UntrackedUse(), lambda out, _: out.square(), make, plan=plan, communicator=comm, clip=None)
        batch = torch.ones(2, 4), torch.zeros(2)
        step(batch)
        with pytest.raises(TrainingError, match="a use of bias that torch did not report"):
            step(batch)

    threads.run(1, body)


@ZEROS
def test_a_flush_after_an_empty_first_microbatch_does_not_change_the_next_step(zero):
    """As at the end of an epoch, where a checkpoint is saved: rank 0 has one sample for two microbatches."""
    case = dataclasses.replace(CASE, batch_sizes=(8, 3, 8, 8), microbatches=2, zero=zero)

    def body(case, step):
        for number, batch in enumerate(batches(case)):
            step(local_batch(batch, 2, step.dp_index))
            if number == 1:
                step.flush()
        return weights(step)

    same(*both(case, 2, body))


def test_a_step_after_a_skipped_one_trains_as_with_updates_after_backward():
    """The skipped step has an empty first microbatch; no updates are pending in the step after it."""
    case = dataclasses.replace(CASE, batch_sizes=(8, 3, 8, 8), microbatches=2)

    def body(comm, update):
        one = dataclasses.replace(case, update=update)
        plan, optimizer = one.plan(2), cases_module.optimizer(one)
        step = TrainStep(
            cases_module.model("mlp"),
            cases_module.loss(one),
            optimizer,
            plan=plan,
            communicator=comm,
            clip=1.0,
            skip_nan=1,
        )
        for number, (inputs, targets) in enumerate(batches(case)):
            bad = inputs * float("nan") if number == 1 else inputs
            step(local_batch((bad, targets), 2, step.dp_index))
        return weights(step)

    same(*[threads.run(2, lambda comm, u=u: body(comm, u)) for u in ("in_forward", "after")])


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_step_after_an_empty_batch_and_an_evaluation_is_not_refused_for_unreported_uses(zero):
    # The rank without samples uses no weight in the step's forward; its pending updates run in the evaluation.
    def body(case, step):
        for number, batch in enumerate(batches(case)):
            step(local_batch(batch, 2, step.dp_index))
            if number == 1:
                step.evaluate(local_batch(batch, 2, step.dp_index))
        return weights(step)

    same(*both(dataclasses.replace(CASE, zero=zero, batch_sizes=(8, 1, 8)), 2, body))


def test_the_trace_shows_updates_within_forward_and_counts_them_once():
    def body(comm):
        step = build_step(CASE, 2, comm)
        tracing = Tracer(step, every=1)
        for number, batch in enumerate(batches(CASE), 1):
            with tracing.sample(number):
                step(local_batch(batch, 2, step.dp_index))
        return tracing.trace

    trace = threads.run(2, body)[0]
    for rank in trace.ranks:
        at = {event.name: event for event in trace.events_of(step=3, rank=rank)}
        updates = [event for name, event in at.items() if name[0] == "U"]
        assert len(updates) == sum(action.verb == Verb.UPDATE for action in trace.program[rank])
        assert all(at["F0.0"].start <= each.start <= each.stop <= at["F0.0"].stop for each in updates)
    spent = utilization.seconds_by_category(trace)
    steps = [e.seconds for e in trace.events if e.name == "step"]
    assert sum(v for name, v in spent.items() if name != utilization.REDUCE_TIME) <= 1.001 * sum(steps) / len(steps)
    assert {rank: len(timed) for rank, timed in simulated_timeline(trace, measure_costs(trace)).items()} == {
        rank: len(actions) for rank, actions in trace.program.items()
    }


def test_an_unreferenced_step_frees_its_shared_memory():
    def files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def body(comm):
        case = dataclasses.replace(CASE, zero=1)
        step = build_step(case, 2, comm)
        step(local_batch(batches(case)[0], 2, comm.rank))

    threads.run(2, body)
    before = files()
    for _ in range(3):
        threads.run(2, body)
    assert files() <= before


@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_run_ends_with_the_weights_of_its_last_step(ema, tmp_path):
    data = TensorSource(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.ones(16, 2))

    def run(update):
        task = ff.Task(
            model=lambda: nn.Linear(4, 2),
            loss=lambda outputs, targets: (outputs - targets).square(),
            data=lambda: ff.Data(train=data),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            sample=lambda model: str([p.tolist() for p in model.parameters()]),
        )
        options = {"steps": 3, "batch_size": 4, "checkpoint_every": 0, "trace_every": 0, "ema": ema}
        return ff.train(task, Plan(update=update), folder=str(tmp_path), name=update, **options).sample

    assert run("in_forward") == run("after") != None  # noqa: E711


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("fields", "message"), [
    ({"sync": "local"}, "updated weights at the end of the step"),
    ({"model": "compiled"}, "compiled code at second"),
    ({"model": "scripted"}, "compiled code at second"),
])  # fmt: skip
def test_updates_in_forward_are_refused_where_uses_are_unreported_or_come_too_late(fields, message):
    case = dataclasses.replace(CASE, clip=None, **fields)
    model, loss, optimizer = cases_module.model("mlp"), cases_module.loss(case), cases_module.optimizer(case)
    if case.model == "compiled":
        model.get_submodule("second").compile()
    if case.model == "scripted":
        model.add_module("second", cast(nn.Module, torch.jit.script(model.get_submodule("second"))))
    with pytest.raises(PlanError, match=message):
        parallelize(model, loss, optimizer, case.plan(1))
