"""Laws of the wrapper: it acts on the wrapped optimizer; what would make ranks differ is refused.

Ranks are threads; the oracle is plain PyTorch with the whole batch, in float64.
"""

import collections
import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from fourfold.optim.option_tracker import OptionTracker
from fourfold.plan.plan import Plan
from fourfold.step import distributed_optimizer
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import DivergenceError, OptimizerError, PlanError, SettingError, TaskError, TrainingError

STEPS = 4


def model() -> nn.Module:
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return made


def batch(number: int, rank: int | None) -> Tensor:
    """A rank's images; for None, those of both ranks."""
    generator = torch.Generator().manual_seed(number)
    both = torch.randn(2, 2, 3, 6, 6, generator=generator, dtype=torch.float64)
    return both.flatten(0, 1) if rank is None else both[rank]


def loss_of(mine: nn.Module, number: int, rank: int | None) -> Tensor:
    return (mine(batch(number, rank)) - 1).square().mean()


def train_steps(mine, optimizer, rank, *, first=0, steps=STEPS):
    for number in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(mine, number, rank).backward()
        optimizer.step()


def wrapped(comm, kind: Any = torch.optim.SGD, mine=None, *, plan=None, drift_check=1000, **options):
    mine = mine or model()
    inner = kind(mine.parameters(), **{"lr": 0.1, **options})
    return mine, DistributedOptimizer(inner, mine, plan, communicator=comm, drift_check=drift_check)


def max_difference(mine, theirs) -> float:
    return max((a.detach() - b.detach()).abs().max().item() for a, b in zip(mine, theirs, strict=True))


def agrees(make, train, *, start=model) -> bool:
    """Whether two ranks train the same weights as one process."""

    def body(comm):
        mine = start()
        optimizer = DistributedOptimizer(make(mine.parameters()), mine, communicator=comm)
        train(mine, optimizer, comm.rank)
        return [p.detach().clone() for p in mine.parameters()]

    reference = start()
    train(reference, make(reference.parameters()), None)
    first, second = threads.run(2, body)
    return all(map(torch.equal, first, second)) and max_difference(first, reference.parameters()) <= TOLERANCE


def scaled(mine, optimizer, rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(mine, number, rank)).backward()
        scaler.step(optimizer)
        scaler.update()


def overflowing(mine, optimizer, rank):
    """The loss of one rank is infinite in one step, which all ranks skip."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(mine, number, rank) * (float("inf") if number == 1 and rank != 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512


@pytest.mark.parametrize("train", [scaled, overflowing])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("fused", [True, None])
def test_a_gradient_scaler_reaches_the_wrapped_optimizer(kind, fused, train):
    assert agrees(functools.partial(kind, lr=0.1, fused=fused), train)


class Scaled(torch.optim.Optimizer):
    """An optimizer with attributes, one of which exists only after it is set."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.factor = 1.0

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            rate = self.param_groups[0]["lr"] * self.factor * getattr(self, "later", 1.0)
            parameter -= rate * parameter.grad


def test_attributes_set_on_the_wrapper_reach_the_wrapped_optimizer():
    def train(mine, optimizer, rank):
        train_steps(mine, optimizer, rank, steps=2)
        optimizer.factor, optimizer.later = 0.25, 0.5
        train_steps(mine, optimizer, rank, first=2, steps=2)
        del optimizer.later
        train_steps(mine, optimizer, rank, first=4, steps=2)

    assert agrees(functools.partial(Scaled, lr=0.2), train)


def test_states_and_groups_can_be_replaced():
    def train(mine, optimizer, rank):
        train_steps(mine, optimizer, rank, steps=2)
        optimizer.state = collections.defaultdict(dict)
        optimizer.param_groups = [{**group, "lr": 0.05} for group in optimizer.param_groups]
        train_steps(mine, optimizer, rank, first=2, steps=2)

    assert agrees(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), train)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_a_wrapper_are_refused(copied):
    def body(comm):
        _, optimizer = wrapped(comm)
        with pytest.raises(OptimizerError, match=r"a copy or a pickle .*state_dict"):
            copied(optimizer)
        return hasattr(DistributedOptimizer.step, "apply_hooks")

    assert threads.run(2, body) == [False, False]


