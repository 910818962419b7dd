"""Laws of the proof: a run that goes on computes nothing that its state has shown already, and no more is believed."""

import functools
import json
import sys
import time
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.axes.context.attach.check import ContextCheck
from fourfold.axes.data.attach.check import GradientCheck
from fourfold.axes.tensor.attach.check import TensorCheck
from fourfold.checkpoint.checkpoints import Checkpoints
from fourfold.plan.plan import Plan
from fourfold.proof import checks
from fourfold.proof.checks import Proof
from fourfold.proof.digests.build import package_items
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from tests.cases import SEED_LOCK

sgd = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The claims of the checks that some rank has made."""
    make, claims = Proof._make, list[str]()

    def recorded(self, check, batch, **options):
        claims.append(check.claim)
        make(self, check, batch, **options)

    monkeypatch.setattr(Proof, "_make", recorded)
    return claims


def build(comm: Any, plan: Plan, *, loss: Any = lm.loss) -> TrainStep:
    with SEED_LOCK:
        torch.manual_seed(0)
        model = lm.LanguageModel(width=16, layers=2, heads=2, kv_heads=2).double()
    return TrainStep(model, loss, sgd, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES)


def tokens(step: TrainStep) -> Any:
    inputs = torch.randint(0, 32, (8, 16), generator=torch.Generator().manual_seed(2))
    rows = slice(step.dp_index * 8 // step.plan.dp, (step.dp_index + 1) * 8 // step.plan.dp)
    positions = torch.arange(16).expand(8, 16)
    return {"tokens": inputs[rows], "positions": positions[rows]}, inputs.roll(-1, 1)[rows]


MESHES = [{"dp": 2}, {"dp": 2, "zero": 3}, {"cp": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "cp": 2, "microbatches": 2}]


@pytest.mark.parametrize("fields", MESHES, ids=str)
def test_a_run_that_goes_on_makes_no_check_again(fields, made, tmp_path):
    plan = Plan(**fields)

    def begin(comm):
        step = build(comm, plan)
        step(tokens(step))
        Checkpoints(tmp_path, step).save()
        step(tokens(step))
        return [weight.clone() for _, weight in step.named_weights()]

    def go_on(comm):
        step = build(comm, plan)
        assert Checkpoints(tmp_path, step).load()
        step(tokens(step))
        return [weight.clone() for _, weight in step.named_weights()]

    size = plan.dp * plan.cp * plan.tp
    (expected, *_) = threads.run(size, begin)
    assert made
    made.clear()
    (found, *_) = threads.run(size, go_on)
    assert not made
    assert all(map(torch.equal, found, expected))


class Counting:
    """Counts its calls and keeps values, in attributes of every kind."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.calls, self.lengths, self.tables, self.last = 0, [0], dict[int, Tensor](), None
        self.total = torch.zeros(())

    def count(self, x: Tensor) -> None:
        self.calls += 1
        self.lengths.append(x.shape[1])
        self.tables.setdefault(x.shape[1], torch.arange(x.shape[1]))
        self.last = x.detach()
        self.total += 1

    def counted(self) -> Any:
        return self.calls, list(self.lengths), list(self.tables), self.last, float(self.total)


class CountingModel(Counting, lm.LanguageModel):
    def forward(self, tokens: Tensor, positions: Tensor, document_starts: Tensor | None = None) -> Tensor:
        self.count(tokens)
        return super().forward(tokens, positions, document_starts)


