"""Laws of an optimizer's step hooks: they train as in one process, or are refused. Ranks are threads."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fourfold.plan.plan import Plan
from fourfold.step.parallelize import preflight as check_task
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import DivergenceError, OptimizerError, TaskError
from fourfold.words.task import Data, Task
from tests.cases import Case, batches, local_batch, loss, model, optimizer, train_step

CASE = Case(batch_sizes=(12, 10, 14), bucket_bytes=1500, optimizer="SGD")
BOUND = 0.15  # of weights: many of the small network's weights exceed it


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
    for p in parameters(optimizer):
        p.clamp_(-BOUND, BOUND)


def centralize(optimizer: Any, args: Any, kwargs: Any) -> None:
    for p in parameters(optimizer):
        if p.grad is not None and p.ndim > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def replace(optimizer: Any, args: Any, kwargs: Any) -> None:
    for p in parameters(optimizer):
        if p.grad is not None:
            p.grad = p.grad.sign() * 0.01


def decay_by_gradient(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Reads gradients after the update, and overwrites them with NaN, which must have no effect."""
    for p in parameters(optimizer):
        if p.grad is not None:
            p.data.mul_(1.0 - 0.1 * p.grad.abs().mean())
            p.grad.fill_(float("nan"))


HOOKS: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "clamp": (None, clamp),
    "centralize": (centralize, None),
    "replace": (replace, clamp),
    "reads gradients": (None, decay_by_gradient),
}


def hooked(case: Case, before: Any = None, after: Any = None) -> Callable[..., torch.optim.Optimizer]:
    make = optimizer(case)

    def with_hooks(parameters: Any) -> torch.optim.Optimizer:
        made = make(parameters)
        if before is not None:
            made.register_step_pre_hook(before)
        if after is not None:
            made.register_step_post_hook(after)
        return made

    return with_hooks


def build(case: Case, comm: Any, make: Any) -> TrainStep:
    plan = case.plan(comm.size)
    return TrainStep(model(case.model), loss(case), make, plan=plan, communicator=comm, clip=case.clip)


SETUPS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one rank": (1, 1, {}),
    "shared memory": (2, 1, {}),
    "three ranks": (3, 1, {"microbatches": 2, "clip": 0.5}),
    "gloo": (2, 1, {"transport": "gloo"}),
    "hosts": (4, 2, {}),
    "one rank, zero 1": (1, 1, {"zero": 1}),
    "LARS": (2, 1, {"optimizer": "LARS"}),
    "AdamW": (2, 1, {"optimizer": "AdamW"}),
    "unused": (2, 1, {"model": "unused", "unused": "allow"}),
    "sequence": (2, 1, {"model": "lm", "cp": 2, "batch_sizes": (4, 4)}),
}


@pytest.mark.covering
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("how", SETUPS)
def test_hooks_train_as_in_one_process(how, kind):
    size, hosts, fields = SETUPS[how]
    case = dataclasses.replace(CASE, **fields)
    make = hooked(case, *HOOKS[kind])
    plain = oracle.train(model(case.model), loss(case), optimizer(case), batches(case), clip=case.clip)
    expected = oracle.train(model(case.model), loss(case), make, batches(case), clip=case.clip)
    assert oracle.deviation(plain, expected) > 1e-4, "the hook changes nothing"

    def body(comm):
        step = build(case, comm, make)
        deviation = oracle.deviation(train_step(case, step), expected)
        assert all(p.grad is None for p in step.model.parameters())
        return deviation

    assert max(threads.run(size, body, hosts=hosts)) <= TOLERANCE


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_hooks_see_gradients_in_the_dtype_of_the_weights_whatever_dtype_sums_them(codec):
    fields = {"reduce_dtype": "fp32"} if codec == "none" else {"codec": codec}
    case = dataclasses.replace(CASE, clip=0.5, **fields)
    seen = []

    def before(optimizer, args, kwargs):
        seen.append({p.grad.dtype for p in parameters(optimizer) if p.grad is not None})
        centralize(optimizer, args, kwargs)

    make = hooked(case, before, clamp)
    expected = oracle.train(model("mlp"), loss(case), hooked(case, centralize, clamp), batches(case), clip=0.5)
    deviations = threads.run(2, lambda comm: oracle.deviation(train_step(case, build(case, comm, make)), expected))
    assert 0.0 < max(deviations) <= (1e-6 if codec == "none" else 1e-3)
    assert seen == [{torch.float64}] * 6


