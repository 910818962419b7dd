"""Laws of models that differentiate within forward, with weights sharded between hosts (zero 3)."""

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import TaskError


class Energy(nn.Module):
    """Returns a derivative of two layers by their inputs, computed by the function of this name."""

    def __init__(self, way):
        super().__init__()
        self.first, self.second, self.way = nn.Linear(3, 4), nn.Linear(4, 1), way
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.double()

    def energy(self, x):
        return self.second(torch.tanh(self.first(x))).sum()

    def forward(self, x):
        return WAYS[self.way](self, x)


def autograd(model, x):
    x = x.requires_grad_()
    return torch.autograd.grad(model.energy(x), x, create_graph=True)[0]


def autograd_of_parameters(model, x):
    gradients = torch.autograd.grad(model.energy(x), list(model.parameters()), create_graph=True)
    return x * sum(gradient.square().sum() for gradient in gradients)


def of_parameters(model, x):
    def energy(parameters):
        return torch.func.functional_call(model.second, parameters, (torch.tanh(model.first(x)),)).sum()

    return x * torch.func.grad(energy)(dict(model.second.named_parameters()))["weight"].sum()


REFUSED = {
    "grad": lambda model, x: torch.func.grad(model.energy)(x),
    "grad by sample": lambda model, x: torch.func.vmap(torch.func.grad(model.energy))(x),
    "jacrev": lambda model, x: torch.func.vmap(torch.func.jacrev(lambda y: torch.tanh(model.first(y))))(x).sum(1),
    "vjp": lambda model, x: torch.func.vjp(model.energy, x)[1](torch.ones((), dtype=x.dtype))[0],
    "hessian": lambda model, x: torch.func.vmap(torch.func.hessian(model.energy))(x).sum(2),
    "grad of parameters": of_parameters,
}
TRAINED = {
    "autograd": autograd,
    "autograd of parameters": autograd_of_parameters,
    "vmap": lambda model, x: torch.func.vmap(lambda y: model.energy(y) * y)(x),
    "jvp": lambda model, x: x * torch.func.jvp(lambda y: torch.tanh(model.first(y)), (x,), (x,))[1].sum(),
    "jvp of two layers": lambda model, x: torch.func.jvp(lambda y: model.energy(y) * y, (x,), (x,))[1],
    "jacfwd": lambda model, x: torch.func.vmap(torch.func.jacfwd(lambda y: model.energy(y) * y))(x).sum(1),
}
WAYS = REFUSED | TRAINED
FORWARD_MODE = ("jvp", "jvp of two layers", "jacfwd", "hessian")


def trained(way, *, zero, size=2):
    """Losses of some steps, and the weights after them."""

    def body(comm):
        plan = ff.Plan(dp=size, zero=zero, bucket_bytes=8, unused="allow")
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01)  # noqa: E731
        # A pair is not checked: in some of these models, samples of a batch interact.
        loss = lambda y, t: ((y - t).square().sum(), y.numel())  # noqa: E731
        step = TrainStep(Energy(way), loss, sgd, plan=plan, communicator=comm, clip=None)
        generator = torch.Generator().manual_seed(comm.rank)
        # Forward-mode levels belong to the process, not to a thread, so only one rank may use them.
        samples = 0 if way in FORWARD_MODE and comm.rank else 2
        draw = lambda: torch.randn(samples, 3, generator=generator, dtype=torch.float64)  # noqa: E731
        losses = [step((draw(), draw())).loss for _ in range(3)]
        return losses, {name: weight.detach().clone() for name, weight in step.named_weights()}

    return threads.run(size, body, hosts=size)


@pytest.mark.parametrize("way", TRAINED)
def test_autograd_grad_vmap_and_jvp_train_at_zero_3_as_at_zero_0(way):
    for found, expected in zip(trained(way, zero=3), trained(way, zero=0), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("way", REFUSED)
def test_reverse_transforms_of_torch_func_are_refused_at_zero_3_with_alternatives(way):
    with pytest.raises(TaskError, match=r"torch\.func.* zero = 3 .*torch\.autograd\.grad\(.*zero = 2"):
        trained(way, zero=3)
