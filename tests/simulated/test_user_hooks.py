"""Laws of a user's gradient hooks: they see this rank's gradient, and what they write to it is used."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fourfold as ff
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.torch_kit.grad_hooks import register_last_hook
from fourfold.words.errors import FourfoldError, TaskError, TrainingError

RATE = 0.5
PLANS = [
    {},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"update": "in_backward"},
    {"update": "in_forward"},
    {"precision": "bf16"},
]


def model():
    made = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    return made


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(6, 4), draw(6, 2)


def loss(outputs, targets):
    return F.mse_loss(outputs, targets, reduction="none")


def gradients(size, *ranks):
    """By name: what `ranks`, some of `size` ranks, add to the gradient of the global mean."""
    theirs = model()
    (sum(loss(theirs(x), y).mean() for x, y in map(batch, ranks)) / size).backward()
    return {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}


def register(module, hook):
    return [p.register_post_accumulate_grad_hook(hook) for p in module.parameters()]


def parallel(comm, module, **fields):
    """A call that trains `module` on this rank's batch, with `parallelize`."""
    plan = ff.Plan(dp=comm.size, bucket_bytes=8, **fields)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=RATE)  # noqa: E731
    step = TrainStep(module, loss, sgd, plan=plan, communicator=comm, clip=None)

    def train():
        step(batch(comm.rank))
        step.flush()

    return step, train


def wrapped(comm, module, **fields):
    """The same with `DistributedOptimizer`."""
    plan = ff.Plan(dp=comm.size, bucket_bytes=8, **fields)
    optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=RATE), module, plan, communicator=comm)

    def train():
        x, y = batch(comm.rank)
        optimizer.zero_grad()
        loss(module(x), y).mean().backward()
        optimizer.step()

    return optimizer, train


APIS = [(parallel, fields) for fields in PLANS] + [(wrapped, {})]


@pytest.mark.covering
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("api", "fields"), APIS)
def test_a_hook_sees_the_gradient_of_its_rank_whenever_it_is_registered(api, fields, size, late):
    def body(comm):
        module, seen = model(), {}
        names = {id(p): name for name, p in module.named_parameters()}

        def record(parameter):
            seen[names[id(parameter)]] = parameter.grad.clone()

        if not late:
            register(module, record)
        kept, train = api(comm, module, **fields)
        if late:
            register(module, record)
        train()
        del kept
        return seen

    for rank, seen in enumerate(threads.run(size, body, hosts=size)):
        # parallelize adds up contributions to the mean; DistributedOptimizer takes the mean of each rank's gradients.
        expected = gradients(1 if api is wrapped else size, rank)
        assert seen.keys() == expected.keys()
        rough = fields.get("precision") == "bf16"
        for name, gradient in seen.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=0, atol=0.1 if rough else 1e-12)