def channels_last() -> nn.Module:
    return model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.mark.parametrize("how", [{}, {"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_gradients_have_the_strides_of_their_parameters(kind, how):
    assert agrees(functools.partial(kind, lr=0.1, **how), train_steps, start=channels_last)


def test_gradients_kept_by_the_loop_keep_their_strides():
    def body(comm):
        mine, optimizer = wrapped(comm, mine=channels_last(), fused=True)
        kept = []
        for number in range(2):
            optimizer.zero_grad()
            loss_of(mine, number, comm.rank).backward()
            kept.append([p.grad for p in mine.parameters()])
        return [g.stride() == p.stride() for row in kept for g, p in zip(row, mine.parameters(), strict=True)]

    assert threads.run(2, body) == [[True] * 8] * 2


def test_ranks_with_different_parameter_strides_are_refused():
    def body(comm):
        with pytest.raises(
            PlanError, match=r"0\.weight = \[4, 3, 3, 3\] float64.*\[4, 3, 3, 3\], strides \[27, 1, 9, 3\]"
        ):
            wrapped(comm, mine=channels_last() if comm.rank else model())
        return True

    assert threads.run(2, body) == [True, True]


@pytest.mark.parametrize(
    ("options", "convert", "message"),
    [
        ({"fused": True}, {"memory_format": torch.channels_last}, r"strides \[27, 9, 3, 1\] to \[27, 1, 9, 3\]"),
        ({}, {"dtype": torch.float32}, r"torch\.float64 to torch\.float32"),
    ],
)
def test_parameters_that_are_converted_later_are_refused(options, convert, message):
    def body(comm):
        mine, _ = wrapped(comm, **options)
        mine.to(**convert)
        x = batch(0, comm.rank).to(next(mine.parameters()).dtype)
        with pytest.raises(TrainingError, match=rf"converted after.*0\.weight \({message}\)"):
            mine(x).sum().backward()
        return True

    assert threads.run(2, body) == [True, True]


def test_a_later_memory_format_is_trained_with_elementwise_updates():
    def train(mine, optimizer, rank):
        mine.to(memory_format=torch.channels_last)
        train_steps(mine, optimizer, rank)

    assert agrees(functools.partial(torch.optim.AdamW, lr=0.1), train)


def test_gradients_with_a_graph_are_refused():
    def body(comm):
        mine, _ = wrapped(comm)
        with pytest.raises(TaskError, match=r"create_graph=True.*torch\.autograd\.grad"):
            loss_of(mine, 0, comm.rank).backward(create_graph=True)
        return True

    assert threads.run(2, body) == [True, True]


def test_a_reentrant_checkpoint_is_refused_by_name():
    def body(comm):
        mine: Any = wrapped(comm)[0]
        hidden = checkpoint(mine[:2], batch(0, comm.rank).requires_grad_(), use_reentrant=True)
        with pytest.raises(TrainingError, match=r"use_reentrant=True.*try checkpoint\(…, use_reentrant=F"):
            mine[2](hidden).sum().backward()
        return True

    assert threads.run(2, body) == [True, True]


def test_a_parameter_that_is_frozen_later_is_reported_as_frozen():
    def body(comm):
        mine, _ = wrapped(comm)
        mine.get_submodule("0").requires_grad_(False)
        with pytest.raises(TrainingError, match=r"0\.weight got no gradient: it was frozen.*unused = \"allow\""):
            loss_of(mine, 0, comm.rank).backward()
        return True

    assert threads.run(2, body) == [True, True]


class Noisy(torch.optim.SGD):
    """Draws noise, as Langevin dynamics does, each rank from its own generator."""

    seed = 0

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        super().step(closure)
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in self.param_groups[0]["params"]:
            parameter += 1e-3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def different_noise(mine, optimizer, comm):
    optimizer.seed = comm.rank


def different_momentum(mine, optimizer, comm):
    """As if only one rank had loaded a checkpoint before its optimizer was wrapped."""
    if comm.rank == 0:
        for parameter in mine.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)


@pytest.mark.parametrize("prepare", [different_noise, different_momentum])
def test_updates_that_differ_from_the_start_are_found_after_the_first_step(prepare):
    def body(comm):
        mine, optimizer = wrapped(comm, Noisy, momentum=0.9)
        prepare(mine, optimizer, comm)
        with pytest.raises(
            DivergenceError, match=r"the weights after step 1\n.*loaded state.*optimizer\.broadcast_state\(\)"
        ):
            train_steps(mine, optimizer, comm.rank, steps=2)
        return optimizer._steps.num_steps

    assert threads.run(2, body) == [1, 1]


def test_check_drift_compares_the_weights():
    def body(comm):
        mine, optimizer = wrapped(comm)
        train_steps(mine, optimizer, comm.rank)
        optimizer.check_drift()
        with torch.no_grad():
            mine.get_parameter("0.bias")[0] += comm.rank
        with pytest.raises(DivergenceError, match=r"the weights after step 4\n  0\.bias"):
            optimizer.check_drift()
        if comm.rank == 0:
            optimizer.step()
        with pytest.raises(DivergenceError, match=r"rank 0 is at check_drift\(\) after 5 steps"):
            optimizer.check_drift()
        return True

    assert threads.run(2, body) == [True, True]


def test_wrapping_a_wrapper_is_refused():
    def body(comm):
        mine, optimizer = wrapped(comm)
        with pytest.raises(OptimizerError, match="wrapped again"):
            DistributedOptimizer(optimizer, mine, communicator=comm)
        return True

    assert threads.run(2, body) == [True, True]


def test_the_first_step_is_not_compared_where_drift_checks_are_off():
    def body(comm):
        mine, optimizer = wrapped(comm, Noisy, drift_check=0)
        different_noise(mine, optimizer, comm)
        train_steps(mine, optimizer, comm.rank)
        return True

    assert threads.run(2, body) == [True, True]


def load_scaled(optimizer, saved, *, factor=1.0):
    saved = copy.deepcopy(saved)
    for state in saved["state"].values():
        state["momentum_buffer"].mul_(factor)
    optimizer.load_state_dict(saved)


def test_a_state_loaded_on_one_rank_only_is_found_before_a_weight_changes():
    def body(comm):
        mine, optimizer = wrapped(comm, momentum=0.9)
        train_steps(mine, optimizer, comm.rank)
        if comm.rank == 1:
            load_scaled(optimizer, optimizer.state_dict())
        before = [p.detach().clone() for p in mine.parameters()]
        with pytest.raises(DivergenceError, match=r"rank 1 is at .* 4 steps of the optimizer and 1 × load_state_dict"):
            train_steps(mine, optimizer, comm.rank)
        return max_difference(mine.parameters(), before)

    assert threads.run(2, body) == [0.0, 0.0]


def test_weights_are_compared_after_a_load_and_not_again_after_a_broadcast_of_state():
    def body(comm):
        mine, optimizer = wrapped(comm, momentum=0.9)
        checker, compared = optimizer._checks._drift_checker, []
        compare = checker.compare

        def recording(tensors, when, **more):
            compared.append(when)
            compare(tensors, when, **more)

        checker.compare = recording
        train_steps(mine, optimizer, comm.rank)
        load_scaled(optimizer, optimizer.state_dict())
        train_steps(mine, optimizer, comm.rank)
        optimizer.broadcast_state()
        train_steps(mine, optimizer, comm.rank)
        return compared

    # Each in the backward of the step after: that of the first step, and of the first with loaded state.
    assert threads.run(2, body) == [["after step 1", "after step 5"]] * 2


def test_states_that_differ_between_ranks_are_found_after_the_next_step():
    def body(comm):
        mine, optimizer = wrapped(comm, momentum=0.9)
        train_steps(mine, optimizer, comm.rank)
        load_scaled(optimizer._optimizer, optimizer.state_dict(), factor=1.0 + comm.rank)
        with pytest.raises(DivergenceError, match="the weights after step 5"):
            train_steps(mine, optimizer, comm.rank)
        return True

    assert threads.run(2, body) == [True, True]


def test_a_state_loaded_on_one_rank_and_broadcast_is_the_same_on_all():
    def body(comm):
        mine, optimizer = wrapped(comm, momentum=0.9)
        train_steps(mine, optimizer, comm.rank)
        for _ in range(2 * comm.rank):  # the other rank loads it once, from the broadcast
            load_scaled(optimizer, optimizer.state_dict(), factor=0.5)
        optimizer.broadcast_state(src=1)
        train_steps(mine, optimizer, comm.rank, first=4)
        return [p.tolist() for p in mine.parameters()]

    first, second = threads.run(2, body)
    assert first == second


COUNTS = [5, 2]


def epochs(mine, optimizer, rank, scheduler, scaler, around):
    """Two epochs in which ranks have different numbers of batches; the oracle has the batches of both."""
    for epoch in range(2):
        with around(scheduler, scaler):
            for number in range(max(COUNTS) if rank is None else COUNTS[rank]):
                optimizer.zero_grad()
                for one in (0, 1) if rank is None else (rank,):
                    if number < COUNTS[one]:
                        weight = 0.5 if rank is None else 1.0
                        scaler.scale(loss_of(mine, 10 * epoch + number, one) * weight).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 6, 8], 0.5),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "in a row": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.5)], [4]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_join_ends_with_the_states_of_the_rank_with_the_most_batches(kind):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)

    def body(comm):
        mine, optimizer = wrapped(comm, momentum=0.9)

        def around(*states):
            return optimizer.join(states=states)

        epochs(mine, optimizer, comm.rank, SCHEDULERS[kind](optimizer), mine_scaler := scaler(), around)
        return [p.detach().clone() for p in mine.parameters()], mine_scaler.get_scale()

    reference = model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    theirs = scaler()
    epochs(reference, plain, None, SCHEDULERS[kind](plain), theirs, lambda *_: torch.enable_grad())
    (first, scale), (second, other) = threads.run(2, body)
    assert all(map(torch.equal, first, second))
    assert max_difference(first, reference.parameters()) <= TOLERANCE
    assert scale == other == theirs.get_scale()