def test_a_hook_registered_after_the_build_trains_as_in_one_process():
    expected = oracle.train(model("mlp"), loss(CASE), hooked(CASE, centralize, clamp), batches(CASE))

    def body(comm):
        step = build(CASE, comm, optimizer(CASE))
        step.optimizer.register_step_pre_hook(centralize)
        step.optimizer.register_step_post_hook(clamp)
        return oracle.deviation(train_step(CASE, step), expected)

    assert max(threads.run(2, body)) <= TOLERANCE


def test_global_optimizer_hooks_are_called_once_a_step_in_torchs_order():
    calls: list[tuple[int, str]] = []

    def body(comm):
        mine = {}

        def note(name):
            def hook(optimizer, args, kwargs):
                assert args == (optimizer,)
                assert kwargs == {}
                if optimizer is mine["optimizer"]:
                    calls.append((comm.rank, name))

            return hook

        step = build(CASE, comm, hooked(CASE, note("before"), note("after")))
        mine["optimizer"] = step.optimizer
        handles = [
            register_optimizer_step_pre_hook(note("every before")),
            register_optimizer_step_post_hook(note("every after")),
        ]
        try:
            train_step(CASE, step)
        finally:
            for handle in handles:
                handle.remove()

    threads.run(2, body)
    for rank in range(2):
        assert [name for of, name in calls if of == rank] == ["every before", "before", "after", "every after"] * 3


def test_a_skipped_step_calls_no_hook():
    called = []

    def body(comm):
        made = hooked(CASE, lambda *_: called.append("before"), lambda *_: called.append("after"))
        step = TrainStep(model("mlp"), loss(CASE), made, plan=CASE.plan(2), communicator=comm, clip=None, skip_nan=1)
        inputs, targets = local_batch(batches(CASE)[0], 2, comm.rank)
        assert step((inputs * float("nan"), targets)).skipped is not None

    threads.run(2, body)
    assert called == []


@pytest.mark.parametrize(("size", "sees"), [(1, "unused"), (2, "unused")])
def test_a_gradient_that_a_hook_sets_to_none_is_not_used(size, sees):
    case = dataclasses.replace(CASE, model=sees, unused="allow")

    def set_to_none(optimizer, args, kwargs):
        assert any(p.grad is None for p in parameters(optimizer)), "the unused layer has no gradient"
        parameters(optimizer)[0].grad = None

    make = hooked(case, set_to_none)
    expected = oracle.train(model(case.model), loss(case), make, batches(case))
    deviations = threads.run(size, lambda comm: oracle.deviation(train_step(case, build(case, comm, make)), expected))
    assert max(deviations) <= TOLERANCE


def test_a_gradient_that_a_hook_sets_to_none_is_refused_where_every_parameter_is_updated():
    def set_to_none(optimizer, args, kwargs):
        parameters(optimizer)[0].grad = None

    def body(comm):
        step = build(CASE, comm, hooked(CASE, set_to_none))
        with pytest.raises(OptimizerError, match=r'first\.weight.*unused = "allow"'):
            step(local_batch(batches(CASE)[0], 2, comm.rank))
        return True

    assert threads.run(2, body) == [True, True]


def test_a_hook_that_replaces_the_storage_of_a_weight_is_refused_at_once():
    def replaces(optimizer, args, kwargs):
        for p in parameters(optimizer):
            p.data = p.data.clamp(-BOUND, BOUND)

    def body(comm):
        step = build(CASE, comm, hooked(CASE, None, replaces))
        with pytest.raises(TaskError, match="another storage than before"):
            step(local_batch(batches(CASE)[0], 2, comm.rank))
        return True

    assert threads.run(2, body) == [True, True]


