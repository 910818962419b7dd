"""Laws of the drift check: replicas that differ in one bit are found and reported. Ranks are threads."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fourfold.plan.intervals import DRIFT_CHECK
from fourfold.plan.plan import Plan
from fourfold.proof.digests import weights
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.torch_kit import fingerprint
from fourfold.torch_kit.fingerprint import device_fingerprint, fingerprints
from fourfold.trainer import train as train_module
from fourfold.words.errors import DivergenceError, SettingError
from fourfold.words.task import Data, Task
from tests.cases import Case, batches, local_batch, loss, model, optimizer

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(batch_sizes=(12, 12, 12, 12, 12), bucket_bytes=1500)
FIRST = "first.weight"


def build(case: Case, comm: Any, *, every: int = 2) -> TrainStep:
    return TrainStep(
        model(case.model),
        loss(case),
        optimizer(case),
        plan=case.plan(comm.size),
        communicator=comm,
        clip=case.clip,
        drift_check=every,
    )


def train(case: Case, step: TrainStep, steps: range) -> None:
    for number in steps:
        step(local_batch(batches(case)[number], step.plan.dp, step.dp_index))


@torch.no_grad()
def disturb(step: TrainStep, name: str) -> None:
    """Flip the last bit of the first element of a weight that this rank holds."""
    weight = step.weight_shards[name].reshape(-1)
    weight[:1] = torch.nextafter(weight[:1], torch.full_like(weight[:1], 9.0))


# Name: plan fields, ranks, hosts, the rank whose bit is flipped, the ranks that the error names.
SETUPS: dict[str, tuple[dict[str, Any], int, int, int, str]] = {
    "shared memory": ({}, 3, 1, 1, "rank 1 .*ranks 0 and 2"),
    "gloo": ({"transport": "gloo"}, 2, 1, 1, "rank 1 .*rank 0"),
    "hosts": ({}, 4, 2, 3, "rank 3 .*ranks 0, 1 and 2"),
    "zero 1": ({"zero": 1, "transport": "gloo"}, 3, 1, 2, "rank 2 .*ranks 0 and 1"),
    "zero 2, hosts": ({"zero": 2}, 4, 2, 2, "rank 2 .*rank 0"),
    "zero 3, hybrid": ({"zero": 3, "shard": 2, "transport": "gloo"}, 4, 1, 2, "rank 2 .*rank 0"),
    "master weights": ({"precision": "bf16", "model": "lm", "batch_sizes": (4,) * 5}, 2, 1, 1, "rank 1 .*rank 0"),
    "local steps": ({"sync": "local", "local_steps": 2}, 3, 1, 1, "rank 1 .*ranks 0 and 2"),
    "late update": ({"update": "in_forward"}, 3, 1, 1, "rank 1 .*ranks 0 and 2"),
    "sequence": ({"model": "lm", "cp": 2, "batch_sizes": (4,) * 5}, 2, 1, 1, "rank 1 .*rank 0"),
}


@pytest.mark.parametrize("how", SETUPS)
def test_replicas_that_differ_in_one_bit_are_found_and_named_on_every_rank(how):
    fields, size, hosts, drifted_rank, named_ranks = SETUPS[how]
    case = dataclasses.replace(CASE, **fields)

    def body(comm):
        step = build(case, comm)
        train(case, step, range(2))
        step.flush()
        name = FIRST if case.model == "mlp" else next(iter(step.weight_shards))
        if comm.rank == drifted_rank:
            disturb(step, name)
        with pytest.raises(DivergenceError, match=f"{name}.*({named_ranks})"):
            step.check_drift()
        return name

    assert len(set(threads.run(size, body, hosts=hosts))) == 1


@pytest.mark.parametrize("how", SETUPS)
def test_equal_replicas_pass_every_drift_check(how):
    fields, size, hosts, _, _ = SETUPS[how]
    case = dataclasses.replace(CASE, **fields)
    found = []

    def body(comm):
        step = build(case, comm, every=1)
        compare = step._checks._drift_checker.compare

        def counting(*args, **options):
            found.append(comm.rank)
            return compare(*args, **options)

        step._checks._drift_checker.compare = counting
        train(case, step, range(4))
        return True

    assert threads.run(size, body, hosts=hosts) == [True] * size
    assert len(found) == size * (2 if "sync" in fields else 4)


@pytest.mark.parametrize("steps", [1, 3])
def test_an_initial_difference_is_found_after_the_first_synchronized_step(steps):
    case = dataclasses.replace(CASE, **({"sync": "local", "local_steps": steps} if steps > 1 else {}))

    def body(comm):
        step = build(case, comm, every=1000)
        if steps == 1:  # with local steps hooks are refused, and averages hide a difference
            step.optimizer.register_step_post_hook(lambda *_: disturb(step, FIRST) if comm.rank else None)
            with pytest.raises(DivergenceError, match=f"the weights after step 1\n  {FIRST}"):
                train(case, step, range(1))
            return []
        compare = step._checks._drift_checker.compare
        found: list[str] = []
        step._checks._drift_checker.compare = lambda tensors, when, **more: (
            found.append(when),
            compare(tensors, when, **more),
        )[1]
        train(case, step, range(5))
        return found

    assert threads.run(2, body) == [[] if steps == 1 else ["after step 3"]] * 2


def test_drift_is_found_at_the_next_check():
    def body(comm):
        step = build(CASE, comm, every=3)
        train(CASE, step, range(1))
        if comm.rank:
            disturb(step, "head.bias")
        train(CASE, step, range(1, 2))
        with pytest.raises(DivergenceError, match="after step 3") as caught:
            train(CASE, step, range(2, 3))
        return str(caught.value)

    first, second = threads.run(2, body)
    assert first == second
    assert "head.bias" in first  # the difference has reached the gradients of the other ranks too


def test_frozen_weights_are_compared_too():
    case = dataclasses.replace(CASE, model="frozen")

    def body(comm):
        step = build(case, comm)
        with torch.no_grad():
            if comm.rank:
                step.model.get_parameter("second.bias")[0] += 1.0
        with pytest.raises(DivergenceError, match=r"second\.bias.*by at most 1"):
            step.check_drift()
        return True

    assert threads.run(2, body) == [True, True]


def test_with_local_batch_norm_frozen_weights_may_differ():
    case, plan = dataclasses.replace(CASE, model="frozen"), Plan(dp=2, batch_norm="local")

    def body(comm):
        step = TrainStep(model(case.model), loss(case), optimizer(case), plan=plan, communicator=comm)
        wrapped = model(case.model)
        inner = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
        checked = [step, DistributedOptimizer(inner, wrapped, plan, communicator=comm)]
        for each in (step.model, wrapped):
            each.get_parameter("second.bias").data[0] += comm.rank
        for each in checked:
            each.check_drift()
        return True

    assert threads.run(2, body) == [True, True]


def test_frozen_weights_of_small_integers_are_compared():
    def body(comm):
        mine = nn.Linear(3, 2)
        mine.codes = nn.Parameter(torch.tensor([3, 200, 7], dtype=torch.uint8), requires_grad=False)
        inner = torch.optim.SGD(mine.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, mine, Plan(dp=2), communicator=comm, drift_check=1)
        mine.codes.data[1] = 100 * (1 + comm.rank)
        mine(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(DivergenceError, match=r"codes \(frozen weights\).*by at most 100, where weights reach 200"):
            mine(torch.ones(1, 3)).sum().backward()
        return True

    assert threads.run(2, body) == [True, True]


def test_weights_that_exist_once_per_host_have_no_replica_there():
    case = dataclasses.replace(CASE, zero=1)

    def body(comm):
        step = build(case, comm)
        if comm.rank:
            with torch.no_grad():
                step.model.get_parameter(FIRST).add_(1.0)  # the ranks share this memory
        step.check_drift()
        return True

    assert threads.run(2, body) == [True, True]


def test_swapped_rows_of_a_weight_are_found():
    def body(comm):
        step = build(CASE, comm)
        if comm.rank:
            with torch.no_grad():
                weight = step.model.get_parameter("second.weight")
                weight[[0, 1]] = weight[[1, 0]]
        with pytest.raises(DivergenceError, match=r"second\.weight"):
            step.check_drift()
        return True

    assert threads.run(2, body) == [True, True]


def test_a_negative_number_of_steps_between_checks_is_refused():
    with pytest.raises(SettingError, match="drift_check = -1"):
        threads.run(2, lambda comm: build(CASE, comm, every=-1))


def test_drift_check_0_makes_no_check(monkeypatch):
    def body(comm):
        train(CASE, build(CASE, comm, every=0), range(4))
        return True

    monkeypatch.setattr(weights, "fingerprints", None)
    assert threads.run(2, body) == [True, True]


def test_drift_between_different_machines_warns_again_when_it_has_grown_tenfold(monkeypatch):
    monkeypatch.setattr(weights, "_machine", lambda comm: f"machine {comm.rank}")
    warned: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda text, *_, **__: warned.append(str(text)))

    def body(comm):
        step = build(CASE, comm)
        sizes = []
        for size in (1e-6, 2e-6, 1e-3):
            if comm.rank:
                with torch.no_grad():
                    step.model.get_parameter(FIRST)[0, 0] += size
            step.check_drift()
            sizes.append(comm.all_gather_json(len(warned))[0])
        return sizes

    first, second = threads.run(2, body)
    assert first == second == [1, 1, 2]
    assert "first.weight" in warned[0]
    assert "1e-06" in warned[0]
    assert "machine 0" in warned[0]
    assert "machine 1" in warned[0]


def test_drift_between_equal_machines_is_an_error_even_if_others_differ(monkeypatch):
    monkeypatch.setattr(weights, "_machine", lambda comm: "old" if comm.rank == 0 else "new")

    def body(comm):
        step = build(CASE, comm)
        if comm.rank == 2:
            disturb(step, FIRST)
        with pytest.raises(DivergenceError, match=r"rank 2 .*ranks 0 and 1"):
            step.check_drift()
        return True

    assert threads.run(3, body) == [True] * 3


def test_the_wrapped_optimizer_checks_in_the_backward_after_drift_check_steps():
    def body(comm):
        made = nn.Linear(3, 2).double()
        inner = torch.optim.SGD(made.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, made, Plan(dp=2), communicator=comm, drift_check=3)
        inputs = torch.ones(1, 3, dtype=torch.float64)
        for number in range(3):
            made(inputs).sum().backward()
            optimizer.step()
            if comm.rank and number == 1:
                with torch.no_grad():
                    made.bias[0] += 0.5
        with pytest.raises(DivergenceError, match=r"after step 3\n  bias.*by at most 0\.5"):
            made(inputs).sum().backward()
        return True

    assert threads.run(2, body) == [True, True]


def bits(tensor: torch.Tensor, how: str) -> int:
    return fingerprints([tensor])[0] if how == "cpu" else int(device_fingerprint(tensor))


@pytest.mark.parametrize("how", ["cpu", "device"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_fingerprint_depends_on_every_bit_and_its_position(how, data):
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]))
    length = data.draw(st.integers(2, 70))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    tensor = torch.randn(length, generator=generator, dtype=torch.float32).to(dtype)
    i, j = data.draw(st.permutations(range(length)))[:2]
    tensor[j] = data.draw(st.sampled_from([1.0, 0.0])) + tensor[j]
    before = bits(tensor, how)
    assert before == bits(tensor.clone(), how)
    swapped = tensor.clone()
    swapped[[i, j]] = tensor[[j, i]]
    assert (bits(swapped, how) == before) == (tensor[i] == tensor[j]).item()
    opposite = tensor.clone()
    opposite[i], opposite[j] = 1.0, -1.0
    mirrored = tensor.clone()
    mirrored[i], mirrored[j] = -1.0, 1.0
    assert bits(opposite, how) != bits(mirrored, how)
    raw = tensor.clone().view(torch.uint8)
    place, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    assert bits(raw.view(dtype), how) != before


def test_a_fingerprint_does_not_depend_on_its_chunks(monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    whole = device_fingerprint(tensor)
    monkeypatch.setattr(fingerprint, "CHUNK_WORDS", 64)
    assert torch.equal(device_fingerprint(tensor), whole)
    assert int(device_fingerprint(torch.zeros(0))) == int(device_fingerprint(torch.zeros(0)))
    assert bits(torch.zeros(3), "cpu") != bits(-torch.zeros(3), "cpu")
    strided = tensor.view(10, 100).T
    for how in ("cpu", "device"):
        assert bits(strided, how) == bits(strided.contiguous(), how)


def test_train_passes_drift_check_to_parallelize(monkeypatch, tmp_path):
    passed = []

    class Stopped(Exception):
        pass

    def parallelize(*_, drift_check, **__):
        passed.append(drift_check)
        raise Stopped

    monkeypatch.setattr(train_module, "parallelize", parallelize)
    task = Task(
        model=lambda: model("mlp"),
        loss=loss(CASE),
        data=lambda: Data(train=[batches(CASE)[0]]),
        optimizer=optimizer(CASE),
        steps=1,
    )
    settings_by_run: list[dict[str, Any]] = [{"drift_check": 7}, {"drift_check": 0}, {}]
    for options in settings_by_run:
        with pytest.raises(Stopped):
            train_module.train(task, folder=str(tmp_path), **options)
    assert passed == [7, 0, DRIFT_CHECK]
    with pytest.raises(SettingError, match="drift_check = -1"):
        train_module.train(task, folder=str(tmp_path), drift_check=-1)


@pytest.mark.parametrize("drift_check", [0, 5])
def test_a_run_checks_drift_at_its_end_unless_drift_check_is_0(monkeypatch, tmp_path, drift_check):
    checked = []
    monkeypatch.setattr(TrainStep, "check_drift", lambda step: checked.append(step.num_steps))
    task = Task(
        model=lambda: model("mlp"),
        loss=loss(CASE),
        data=lambda: Data(train=[(torch.zeros(16, dtype=torch.float64), torch.tensor(1))] * 4),
        optimizer=optimizer(CASE),
    )
    train_module.train(
        task, Plan(), steps=3, batch_size=2, folder=str(tmp_path), checkpoint_every=0, drift_check=drift_check
    )
    assert checked == ([3] if drift_check else [])


class Counts(nn.Module):
    """A forward that writes a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, inputs: Any) -> Any:
        self.calls.fill_(1.0)
        return self.layer(inputs)


@pytest.mark.parametrize("fields", [{"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "pp": 2, "microbatches": 2}])
def test_buffers_that_are_saved_are_compared_between_data_ranks(fields):
    plan = Plan(**fields)

    def body(comm):
        model = nn.Sequential(Counts(), Counts())
        step = TrainStep(model, torch.nn.functional.mse_loss, torch.optim.SGD, plan=plan, communicator=comm)
        step((torch.ones(4, 4) + step.dp_index, torch.ones(4, 4)))
        buffers = dict(model.named_buffers())  # of this rank's stage
        for name in buffers.keys() & {"0.cache", "1.cache"}:
            buffers[name] += step.dp_index
        step.check_drift()
        for name in buffers.keys() & {"0.calls", "1.calls"}:
            buffers[name][1] += step.dp_index
        with pytest.raises(DivergenceError, match=r"calls \(buffers\): rank.* from rank.* by at most 1, where"):
            step.check_drift()
        return True

    assert all(threads.run(plan.mesh.size, body))