@pytest.mark.parametrize("kind", ["lambda", "cyclic"])
def test_schedules_that_differ_within_join_are_refused_on_every_rank(kind):
    def body(comm):
        mine, optimizer = wrapped(comm, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with pytest.raises(DivergenceError, match=r"within join\(\)\n  lr: .*join\(states=\[scheduler\]\)"):
            epochs(mine, optimizer, comm.rank, SCHEDULERS[kind](optimizer), scaler, lambda *_: optimizer.join())
        return True

    assert threads.run(2, body) == [True, True]


def test_options_within_join_are_compared_among_the_ranks_with_data():
    def body(comm):
        mine, optimizer = wrapped(comm)
        optimizer.param_groups[0]["lr"] = 0.2 if comm.rank == 2 else 0.1
        message = r"within join\(\)\n  lr: rank 1 has 0\.1; rank 2 has 0\.2"
        with pytest.raises(DivergenceError, match=message), optimizer.join():
            train_steps(mine, optimizer, comm.rank % 2, steps=comm.rank)
        return True

    assert threads.run(3, body) == [True] * 3


def test_short_digests_of_options_are_exact_when_squared_and_summed():
    parameters = [nn.Parameter(torch.ones(1))]
    digests = [OptionTracker(torch.optim.SGD(parameters, lr=0.1 * number)).short_digest() for number in range(1, 50)]
    assert len(set(digests)) == 49
    assert max(digests) ** 2 * 4096 < 2**53


def test_join_refuses_objects_without_a_state_dict():
    def body(comm):
        _, optimizer = wrapped(comm)
        wrong: list[Any] = [[3], None]
        for states in wrong:
            with (
                pytest.raises(SettingError, match=r"state_dict\(\) and load_state_dict\(\)"),
                optimizer.join(states=states),
            ):
                pass
        return True

    assert threads.run(2, body) == [True, True]


def test_freezing_and_unfreezing_is_allowed_with_unused_allow():
    def train(mine, optimizer, rank):
        for first, is_trained in ((0, True), (2, False), (4, True)):
            mine.get_submodule("0").requires_grad_(is_trained)
            train_steps(mine, optimizer, rank, first=first, steps=2)

    def body(comm):
        mine, optimizer = wrapped(comm, torch.optim.AdamW, plan=Plan(dp=2, unused="allow"))
        train(mine, optimizer, comm.rank)
        return [p.detach().clone() for p in mine.parameters()]

    reference = model()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.1), None)
    assert max(max_difference(mine, reference.parameters()) for mine in threads.run(2, body)) <= TOLERANCE


