"""Laws of `DistributedOptimizer.step()`: unreduced gradients change no weight. Ranks are threads."""

import contextlib
import re

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.testing import threads
from fourfold.words.errors import TrainingError


class Two(nn.Module):
    """Two layers; a call may use only the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x, *, both=True):
        x = self.first(x)
        return self.second(x) if both else x


class Loop:
    """A rank's model, its optimizer, and the calls of a training loop."""

    def __init__(self, comm, kind=torch.optim.SGD, *, model=None, **fields):
        self.model, self.rank = model or Two(), comm.rank
        plan = ff.Plan(dp=comm.size, **fields)
        self.inner = kind([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        self.optimizer = DistributedOptimizer(self.inner, self.model, plan, communicator=comm)
        self.parameters = list(self.model.parameters())

    def loss(self, **how):
        return self.model(torch.full((1, 2), self.rank + 1.0), **how).square().sum()

    def backward(self, **how):
        self.loss(**how).backward()

    def local_backward(self):
        with self.optimizer.no_sync():
            self.backward()

    def step(self):
        self.optimizer.step()

    def clear(self):
        self.optimizer.zero_grad()

    def set_by_hand(self, *parameters):
        for parameter in parameters or self.parameters:
            parameter.grad = torch.full_like(parameter, self.rank + 1.0)

    def set_by_autograd(self):
        gradients = torch.autograd.grad(self.loss(), self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient


def hand_set(loop):
    loop.set_by_hand()


def one_hand_set(loop):
    loop.set_by_hand(loop.model.second.bias)


def from_autograd(loop):
    loop.set_by_autograd()


def only_local(loop):
    loop.local_backward()


def local_after_a_reduction(loop):
    loop.backward()
    loop.local_backward()


def hand_set_after_a_step(loop):
    loop.backward()
    loop.step()
    loop.set_by_hand()


def local_after_a_step(loop):
    loop.backward()
    loop.step()
    loop.clear()
    loop.local_backward()


def added_to_the_last_mean(loop):
    loop.backward()
    loop.step()
    loop.local_backward()


def last_mean_edited(loop):
    loop.backward()
    loop.step()
    loop.parameters[0].grad.mul_(loop.rank + 1.0)


REFUSED = [
    hand_set,
    one_hand_set,
    from_autograd,
    only_local,
    local_after_a_reduction,
    hand_set_after_a_step,
    local_after_a_step,
    added_to_the_last_mean,
    last_mean_edited,
]


@pytest.mark.covering
@pytest.mark.parametrize("prepare", REFUSED)
@pytest.mark.parametrize("closed", [False, True])
def test_an_unreduced_gradient_is_refused_before_a_weight_changes(prepare, closed):
    def body(comm):
        loop = Loop(comm)
        prepare(loop)
        before = [p.detach().clone() for p in loop.parameters]
        with pytest.raises(TrainingError, match=r"\.grad of .* since the last step") as caught:
            loop.optimizer.step(lambda: 0.0) if closed else loop.step()
        assert all(map(torch.equal, loop.parameters, before))
        loop.clear()  # then training can continue
        loop.backward()
        loop.step()
        return str(caught.value), [p.tolist() for p in loop.parameters]

    (message, first), (_, second) = threads.run(2, body)
    assert first == second
    assert re.search(r"\.grad of second\.(bias|weight)", message)
    assert "no_sync" in message


def test_a_gradient_set_on_one_rank_only_is_refused_there_and_then_on_all_ranks():
    def body(comm):
        loop = Loop(comm)
        if comm.rank == 1:
            loop.set_by_hand()
            with pytest.raises(TrainingError, match="since the last step"):
                loop.step()
            loop.clear()
        else:
            loop.step()
        with pytest.raises(ff.FourfoldError, match="backward 1 after 1 steps"):
            loop.backward()
        return True

    assert threads.run(2, body) == [True, True]


def clip(loop):
    loop.backward()
    nn.utils.clip_grad_norm_(loop.parameters, 0.1)


def replace(loop):
    loop.backward()
    for parameter in loop.parameters:
        parameter.grad = parameter.grad * 2


def remove_some(loop):
    loop.backward()
    loop.parameters[0].grad = None
    loop.parameters[1].grad.zero_()


def accumulate(loop):
    loop.local_backward()
    loop.backward()


def add_to_what_was_set_by_hand(loop):
    loop.set_by_hand()
    loop.backward()


def add_up_means(loop):
    loop.backward()
    loop.backward()


def nothing(loop):
    pass


def drop_what_was_local(loop):
    loop.local_backward()
    loop.clear()


def zeros(loop):
    loop.local_backward()
    loop.optimizer.zero_grad(set_to_none=False)


def the_same_mean_again(loop):
    loop.backward()
    loop.step()


def unscale(loop):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loop.loss()).backward()
    scaler.unscale_(loop.optimizer)


def gradients_without_grad(loop):
    penalty = sum(g.square().sum() for g in torch.autograd.grad(loop.loss(), loop.parameters, create_graph=True))
    (loop.loss() + penalty).backward()


LEGAL = [
    clip,
    replace,
    remove_some,
    accumulate,
    add_to_what_was_set_by_hand,
    add_up_means,
    nothing,
    drop_what_was_local,
    zeros,
    the_same_mean_again,
    unscale,
    gradients_without_grad,
]


@pytest.mark.parametrize("prepare", LEGAL)
def test_gradients_that_are_the_same_on_all_ranks_are_used(prepare):
    def body(comm):
        loop = Loop(comm)
        prepare(loop)
        before = [p.detach().clone() for p in loop.parameters]
        gradients = [None if p.grad is None else p.grad.clone() for p in loop.parameters]
        loop.step()
        for parameter, old, gradient in zip(loop.parameters, before, gradients, strict=True):
            expected = old if gradient is None else old.sub(gradient, alpha=0.1)
            torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-6)
        return [p.tolist() for p in loop.parameters]

    first, second = threads.run(2, body)
    assert first == second


def test_one_rank_may_use_any_gradient():
    def body(comm):
        loop = Loop(comm)
        for prepare in REFUSED:
            prepare(loop)
            loop.step()
        return True

    assert threads.run(1, body) == [True]


@pytest.mark.parametrize("hand", [False, True])
def test_a_parameter_that_no_rank_has_used_may_not_have_a_local_gradient(hand):
    def body(comm):
        loop = Loop(comm, unused="allow")
        loop.backward(both=False)
        if hand:
            loop.set_by_hand(loop.model.second.bias)
        refused = pytest.raises(TrainingError, match=r"\.grad of second\.bias")
        with refused if hand else contextlib.nullcontext():
            loop.step()
        loop.clear()
        loop.backward()
        loop.step()
        return [p.tolist() for p in loop.parameters]

    first, second = threads.run(2, body)
    assert first == second


def test_autograd_grad_reduces_nothing():
    def body(comm):
        loop = Loop(comm, unused="allow")
        gradients = torch.autograd.grad(loop.loss(), loop.parameters)
        assert all(p.grad is None for p in loop.parameters)
        own = Two()
        (own(torch.full((1, 2), comm.rank + 1.0)).square().sum()).backward()
        expected = [p.grad for p in own.parameters() if p.grad is not None]
        return all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))

    assert threads.run(2, body) == [True, True]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("how", ["backward", "local_backward", "set_by_autograd"])