class CountingLoss(Counting, nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.count(targets)
        return lm.loss(outputs, targets)


@pytest.mark.covering
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fields", [*MESHES, {"dp": 2, "zero": 1}, {"pp": 2}, {"microbatches": 4}], ids=str)
def test_attributes_of_modules_are_afterwards_as_before(fields, training, made):
    plan = Plan(**fields)

    def body(comm):
        with SEED_LOCK:
            torch.manual_seed(0)
            model = CountingModel(width=16, layers=2, heads=2, kv_heads=2).double()
        loss = CountingLoss()
        step = TrainStep(model, loss, sgd, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES)
        step.dry_run(tokens(step), training=training)
        return model.counted(), loss.counted()

    nothing = (0, [0], [], None, 0.0)
    assert set(map(str, threads.run(plan.mesh.size, body))) == {str((nothing, nothing))}
    assert made


@pytest.mark.parametrize(
    ("fields", "check", "fits"),
    [
        ({"dp": 2}, GradientCheck, [False, True]),
        ({"cp": 2}, ContextCheck, [False, True]),
        ({"tp": 2}, TensorCheck, [False, True, False, True]),
    ],
    ids=str,
)
def test_a_check_that_was_made_without_float64_is_made_again(fields, check, fits, made, monkeypatch):
    plan = Plan(**fields)

    def begin(comm):
        step = build(comm, plan)
        step(tokens(step))
        return step.state_dict()["record"]

    def go_on(comm):
        step = build(comm, plan)
        step.load_state_dict({**step.state_dict(), "record": record})
        step(tokens(step))

    with monkeypatch.context() as patched:
        patched.setattr(check, "memory_fits", lambda self: fits)
        record, _ = threads.run(2, begin)
    made.clear()
    threads.run(2, go_on)
    assert check.claim in made


def other_loss(outputs: Any, targets: Any) -> Tensor:
    return lm.loss(outputs, targets)


class OtherHead(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def with_other_class(model: Any) -> None:
    model.head.__class__ = OtherHead


def with_hook(model: Any) -> None:
    model.blocks[0].register_forward_hook(lambda module, args, output: output)


def with_setting(model: Any) -> None:
    model.scale = 2.0


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "another plan": {"plan": Plan(dp=2, microbatches=2)},
    "another loss": {"loss": other_loss},
    "another class": {"change": with_other_class},
    "a hook": {"change": with_hook},
    "a setting": {"change": with_setting},
    "a batch with other dtypes": {"dtype": torch.int32},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_shown_of_another_task_is_not_believed(what, made):
    def begin(comm):
        step = build(comm, Plan(dp=2))
        step(tokens(step))
        return json.loads(json.dumps(step.state_dict()["record"]))

    def go_on(comm, *, plan=Plan(dp=2), loss=lm.loss, change=lambda model: None, dtype=torch.int64):  # noqa: B008
        step = build(comm, plan, loss=loss)
        change(step.model)
        step.load_state_dict({**step.state_dict(), "record": record})
        inputs, targets = tokens(step)
        step(({**inputs, "positions": inputs["positions"].to(dtype)}, targets))

    record, _ = threads.run(2, begin)
    made.clear()
    threads.run(2, lambda comm: go_on(comm, **CHANGES[what]))
    assert bool(made) == (what != "nothing")


@pytest.mark.parametrize(("folder", "counts"), [("src", True), ("lib/python3/site-packages", False)])
def test_what_was_shown_depends_on_the_users_files_and_not_on_those_of_packages(folder, counts, tmp_path, monkeypatch):
    file = tmp_path / folder / "helpers.py"
    file.parent.mkdir(parents=True)
    file.write_text("def scale(x):\n    return x\n")
    monkeypatch.setitem(sys.modules, "helpers", types.SimpleNamespace(__file__=str(file)))
    before = package_items(nn.Linear(2, 2))
    file.write_text("def scale(x):\n    return 2 * x\n")
    assert (package_items(nn.Linear(2, 2)) != before) == counts


def test_a_check_that_takes_long_says_what_it_checks(monkeypatch, capsys):
    monkeypatch.setattr(checks, "QUIET_SECONDS", 0.05)
    make = Proof._make

    def slow(self, *args, **options):
        time.sleep(0.2)
        make(self, *args, **options)

    monkeypatch.setattr(Proof, "_make", slow)

    def body(comm):
        step = build(comm, Plan(dp=2))
        step.dry_run(tokens(step), training=True)

    threads.run(2, body)
    assert capsys.readouterr().err.startswith("fourfold: before the first step: checking that the loss, and what a")