def test_a_join_block_holds_no_other_and_after_it_rounds_are_even_again():
    def body(comm):
        mine, optimizer = wrapped(comm)
        with optimizer.join():
            with pytest.raises(TrainingError, match=r"join\(\) within join\(\)"), optimizer.join():
                pass
            train_steps(mine, optimizer, comm.rank)
        optimizer.param_groups[0]["lr"] = 0.1 + comm.rank
        with pytest.raises(DivergenceError, match=r"backward \d+ after 4 steps of the optimizer"):
            train_steps(mine, optimizer, comm.rank)
        return True

    assert threads.run(2, body) == [True, True]


def test_an_optimizer_that_is_replaced_within_no_sync_takes_no_gradients_after_it():
    def body(comm):
        mine, replaced = wrapped(comm)
        with replaced.no_sync():
            _, optimizer = wrapped(comm, mine=mine)
        train_steps(mine, optimizer, comm.rank)
        return [p.detach() for p in mine.parameters()]

    reference = model()
    train_steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), None)
    assert max(max_difference(mine, reference.parameters()) for mine in threads.run(2, body)) <= TOLERANCE


def test_ranks_with_a_gradient_are_counted_only_if_parameters_may_be_unused(monkeypatch):
    counts, count = [], distributed_optimizer.num_ranks_with_grad
    counted = lambda *args: counts.append(count(*args)) or counts[-1]  # noqa: E731
    monkeypatch.setattr(distributed_optimizer, "num_ranks_with_grad", counted)

    def body(comm, unused):
        mine, optimizer = wrapped(comm, plan=Plan(dp=2, unused=unused))
        train_steps(mine, optimizer, comm.rank, steps=1)

    threads.run(2, lambda comm: body(comm, "error"))
    assert counts == []
    threads.run(2, lambda comm: body(comm, "allow"))
    assert counts == [[2.0] * len(list(model().parameters()))] * 2