def test_a_hook_that_reads_optimizer_state_is_refused():
    def reads(optimizer, args, kwargs):
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()

    def body(comm):
        step = build(CASE, comm, hooked(CASE, None, reads))
        with pytest.raises(OptimizerError, match="state of the optimizer in a step hook"):
            step(local_batch(batches(CASE)[0], 2, comm.rank))
        return True

    assert threads.run(2, body) == [True, True]


def test_a_hook_that_changes_the_arguments_of_step_is_refused():
    def body(comm):
        step = build(CASE, comm, hooked(CASE, lambda optimizer, args, kwargs: (args, {"closure": None})))
        with pytest.raises(OptimizerError, match="other arguments"):
            step(local_batch(batches(CASE)[0], 2, comm.rank))
        return True

    assert threads.run(2, body) == [True, True]


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "zero": {"zero": 1},
    "zero 3": {"zero": 3, "transport": "gloo"},
    "update": {"update": "in_backward"},
    "late update": {"update": "in_forward"},
    "sync": {"sync": "local", "local_steps": 3},
    "precision": {"precision": "bf16"},
    "offload": {"offload": "states"},
}


@pytest.mark.parametrize("pair", [(clamp, None), (None, clamp)])
@pytest.mark.parametrize("why", UNSUPPORTED)
def test_hooks_that_cannot_run_are_refused_at_the_build_and_later(why, pair):
    case = dataclasses.replace(CASE, **UNSUPPORTED[why])
    field, value = next(iter(UNSUPPORTED[why].items()))
    message = f"{field} = {value!r}".replace("'", '"')

    def body(comm):
        with pytest.raises(OptimizerError, match=f"step (pre|post)-hook.*{message}"):
            build(case, comm, hooked(case, *pair))
        step = build(case, comm, optimizer(case))
        before, after = pair
        if before is not None:
            step.optimizer.register_step_pre_hook(before)
        else:
            step.optimizer.register_step_post_hook(after)
        with pytest.raises(OptimizerError, match=f"step (pre|post)-hook.*{message}"):
            step(local_batch(batches(case)[0], 2, comm.rank))
        return True

    assert threads.run(2, body) == [True, True]


def test_hooks_are_refused_where_a_rank_has_the_weights_of_its_stages_only():
    def body(comm):
        plan, layers = Plan(pp=2, microbatches=2), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        with pytest.raises(OptimizerError, match="a step post-hook with pp = 2   need all gradients and weights"):
            TrainStep(layers, loss(CASE), hooked(CASE, None, clamp), plan=plan, communicator=comm)
        return True

    assert threads.run(2, body) == [True, True]


def test_a_hook_of_one_rank_that_cannot_run_stops_all_ranks():
    case = dataclasses.replace(CASE, zero=1)

    def body(comm):
        step = build(case, comm, optimizer(case))
        if comm.rank == 1:
            step.optimizer.register_step_post_hook(clamp)
        with pytest.raises(OptimizerError if comm.rank == 1 else DivergenceError) as caught:
            step(local_batch(batches(case)[0], 3, comm.rank))
        return str(caught.value)

    first, second, third = threads.run(3, body)
    assert "step post-hook" in second
    assert first == third
    assert "rank 1 is at step 1, which its optimizer cannot do" in first


def own_step(made: torch.optim.Optimizer) -> None:
    before = made.step
    made.step = lambda closure=None: before(closure)  # type: ignore[method-assign]


def wrapping_step(made: torch.optim.Optimizer) -> None:
    """As decorators do: the wrapper has the attributes of what it wraps, a scheduler's mark included."""
    torch.optim.lr_scheduler.StepLR(made, 1)
    before = made.step

    @functools.wraps(before)
    def step(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs)

    made.step = step  # type: ignore[method-assign]


def loaded_state(made: torch.optim.Optimizer) -> None:
    made.state[parameters(made)[0]] = {"momentum_buffer": torch.zeros_like(parameters(made)[0])}


def replaced_state(made: torch.optim.Optimizer) -> None:
    made.load_state_dict(torch.optim.Optimizer.state_dict(made))
    loaded_state(made)


