"""Laws of devices: each rank has the GPU of its local rank; a model on another one is refused. The GPUs are fake."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fourfold as ff
from fourfold.axes.pipeline.work.chain import find_chain, seeded_segments
from fourfold.comm import init
from fourfold.environment.world import World
from fourfold.step.argument_checks import device_problems
from fourfold.words.errors import LaunchError, SettingError

VARIABLES = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 5 of 8, the second of its host, which has two GPUs."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(init, "init_communicator", lambda: pytest.fail("the ranks have met"))


def model_on(weight: str, bias: str, *, buffer: str = "") -> nn.Linear:
    """A model with tensors on GPUs that this machine does not have: fake ones, without values."""
    model = nn.Linear(2, 2, device="meta")
    with FakeTensorMode():
        model.weight, model.bias = (nn.Parameter(torch.empty(2, device=device)) for device in (weight, bias))
        if buffer:
            model.register_buffer("seen", torch.empty(2, device=buffer))
    return model


@pytest.mark.usefixtures("_two_gpus")
def test_a_ranks_device_is_the_gpu_of_its_local_rank(monkeypatch):
    assert ff.world().device == torch.device("cuda", 1)
    assert not ff.world().is_main
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(LaunchError, match="local rank 2 on a host with 2 GPUs"):
        _ = ff.world().device
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ff.world().is_main


def test_a_process_group_of_the_users_own_leaves_each_rank_on_its_gpu(monkeypatch):
    """Who makes the group may never have called `set_device`."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(init, "existing_world", lambda: World(rank=1, size=2, local_rank=1, local_size=2))
    monkeypatch.setattr(init.process_group_lifecycle, "release_groups_at_exit", lambda **_: None)
    monkeypatch.setattr(init.Communicator, "register", lambda self: self)
    assert init.init_communicator().device == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]


def test_each_microbatch_of_a_pipeline_seeds_its_ranks_own_gpu(monkeypatch):
    """Not the current one, which is another GPU where the user has never called `set_device`."""
    first, own = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (first, own))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    states = [each.get_state() for each in (torch.default_generator, first, own)]
    drawn = []
    for seed in (3, 3, 4):
        with seeded_segments(model, find_chain(model), seed, torch.device("cuda", 1)):
            model(torch.ones(1, 2))
            drawn.append((torch.rand(1).item(), torch.rand(1, generator=own).item()))
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][1] != drawn[2][1]
    for state, generator in zip(states, (torch.default_generator, first, own), strict=True):
        assert torch.equal(generator.get_state(), state)


def test_one_process_without_gpus_is_the_main_one_and_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(init, "init_communicator", lambda: pytest.fail("one process has nobody to meet"))
    assert (ff.world().is_main, ff.world().device) == (True, torch.device("cpu"))
    ff.world().barrier()


WRONG: dict[str, tuple[Any, str]] = {
    "another rank's": (("cuda:0", "cuda:0"), r"2 tensors on cuda:0, weight the first.*need cuda:1.*ff\.world"),
    "two": (("cuda:1", "cuda:0"), "1 tensors on cuda:0, bias the first"),
    "a buffer": (("cuda:1", "cuda:1", "cuda:0"), "1 tensors on cuda:0, seen the first"),
    "none of CUDA": (("xpu:1", "cuda:0"), "2 tensors on cuda:0 and xpu:1"),
}


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("case", WRONG)
def test_a_model_on_a_gpu_that_is_not_the_ranks_is_refused(case):
    (weight, bias, *buffer), message = WRONG[case]
    model = model_on(weight, bias, buffer=buffer[0] if buffer else "")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(SettingError, match=message):
        ff.parallelize(model, None, optimizer)
    with pytest.raises(SettingError, match=message):
        ff.DistributedOptimizer(optimizer, model)


@pytest.mark.usefixtures("_two_gpus")
def test_a_model_on_the_cpu_is_moved_by_parallelize_and_refused_by_the_wrapper():
    cpu = nn.Linear(2, 2)
    assert device_problems(cpu, torch.device("cuda", 1), may_be_on_cpu=True) == []
    with pytest.raises(SettingError, match=r"2 tensors on cpu.*try model\.to\(ff\.world\(\)\.device\)"):
        ff.DistributedOptimizer(torch.optim.SGD(cpu.parameters(), lr=1.0), cpu)


def test_a_model_on_its_ranks_device_is_accepted():
    gpu = model_on("cuda:1", "cuda:1", buffer="cuda:1")
    assert device_problems(gpu, torch.device("cuda", 1), may_be_on_cpu=False) == []
    assert device_problems(nn.Linear(2, 2), torch.device("cpu"), may_be_on_cpu=False) == []


def test_ranks_that_meet_over_gloo_train_on_the_cpu_and_say_how_to_use_gpus():
    (problem,) = device_problems(model_on("cuda:0", "cuda:0"), torch.device("cpu"), may_be_on_cpu=True)
    assert 'init_process_group("nccl")' in problem.attempt
