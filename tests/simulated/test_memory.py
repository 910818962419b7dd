"""Laws of the memory of long-lived buffers: the counted bytes equal the formula's."""

import functools
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.axes.tensor.attach.axis import place_shards
from fourfold.model.weights import model_specs, update_spec
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.testing.threads import ThreadCommunicator
from fourfold.torch_kit import memory
from tests import pairs

pytestmark = pytest.mark.usefixtures("without_dry_run")

OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "descent": functools.partial(torch.optim.SGD, lr=0.1),
    "LAMB": functools.partial(ff.optim.LAMB, lr=0.1),
}
WITHIN = 0.05
RULES = {"0": "column", "2": "row", "4": "column", "6": "row"}  # the last layer is whole


def model() -> nn.Module:
    """A model of 330,000 parameters."""
    return nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(256, 256), nn.Tanh())])


def _step(plan: Plan, comm: ThreadCommunicator, optimizer: str = "AdamW") -> TrainStep:
    """A train step after two steps."""
    options: dict[str, Any] = {"plan": plan, "communicator": comm, "clip": None, "tensor": RULES}
    step = TrainStep(
        model(), lambda outputs, targets: (outputs - targets).square().sum(-1), OPTIMIZERS[optimizer], **options
    )
    for _ in range(2):
        step((torch.full((4, 256), 0.5 + step.dp_index), torch.zeros(4, 256)))
    step.flush()
    return step


def _formula(plan: Plan, optimizer: str, hosts: int) -> float:
    module = model()
    made = OPTIMIZERS[optimizer](module.parameters())
    topology = Topology.regular(hosts=hosts, ranks_per_host=plan.mesh.size // hosts)
    update = update_spec(module, made, counts_states=True)
    specs = model_specs(module, made, place_shards(module, RULES, plan.tensor_spec))
    return lower(plan, specs, topology, update).host_memory.total


def _compare(plan: Plan, optimizer: str = "AdamW", *, hosts: int = 1) -> None:
    def body(comm: ThreadCommunicator) -> int:
        step = _step(plan, comm, optimizer)
        comm.all_gather_json(None)
        counted = memory.memory_use().total_bytes - before
        comm.all_gather_json(None)
        del step  # not before every rank has counted
        return counted

    formula = _formula(plan, optimizer, hosts)
    gc.collect()
    before = memory.memory_use().total_bytes
    for counted in threads.run(plan.mesh.size, body, hosts=hosts):
        assert counted / hosts == pytest.approx(formula, rel=WITHIN)


@pytest.mark.parametrize("fields", pairs.grid(
    zero=(0, 1, 2, 3), dp=(4, 2, 1), precision=("keep", "bf16", "fp16"), transport=("auto", "gloo")
))  # fmt: skip
def test_the_memory_use_of_a_host_equals_the_formula(fields: dict[str, Any]) -> None:
    _compare(Plan(**fields, microbatches=2, bucket_bytes=2**18))


@pytest.mark.parametrize(("zero", "shard", "precision"), [
    (0, None, "keep"), (0, None, "bf16"), (1, None, "bf16"), (1, 2, "keep"), (2, None, "keep"), (2, 2, "bf16"),
    (3, None, "bf16"), (3, 2, "keep"),
])  # fmt: skip
def test_the_memory_use_of_each_of_two_hosts_equals_the_formula(zero: int, shard: int | None, precision: str) -> None:
    _compare(Plan(dp=4, zero=zero, shard=shard, precision=precision, bucket_bytes=2**18), hosts=2)


@pytest.mark.parametrize("fields", pairs.grid(
    zero=(0, 1, 2, 3), mesh=((1, 2), (1, 4), (2, 2), (2, 4)),
    precision=("keep", "bf16"), update=("after", "in_forward"),
))  # fmt: skip
def test_the_memory_use_of_tensor_ranks_equals_the_formula(fields: dict[str, Any]) -> None:
    dp, tp = fields.pop("mesh")
    _compare(Plan(dp=dp, tp=tp, **fields, bucket_bytes=2**18))


@pytest.mark.parametrize(("update", "size", "zero"), [
    ("in_backward", 1, 0), ("in_backward", 2, 2), ("in_forward", 2, 1), ("in_forward", 1, 0),
])  # fmt: skip
def test_the_memory_use_of_fused_updates_equals_the_formula(update: str, size: int, zero: int) -> None:
    _compare(Plan(dp=size, zero=zero, update=update, bucket_bytes=2**18))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("zero", [0, 1])
def test_the_states_of_every_kind_of_optimizer_are_counted(optimizer: str, zero: int) -> None:
    _compare(Plan(dp=2, zero=zero, bucket_bytes=2**18), optimizer)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_reference_weights_of_local_sgd_are_counted(momentum: float) -> None:
    _compare(Plan(dp=2, sync="local", local_steps=2, outer_momentum=momentum, bucket_bytes=2**18))


def test_freed_buffers_are_not_counted() -> None:
    def body(comm: ThreadCommunicator) -> None:
        _step(Plan(dp=2, zero=2, bucket_bytes=2**18), comm)

    gc.collect()
    before = memory.memory_use()
    threads.run(2, body)
    gc.collect()
    assert memory.memory_use() == before
    large = memory.allocate_private(2 * memory.HUGE_PAGE_MIN_BYTES, torch.uint8, torch.device("cpu"))
    view = large[1:]
    del large
    assert memory.memory_use().private_bytes == before.private_bytes + 2 * memory.HUGE_PAGE_MIN_BYTES
    del view
    assert memory.memory_use() == before


def test_checks_of_a_later_step_leave_what_an_earlier_one_keeps(monkeypatch):
    calls = list[tuple[int, int]]()

    def mallopt(option: int, value: int) -> int:
        calls.append((option, value))
        return 1

    monkeypatch.setattr(memory, "_malloc", lambda name: mallopt if name == "mallopt" else lambda _: None)
    monkeypatch.setattr(memory, "_kept_for_good", threading.Event())
    kept = [(memory.MMAP_MAX, 0), (memory.TRIM_THRESHOLD, 2**31 - 1)]
    with memory.freed_memory_kept(torch.device("cpu")):
        assert calls == kept
    assert calls[2:] == [(memory.TRIM_THRESHOLD, 2**17), (memory.MMAP_MAX, 2**16)]
    memory.tune_freed_memory(torch.device("cpu"), 1)
    with memory.freed_memory_kept(torch.device("cpu")):
        pass
    assert calls[4:] == kept
