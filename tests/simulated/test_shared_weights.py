"""Weights that share memory: views of one storage train as on one device, those that overlap are refused by name."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fourfold as ff
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import preflight
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.torch_kit.deferred_init import deferred_model
from fourfold.torch_kit.shared_memory import check_weights_apart
from fourfold.words.errors import TaskError
from fourfold.words.task import Task
from tests import cases

DRAW = torch.Generator().manual_seed(5)
BATCHES = [(torch.randint(0, 5, (4,), generator=DRAW), torch.randint(0, 5, (4,), generator=DRAW)) for _ in range(3)]
sgd = functools.partial(torch.optim.SGD, lr=0.5)
loss = functools.partial(F.cross_entropy, reduction="none")


class Net(nn.Module):
    def __init__(self, change: Callable[["Net"], Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.decoder = nn.Linear(4, 5, bias=False)
        self.double()
        change(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.embedding(tokens)[:, None])[0][:, 0])


def net(change: Callable[[Net], Any]) -> Net:
    with cases.SEED_LOCK:
        torch.manual_seed(1)
        return Net(change)


def alias_data(model: Any) -> None:
    model.decoder.weight.data = model.embedding.weight.data


def overlap_partly(model: Any) -> None:
    flat = torch.randn(36).double()
    model.embedding.weight.data, model.decoder.weight.data = flat[:20].view(5, 4), flat[16:].view(5, 4)


def frozen_alias(model: Any) -> None:
    model.look = nn.Embedding.from_pretrained(model.embedding.weight.detach())


def buffer_alias(model: Any) -> None:
    model.register_buffer("scale", model.decoder.weight.data[0])


def attribute(model: Any) -> None:
    model.ref = [model.decoder.weight.detach()]


def numpy_alias(model: Any) -> None:
    model.embedding.weight.data = torch.from_numpy(model.decoder.weight.detach().numpy())


def tie(model: Any) -> None:
    model.decoder.weight = model.embedding.weight


def flatten(model: Any) -> None:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.data = part.view_as(parameter)


def interleave(model: Any) -> None:
    rows = torch.randn(5, 8).double() * 0.5
    model.embedding.weight.data, model.decoder.weight.data = rows[:, ::2], rows[:, 1::2]


def keep_parameters_in_lists(model: Any) -> None:
    model.weights = [model.decoder.weight, {"embedding": model.embedding.weight}]


def normalize_spectrum(model: Any) -> None:
    nn.utils.spectral_norm(model.decoder)


REFUSED = {
    alias_data: "embedding.weight and decoder.weight",
    overlap_partly: "embedding.weight and decoder.weight",
    frozen_alias: "embedding.weight and look.weight",
    buffer_alias: "decoder.weight and scale",
    attribute: "decoder.weight and ref",
    numpy_alias: "embedding.weight and decoder.weight",
}


@pytest.mark.parametrize("change", REFUSED)
def test_weights_that_overlap_another_tensor_are_refused_by_name(change):
    message = f"{REFUSED[change]} share memory"
    with pytest.raises(TaskError, match=message):
        threads.run(2, lambda comm: TrainStep(net(change), loss, sgd, plan=Plan(dp=2), communicator=comm))
    with pytest.raises(TaskError, match=message):
        ff.verify(net(change), loss, sgd, BATCHES, Plan(microbatches=2))


def test_weights_without_values_are_refused_alike():
    def model() -> nn.Module:
        return Net(alias_data)

    message = f"{REFUSED[alias_data]} share memory"
    with pytest.raises(TaskError, match=message):
        preflight(Task(model=model, loss=loss, optimizer=sgd, data=lambda: ff.Data(train=BATCHES)), Plan())
    with pytest.raises(TaskError, match=message):
        check_weights_apart(deferred_model(model, torch.device("cpu"))[0])


@pytest.mark.covering
@pytest.mark.parametrize("change", [tie, flatten, interleave, keep_parameters_in_lists], ids=lambda each: each.__name__)
@pytest.mark.parametrize("fields", [{}, {"zero": 3}, {"update": "in_backward"}], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_views_of_one_storage_and_tied_weights_train_as_on_one_device(change, fields, size):
    expected = oracle.train(net(change), loss, sgd, BATCHES)

    def body(comm: Any) -> dict[str, Tensor]:
        step = TrainStep(net(change), loss, sgd, plan=Plan(dp=comm.size, **fields), communicator=comm)
        for batch in BATCHES:
            step(cases.local_batch(batch, step.plan.dp, step.dp_index))
        return {name: weight.clone() for name, weight in step.named_weights()}

    for weights in threads.run(size, body, hosts=size):
        for name, weight in weights.items():
            assert (weight - expected.weights[name]).abs().max() <= TOLERANCE


def test_a_weight_that_is_computed_before_each_forward_is_not_refused():
    step = ff.parallelize(net(normalize_spectrum), loss, sgd, Plan())
    assert step(BATCHES[0]).loss > 0