CHANGES: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "own step": (own_step, r"its own step\(\)"),
    "wrapping step": (wrapping_step, r"its own step\(\)"),
    "saving hook": (lambda made: made.register_state_dict_post_hook(lambda *_: None), "state_dict hook"),
    "loading hook": (lambda made: made.register_load_state_dict_pre_hook(lambda *_: None), "state_dict hook"),
    "loaded state": (loaded_state, r"already made steps, or loaded a state.*load_state_dict"),
    "replaced state": (replaced_state, r"already made steps, or loaded a state.*load_state_dict"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_optimizer_change_that_a_flat_update_would_drop_is_refused_at_the_build_and_later(change):
    act, message = CHANGES[change]

    def body(comm):
        make = optimizer(CASE)

        def changed(parameters):
            made = make(parameters)
            act(made)
            return made

        with pytest.raises(OptimizerError, match=message):
            build(CASE, comm, changed)
        step = build(CASE, comm, make)
        act(step.optimizer)
        with pytest.raises(OptimizerError, match=message):
            step(local_batch(batches(CASE)[0], 2, comm.rank))
        return True

    assert threads.run(2, body) == [True, True]


def test_parameters_added_after_the_build_are_refused():
    def body(comm):
        step = build(CASE, comm, optimizer(CASE))
        step.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        with pytest.raises(OptimizerError, match="other parameters"):
            step(local_batch(batches(CASE)[0], 2, comm.rank))
        return True

    assert threads.run(2, body) == [True, True]


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_scheduler_is_not_taken_for_a_custom_step(kind):
    case = dataclasses.replace(CASE, optimizer=kind)

    def body(comm):
        def make(parameters):
            made = optimizer(case)(parameters)
            torch.optim.lr_scheduler.ConstantLR(made, factor=1.0)
            return made

        step = build(case, comm, make)
        torch.optim.lr_scheduler.ConstantLR(step.optimizer, factor=1.0)
        expected = oracle.train(model(case.model), loss(case), optimizer(case), batches(case))
        return oracle.deviation(train_step(case, step), expected)

    assert max(threads.run(2, body)) <= TOLERANCE


def test_an_optimizer_class_whose_step_was_replaced_is_refused(monkeypatch):
    plain = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: plain(self, closure))
    with pytest.raises(OptimizerError, match=r"its own step\(\)"):
        threads.run(1, lambda comm: build(CASE, comm, optimizer(CASE)))


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {}])
def test_adagrads_initial_state_is_not_refused(how):
    def make(parameters):
        return torch.optim.Adagrad(parameters, lr=0.1, **how)

    def no_data() -> Data:
        return Data(train=[], valid=None)

    task = Task(model=lambda: model("mlp"), loss=loss(CASE), data=no_data, optimizer=make, steps=1, batch_size=2)
    check_task(task, CASE.plan(2))
    threads.run(2, lambda comm: train_step(CASE, build(CASE, comm, make)))

    def trained(parameters):
        made = make(parameters)
        for state in made.state.values():
            state["step"] += 1
        return made

    with pytest.raises(OptimizerError, match="already made steps, or loaded a state"):
        threads.run(1, lambda comm: build(CASE, comm, trained))


def test_a_global_optimizer_hook_is_reported_as_such():
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        with pytest.raises(OptimizerError, match="a step post-hook of all optimizers with zero = 1"):
            threads.run(2, lambda comm: build(dataclasses.replace(CASE, zero=1), comm, optimizer(CASE)))
    finally:
        handle.remove()


def test_a_task_whose_hooks_cannot_run_is_refused_before_processes_start():
    def no_data() -> Data:
        return Data(train=[], valid=None)

    task = Task(
        model=lambda: model("mlp"),
        loss=loss(CASE),
        data=no_data,
        optimizer=hooked(CASE, None, clamp),
        steps=1,
        batch_size=2,
    )
    with pytest.raises(OptimizerError, match="step post-hook"):
        check_task(task, dataclasses.replace(CASE, zero=1).plan(2))
    check_task(task, CASE.plan(2))
