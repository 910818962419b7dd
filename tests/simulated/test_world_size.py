"""Laws of calls without a plan: they use all ranks as data ranks. Ranks are threads."""

import threading

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.comm import init
from fourfold.tasks import digits
from fourfold.testing import threads
from fourfold.trainer import train as training

pytestmark = pytest.mark.usefixtures("without_dry_run")

LAUNCHER_VARIABLES = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}


@pytest.mark.parametrize("size", [1, 3])
def test_parallelize_without_a_plan_trains_on_the_batches_of_all_ranks(size, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that the test process keeps its number of threads
    local = threading.local()
    monkeypatch.setattr(init, "init_communicator", lambda: local.comm)

    def body(comm):
        local.comm = comm
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        step = ff.parallelize(model, lambda outputs, _: outputs.squeeze(1), lambda p: torch.optim.SGD(p, lr=1.0))
        step((torch.full((1, 1), float(comm.rank)), torch.zeros(1)))
        return step.plan.dp, model.weight.item()

    mean = sum(range(size)) / size
    assert threads.run(size, body) == [(size, pytest.approx(-mean))] * size


def test_train_without_a_plan_uses_all_ranks(monkeypatch):
    class Caught(Exception):
        pass

    def caught(*args, **_):
        raise Caught(args[3])

    for name, value in LAUNCHER_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(training, "parallelize", caught)
    with pytest.raises(Caught) as found:
        ff.train(digits.task())
    assert found.value.args[0].dp == 3
