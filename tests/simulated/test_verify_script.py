"""Laws of verified scripts: the user's loop runs as it is, and is compared with one device, step by step."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fourfold as ff
from fourfold.cli.verify import report
from fourfold.comm.collectives import sum_in_order
from fourfold.comm.reduce import host
from fourfold.verification import script as verify_script
from fourfold.verification.comparison import EXACT_BOUND, VerifyResult
from fourfold.verification.script import ScriptVerifier
from fourfold.words.errors import PlanError, SettingError


class Net(nn.Module):
    """Batch normalization, dropout, and a block that may draw random numbers."""

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.drop, self.noise = nn.Dropout(0.2), Noise() if draws else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.down(self.drop(torch.tanh(self.noise(self.norm(self.up(x))))))
        return outputs, outputs.square().mean(1)


def penalized(outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Of both outputs, one of which follows from the other."""
    return F.cross_entropy(outputs[0], targets, reduction="none") + 0.1 * outputs[1]


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's own; not as many samples on each rank."""
    rank = ff.world().rank
    generator = torch.Generator().manual_seed(rank)
    for _ in itertools.count():
        x = torch.randn(6 + rank, 8, generator=generator)
        yield x, (x.sum(1) > 0).long()


def step_script(kind: str) -> None:
    torch.manual_seed(0)
    net, plan = Net(draws=kind == "draws"), ff.Plan(dp=ff.world().size, zero=1, batch_norm="sync")
    net = net.double() if kind == "double" else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step = ff.parallelize(net, penalized, optimizer, plan, clip=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.9)
    for x, y in itertools.islice(batches(), 50):
        step((x.double() if kind == "double" else x, y))
        schedule.step()
    raise AssertionError("the script goes on after the steps that are compared")


def loop_script(kind: str) -> None:
    torch.manual_seed(0)
    net, plan = Net(draws=kind == "draws"), ff.Plan(dp=ff.world().size, batch_norm="sync")
    optimizer = ff.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net, plan)
    for number, (x, y) in enumerate(itertools.islice(batches(), 50)):
        optimizer.zero_grad()
        with optimizer.no_sync():
            penalized(net(x), y).mean().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            outputs = net(2 * x)
        penalized([each.float() for each in outputs], y).mean().backward()
        optimizer.clip_grad_norm_(0.3)
        optimizer.step()
        if kind == "stats" and number == 1 and ff.world().is_main:
            dict(net.named_buffers())["norm.running_mean"] += 1e-3
    raise AssertionError("the script goes on after the steps that are compared")


def without_the_last_rank(addends: list[Tensor], out: Tensor) -> None:
    sum_in_order(addends[:-1], out=out)


SCRIPTS = {"step": step_script, "loop": loop_script}
BREAKS = {
    "reduction": mock.patch.object(host, "sum_in_order", without_the_last_rank),
    "order of the ranks": mock.patch.object(verify_script, "joined", lambda trees: JOINED(trees[::-1])),
    "one rank's batch": mock.patch.object(verify_script, "joined", lambda trees: JOINED(trees[:1])),
}
JOINED = verify_script.joined


def verified(script: str, kind: str = "", broken: str = "") -> VerifyResult:
    """The result of a script on two ranks, of four steps."""

    def rank() -> Any:
        verifier = ScriptVerifier(f"{script}.py", steps=4)
        with BREAKS[broken] if broken else mock.MagicMock(), verifier.watching():
            SCRIPTS[script](kind)
        return verifier.result.as_json()

    return VerifyResult(**ff.launch(rank, n=2))


@pytest.mark.parametrize(("script", "kind"), [("step", ""), ("loop", ""), ("loop", "autocast"), ("step", "double")])
def test_a_loop_trains_as_one_device_does(script, kind):
    result = verified(script, kind)
    assert result.ok, str(result)
    assert result.num_steps == 4
    assert result.num_dropouts == 1
    assert result.title.startswith(f"{script}.py on dp 2, compared with one device: 4 steps in float")
    assert (result.bound == EXACT_BOUND) == (kind == "double")
    assert {*result.worst["buffer"]} == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert any("not covered: the loss" in note for note in result.notes) == (script == "loop")
    assert ("gradient" in result.worst) == ("output" in result.worst) == (script == "loop")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_broken_reduction_is_found_in_the_first_step(script):
    result = verified(script, broken="reduction")
    assert any("optimizer state" in each.got and "at step 1, the first" in each.got for each in result.problems)


@pytest.mark.parametrize(("script", "broken"), [("loop", "order of the ranks"), ("step", "one rank's batch")])
def test_other_samples_on_one_device_are_found(script, broken):
    assert not verified(script, broken=broken).ok


def test_a_buffer_that_changes_on_a_rank_is_named_with_its_step():
    (problem,) = verified("loop", "stats").problems
    assert problem.got.startswith("the buffer of norm.running_mean deviates by")
    assert "at step 3, the first" in problem.got


@pytest.mark.parametrize("script", SCRIPTS)
def test_random_numbers_of_the_model_are_named_and_are_no_difference(script):
    (problem,) = verified(script, "draws").problems
    assert problem.got == "random numbers drawn by noise (Noise): each mesh draws others"


def test_a_script_without_a_step_is_not_shown_to_be_right(capsys):
    verifier = ScriptVerifier("script.py", steps=10)
    with verifier.watching():
        pass
    assert [each.got for each in verifier.result.problems] == ["no step"]
    with pytest.raises(SettingError, match=r"no step +need .* of ff\.parallelize or ff\.DistributedOptimizer"):
        report(verifier.result)
    assert not capsys.readouterr().out


def test_a_script_that_compresses_gradients_is_told_what_verifies_it():
    with pytest.raises(PlanError, match=r"try ff\.verify\(model"), ScriptVerifier("script.py", steps=10).watching():
        ff.parallelize(nn.Linear(2, 2), F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), ff.Plan(codec="topk"))


def test_watching_puts_everything_back():
    before = ff.parallelize, ff.TrainStep.__call__, ff.DistributedOptimizer.__init__
    with ScriptVerifier("script.py", steps=10).watching():
        assert ff.parallelize is not before[0]
    assert (ff.parallelize, ff.TrainStep.__call__, ff.DistributedOptimizer.__init__) == before