def test_gradients_that_a_closure_leaves_must_be_reduced(kind, how):
    def body(comm):
        loop = Loop(comm, kind)
        before = [p.detach().clone() for p in loop.parameters]

        def closure():
            loop.clear()
            getattr(loop, how)()
            return loop.loss().detach()

        refused = contextlib.nullcontext() if how == "backward" else pytest.raises(TrainingError, match=r"of .*weight")
        for _ in range(2):
            with refused:
                loop.optimizer.step(closure)
        assert all(map(torch.equal, loop.parameters, before)) == (how != "backward")
        return [p.tolist() for p in loop.parameters]

    first, second = threads.run(2, body)
    assert first == second


def test_a_parameter_frozen_at_the_build_cannot_be_trained_later():
    def body(comm):
        model = Two()
        model.first.requires_grad_(False)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=comm)
        x = torch.full((1, 2), comm.rank + 1.0)
        model(x).sum().backward()
        optimizer.step()
        model.first.requires_grad_(True)
        model(x).sum().backward()
        with pytest.raises(TrainingError, match=r"first\.weight.*frozen when") as caught:
            optimizer.step()
        return str(caught.value)

    assert "requires_grad_(True)" in threads.run(2, body)[0]


def unfrozen_and_added(loop):
    for parameter in loop.model.second.parameters():
        parameter.requires_grad_(True)
    loop.inner.add_param_group({"params": list(loop.model.second.parameters())})


def given_a_stranger(loop):
    stranger = nn.Parameter(torch.ones(2))
    loop.inner.add_param_group({"params": [stranger]})
    stranger.grad = torch.full((2,), loop.rank + 1.0)


@pytest.mark.parametrize(
    ("change", "name"), [(unfrozen_and_added, "second.weight"), (given_a_stranger, "without a name")]
)
def test_parameters_added_to_the_optimizer_later_are_refused_unless_reduced(change, name):
    def body(comm):
        model = Two()
        model.second.requires_grad_(False)
        loop = Loop(comm, model=model)
        change(loop)
        loop.backward()
        before = [p.detach().clone() for p in loop.parameters]
        with pytest.raises(TrainingError, match=rf"\.grad of .*{name}.* frozen when"):
            loop.step()
        assert all(map(torch.equal, loop.parameters, before))

    threads.run(2, body)


def present(gradient):
    assert gradient is not None
    return gradient


def test_gradients_kept_by_the_loop_are_not_overwritten():
    """Torch makes a new tensor where `.grad` is None: a loop may still hold the old one."""

    def body(comm):
        loop = Loop(comm)
        loop.backward()
        kept = [present(p.grad) for p in loop.parameters]
        kept_too: list[torch.Tensor] = []
        copies = [each.clone() for each in kept]
        loop.clear()
        for _ in range(2):
            (3 * loop.loss()).backward()
            assert all(map(torch.equal, kept, copies))
            kept_too += [present(p.grad) for p in loop.parameters]
            assert not any(map(torch.equal, kept_too[-len(kept) :], copies))
            loop.step()
            loop.clear()
        return [each.tolist() for each in (*kept, *kept_too, *loop.parameters)]

    first, second = threads.run(2, body)
    assert first == second


def test_parameters_belong_to_their_last_wrapper_only():
    def body(comm):
        first = Loop(comm)
        first.backward()
        first.step()
        first.clear()
        second = Loop(comm, model=first.model)
        second.backward()
        for use in (first.step, first.local_backward):
            with pytest.raises(TrainingError, match="a newer one that has taken over"):
                use()
        second.step()
        return [p.tolist() for p in second.parameters]

    first, second = threads.run(2, body)
    assert first == second