@pytest.mark.covering
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("api", "fields"), [each for each in APIS if "precision" not in each[1]])
def test_gradients_that_a_hook_writes_are_used(api, fields, size, late, replaces):
    def double(parameter):
        if replaces:
            parameter.grad = parameter.grad * 2
        else:
            parameter.grad.mul_(2)

    def body(comm):
        module = model()
        if not late:
            register(module, double)
        kept, train = api(comm, module, **fields)
        if late:
            register(module, double)
        train()
        weights = dict(kept.named_weights()) if api is parallel else dict(module.named_parameters())
        return {name: weight.detach().clone() for name, weight in weights.items()}

    start, mean = dict(model().named_parameters()), gradients(size, *range(size))
    for weights in threads.run(size, body, hosts=size):
        for name, weight in weights.items():
            expected = start[name].detach().sub(mean[name], alpha=2 * RATE)
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("api", "fields"), [each for each in APIS if "precision" not in each[1]])
def test_a_hook_of_several_gradients_sees_those_of_its_rank_and_changes_nothing(api, fields, size, mode):
    def body(comm):
        module, seen = model(), []
        record = lambda grads: seen.append([each.clone() for each in grads] if mode == "all" else grads.clone())  # noqa: E731
        handle = torch.autograd.graph.register_multi_grad_hook(list(module.parameters()), record, mode=mode)
        kept, train = api(comm, module, **fields)
        train()
        handle.remove()
        weights = dict(kept.named_weights()) if api is parallel else dict(module.named_parameters())
        return seen, {name: weight.detach().clone() for name, weight in weights.items()}

    start, mean = dict(model().named_parameters()), gradients(size, *range(size))
    for rank, (seen, weights) in enumerate(threads.run(size, body, hosts=size)):
        assert len(seen) == 1
        if mode == "all":
            expected = gradients(1 if api is wrapped else size, rank).values()
            assert all(map(torch.allclose, seen[0], expected))
        for name, weight in weights.items():
            expected_weight = start[name].detach().sub(mean[name], alpha=RATE)
            torch.testing.assert_close(weight, expected_weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("api", [parallel, wrapped])
def test_a_removed_hook_is_not_called(api):
    def body(comm):
        module, calls = model(), []
        early = register(module, lambda p: calls.append("early"))
        kept, train = api(comm, module)
        late = register(module, lambda p: calls.append("late"))
        train()
        counts = [(calls.count("early"), calls.count("late"))]
        for handle in early:
            handle.remove()
        train()
        counts.append((calls.count("early"), calls.count("late")))
        for handle in late:
            handle.remove()
        train()
        del kept
        return [*counts, (calls.count("early"), calls.count("late"))]

    assert threads.run(2, body) == [[(4, 4), (4, 8), (4, 8)]] * 2


@pytest.mark.parametrize("unused", ["error", "allow"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("api", [parallel, wrapped])
def test_a_hook_that_sets_a_gradient_to_none_is_refused_by_name(api, size, unused):
    def clear(parameter):
        parameter.grad = None

    def body(comm):
        module = model()
        kept, train = api(comm, module, unused=unused)
        module.get_parameter("2.bias").register_post_accumulate_grad_hook(clear)
        before = copy.deepcopy(module)
        with pytest.raises(TaskError, match=r"a hook has set \.grad of 2\.bias to None"):
            train()
        with pytest.raises(FourfoldError):  # and the ranks do not continue as if nothing had happened
            train()
        del kept
        return all(map(torch.equal, module.parameters(), before.parameters()))

    assert threads.run(size, body) == [True] * size


class ScaledWithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0] * ctx.saved_tensors[0], None


class Scaled(nn.Sequential):
    """Its last weight gets None from backward, or, where it is used once more in another way, half of its gradient."""

    used_again = False

    def __init__(self):
        super().__init__(*model())
        self.scale = nn.Parameter(torch.full((2,), 0.5, dtype=torch.float64))

    def forward(self, input):
        return ScaledWithoutGradient.apply(super().forward(input), self.scale) + (self.scale if self.used_again else 0)


class ScaledAgain(Scaled):
    used_again = True


@pytest.mark.covering
@pytest.mark.parametrize("kind", [Scaled, ScaledAgain])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("api", "fields"), [
    *((each, fields) for each, fields in APIS if "precision" not in fields and fields.get("update") != "in_backward"),
    (parallel, {"microbatches": 2}), (parallel, {"microbatches": 2, "zero": 2}),
])  # fmt: skip
def test_a_function_that_gives_a_weight_no_gradient_trains_as_an_unused_weight(api, fields, size, kind):
    theirs = kind()
    (sum(loss(theirs(x), y).mean() for x, y in map(batch, range(size))) / size).backward()

    def body(comm):
        module = kind()
        kept, train = api(comm, module, unused="allow", **fields)
        train()
        weights = dict(kept.named_weights()) if api is parallel else dict(module.named_parameters())
        return {name: weight.detach().clone() for name, weight in weights.items()}

    for weights in threads.run(size, body, hosts=size):
        for name, p in theirs.named_parameters():
            expected = p.detach() if p.grad is None else p.detach().sub(p.grad, alpha=RATE)
            torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fields", [{}, {"zero": 2}, {"microbatches": 2}], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_a_function_that_gives_a_weight_no_gradient_is_refused_as_that(size, fields):
    def body(comm):
        kept, train = parallel(comm, Scaled(), **fields)
        with pytest.raises(TrainingError, match="parameter scale got no gradient"):
            train()
        del kept

    threads.run(size, body)


def test_a_model_with_our_hooks_is_copied_without_them():
    def body(comm):
        module = model()
        kept, _ = parallel(comm, module)
        other = copy.deepcopy(module)
        del kept
        return all(not p._post_accumulate_grad_hooks for p in other.parameters())

    assert threads.run(1, body) == [True]


def test_our_own_hooks_run_in_the_order_of_registration():
    calls = []
    parameter = torch.nn.Parameter(torch.ones(1))
    for name in ("first", "second", "third"):
        register_last_hook(parameter, lambda _, name=name: calls.append(name))
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("the user's"))
    parameter.sum().backward()
    assert calls == ["the user's", "first", "second", "third"]
    calls.clear()
    other = torch.nn.Parameter(torch.ones(1))
    for name in ("first", "second", "third"):
        register_last_hook(other, lambda _, name=name: calls.append(name))
    other.sum().backward()
    assert calls == ["first", "second", "third"]
