"""Laws of `ff.Checkpoints`: a loop of one's own saves and goes on as if it had never ended. Ranks are threads."""

import dataclasses
import errno
import math
import os
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from fourfold.checkpoint import store as store_module
from fourfold.checkpoint import writer
from fourfold.checkpoint.checkpoints import Checkpoints
from fourfold.feed.feed import Feed
from fourfold.plan.decode import DecodeError, from_json
from fourfold.plan.json_state import decode_state, encode_state, state_problems
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.testing import threads
from fourfold.trainer.train import train
from fourfold.words.errors import CheckpointError, SettingError, UnreadableCheckpointError
from fourfold.words.task import Data, Task
from tests import cases
from tests.cases import Case, build_step, local_batch
from tests.checkpoint_runs import rewrite_manifest

DRAW = torch.Generator().manual_seed(5)
SOURCE = [
    (torch.randn(16, generator=DRAW, dtype=torch.float64), torch.randint(0, 10, (), generator=DRAW)) for _ in range(20)
]
STEPS = 6  # of 8 samples: they end in the third epoch


class Loop:
    """A loop of one's own on one thread's rank, with a feed and a scheduler."""

    def __init__(self, comm: Any, folder: Path, case: Case, **options: Any) -> None:
        self.step = build_step(case, comm.size, comm)
        self.feed = Feed.single_rank(SOURCE, batch_size=8, seed=3)
        self.scheduler = lr_scheduler.OneCycleLR(self.step.optimizer, max_lr=0.02, total_steps=STEPS + 1)
        self.checkpoints = Checkpoints(folder, self.step, self.feed, **options)
        self.losses: list[float] = []

    def run(self, stop: int, *, save_at: tuple[int, ...] = (), wait: bool = True) -> dict[str, torch.Tensor]:
        batches = self.feed.repeat()
        while self.step.num_steps < stop:
            batch = next(batches)
            self.losses.append(self.step(local_batch(batch, self.step.plan.dp, self.step.dp_index)).loss)
            self.scheduler.step()
            if self.step.num_steps in save_at:
                self.save(wait=wait)
        batches.close()
        self.step.flush()
        return {name: weight.clone() for name, weight in self.step.named_weights()}

    def save(self, **options: Any) -> Path:
        return self.checkpoints.save(extra={"scheduler": self.scheduler.state_dict()}, **options)

    def load(self) -> int:
        loaded = self.checkpoints.load()
        assert loaded is not None
        self.scheduler.load_state_dict(loaded.extra["scheduler"])
        return loaded.step


CASES = [
    Case(model="tied", clip=0.5),
    Case(model="mlp", optimizer="SGD", zero=2, microbatches=2),
    Case(model="mlp", codec="topk", zero=1),
    Case(model="tied", sync="local", local_steps=2, outer_momentum=0.9),
    Case(model="tied", update="in_forward", clip=None),
]


@pytest.mark.parametrize("case", CASES)
def test_a_loop_that_loads_equals_an_uninterrupted_one_bit_for_bit(case, tmp_path):
    def whole(comm):
        loop = Loop(comm, tmp_path / "whole", case)
        return loop.run(STEPS), loop.losses[4:], torch.get_rng_state()

    def again(comm):
        loop = Loop(comm, tmp_path / "cut", case)
        assert loop.load() == 4
        assert loop.step.num_steps == 4
        return loop.run(STEPS), loop.losses

    expected = threads.run(3, whole)
    threads.run(3, lambda comm: Loop(comm, tmp_path / "cut", case).run(4, save_at=(2, 4)))
    for (weights, losses, _), (got, got_losses) in zip(expected, threads.run(3, again), strict=True):
        assert got_losses == losses
        assert all(torch.equal(got[name], value) for name, value in weights.items())


@pytest.mark.parametrize(("saved", "loaded"), [((3, 0), (2, 2)), ((2, 2), (4, 0)), ((4, 1), (1, 0)), ((1, 0), (3, 1))])
def test_a_loop_goes_on_on_another_mesh(saved, loaded, tmp_path):
    (size, zero), (other_size, other_zero) = saved, loaded
    before, after = (dataclasses.replace(Case(model="tied", clip=0.5), zero=level) for level in (zero, other_zero))
    (expected,) = threads.run(1, lambda comm: Loop(comm, tmp_path / "whole", Case(model="tied", clip=0.5)).run(STEPS))
    threads.run(size, lambda comm: Loop(comm, tmp_path, before).run(4, save_at=(4,)))

    def again(comm):
        loop = Loop(comm, tmp_path, after)
        loop.load()
        return loop.run(STEPS)

    for weights in threads.run(other_size, again):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)


def test_what_is_given_to_a_save_comes_back_and_the_options_of_the_optimizer_too(tmp_path):
    extra = {"note": "π", "pair": (1, [2.5]), "rate": math.inf, "counts": Counter({3: 1}), "nothing": None}
    metrics = {"loss": np.float64(2.0), "accuracy": 0.5, "worst": math.inf, "best": -math.inf}

    def save(comm):
        loop = Loop(comm, tmp_path, Case())
        loop.run(1)
        loop.step.optimizer.param_groups[0].update(lr=0.125, initial_lr=0.5, weight_decay=math.inf)
        path = loop.checkpoints.save(extra=extra | {"numpy": np.str_("a")}, metrics=metrics)
        return path, loop.step.optimizer.param_groups[0]["betas"]

    def load(comm):
        loop = Loop(comm, tmp_path, Case())
        found = loop.checkpoints.load()
        return found, {k: v for k, v in loop.step.optimizer.param_groups[0].items() if k != "params"}, loop.feed.state

    (path, betas), _ = threads.run(2, save)
    for found, group, position in threads.run(1, load):
        assert found == (1, extra | {"numpy": "a"}, metrics, path)
        assert type(found.extra["counts"]) is Counter
        assert path == tmp_path / "checkpoints" / "step-00000001"
        assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (0.125, 0.5, math.inf)
        assert group["betas"] == betas
        assert type(group["betas"]) is tuple
        assert tuple(position) == (3, 0, 8, 20)


def test_the_state_of_every_scheduler_of_torch_comes_back_from_json():
    weight = nn.Parameter(torch.ones(1))
    make: dict[str, Any] = {
        "LambdaLR": {"lr_lambda": lambda epoch: 0.5}, "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.5},
        "StepLR": {"step_size": 2}, "MultiStepLR": {"milestones": [2, 2, 3]}, "ConstantLR": {}, "LinearLR": {},
        "ExponentialLR": {"gamma": 0.5}, "PolynomialLR": {}, "CosineAnnealingLR": {"T_max": 4},
        "CosineAnnealingWarmRestarts": {"T_0": 2}, "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0},
        "OneCycleLR": {"max_lr": 1.0, "total_steps": 9}, "ReduceLROnPlateau": {},
    }  # fmt: skip
    for name, options in make.items():
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
        scheduler = getattr(lr_scheduler, name)(optimizer, **options)
        optimizer.step()
        scheduler.step(*([0.5] if name == "ReduceLROnPlateau" else []))
        state = scheduler.state_dict()
        assert not [*state_problems(state, "extra")], name
        decoded = decode_state(from_json(msgspec.json.encode(encode_state(state))))
        assert decoded == state, name
        assert {key: type(value) for key, value in decoded.items()} == {k: type(v) for k, v in state.items()}, name


@pytest.mark.parametrize("value", [
    {"$float": "1"}, {"$float": 1}, {"$tuple": 1}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$other": []},
    {"$counter": {"a": 1}}, {"$tuple": [], "b": 1}, {"$float": ["inf"]},
])  # fmt: skip
def test_json_that_no_save_has_written_is_not_decoded(value):
    with pytest.raises(DecodeError):
        decode_state([value])


def test_what_cannot_come_back_is_refused_on_every_rank_all_at_once(tmp_path):
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    extra = {"tensor": torch.ones(2), "list": [object()], "set": {"in": {1}}, "big": 2**70, "deep": deep}

    def body(comm):
        loop = Loop(comm, tmp_path, Case())
        loop.run(1)
        no_number: Any = torch.ones(1)
        with pytest.raises(SettingError) as refused:
            loop.checkpoints.save(extra=extra if comm.rank == 1 else {}, metrics={"loss": no_number})
        with pytest.raises(SettingError, match=r"another extra or metrics on rank 1 than on rank 0\s+need the same"):
            loop.checkpoints.save(extra={"rank": comm.rank})
        return str(refused.value)

    for text in threads.run(2, body):
        for got in ("extra['tensor'] is a Tensor", "extra['list'][0] is a object", "extra['set']['in'] is a set",
                    "extra['big'] = 1180591620717411303", "nested too deeply", "metrics['loss']"):  # fmt: skip
            assert got in text
        assert "try its item() or tolist()" in text
    assert not (tmp_path / "checkpoints").exists()


def test_a_save_that_fails_raises_on_every_rank_and_keeps_the_one_before(tmp_path, monkeypatch):
    def body(comm):
        loop = Loop(comm, tmp_path, Case())
        loop.run(2, save_at=(2,))
        loop.run(3)
        if comm.rank == 0:
            monkeypatch.setattr(writer, "write_snapshot", refuse)
        comm.all_gather_json(None)
        with pytest.raises(CheckpointError, match=r"step 3 could not be written: rank 0: no room here\s+need a folder"):
            loop.save()
        loop.save(wait=False)
        loop.run(4)
        with pytest.raises(CheckpointError, match="step 3 could not be written"):
            loop.checkpoints.wait()
        comm.all_gather_json(None)
        if comm.rank == 0:
            monkeypatch.undo()
        comm.all_gather_json(None)
        loop.save()
        return Loop(comm, tmp_path, Case()).load()

    def refuse(path, snapshot):
        raise OSError("no room here")

    assert threads.run(2, body) == [4, 4]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(("rank", "number", "need"), [
    (0, errno.ENOSPC, "no space left on device   need room on its disk   try the same when there is room"),
    (1, errno.ENOSPC, "no space left on device   need room on its disk   try the same when there is room"),
    (1, errno.EROFS, "read-only file system   need a folder that all ranks can write to   try another folder"),
])  # fmt: skip
def test_a_disk_without_room_for_the_reason_is_still_said_to_be_full(tmp_path, monkeypatch, rank, number, need):
    def refuse(path, *_, **__):
        if f"rank-{rank:03d}" in path.name:
            raise OSError(number, os.strerror(number))
        path.write_bytes(b"")

    def body(comm):
        loop = Loop(comm, tmp_path, Case())
        loop.run(1)
        comm.all_gather_json(None)
        with pytest.raises(CheckpointError) as caught:
            loop.save()
        return str(caught.value), caught.value.exit_code

    monkeypatch.setattr(writer, "write_snapshot", refuse)
    monkeypatch.setattr(writer, "write_marker", lambda path, suffix, _: refuse(path.with_suffix(suffix)))
    for text, code in threads.run(2, body):
        assert f"step 1 could not be written: rank {rank}: {need}" in text
        assert code == 1, "the input is as good as it was"


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path, monkeypatch):
    go = threading.Event()

    def delayed(path, snapshot, real=writer.write_snapshot):
        assert go.wait(30)
        return real(path, snapshot)

    monkeypatch.setattr(writer, "write_snapshot", delayed)

    def body(comm):
        loop = Loop(comm, tmp_path, Case())
        with loop.checkpoints:
            before = loop.run(2, save_at=(2,), wait=False)
            loop.run(3)
            assert not [*(tmp_path / "checkpoints").glob("step-*")]
            comm.all_gather_json(None)
            go.set()
        assert (tmp_path / "checkpoints" / "step-00000002").is_dir()
        again = Loop(comm, tmp_path, Case())
        assert again.load() == 2
        now = {name: weight.clone() for name, weight in again.step.named_weights()}
        assert all(torch.equal(now[name], value) for name, value in before.items())

    threads.run(2, body)


def test_a_process_killed_between_two_renames_leaves_the_checkpoint_that_it_was_replacing(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def body(comm):
        loop = Loop(comm, tmp_path, Case(), keep=1)
        loop.run(2, save_at=(2,))
        return loop

    (loop,) = threads.run(1, body)

    def rename(source, target, real=store_module.os.rename):
        if "step-" in Path(target).name and not Path(target).name.startswith(".part"):
            raise Killed
        real(source, target)

    folder, store = tmp_path / "checkpoints", loop.checkpoints._store
    (folder / ".part-x-step-00000002").mkdir()
    monkeypatch.setattr(store_module.os, "rename", rename)
    with pytest.raises(Killed):
        store.commit(folder / ".part-x-step-00000002", 2)
    monkeypatch.undo()
    assert store.steps() == []
    assert threads.run(1, lambda comm: Loop(comm, tmp_path, Case()).load()) == [2]
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    def body(comm):
        loop = Loop(comm, tmp_path, Case(), keep=1)
        for step, loss in enumerate((3.0, 1.0, 2.0, 2.0), 1):
            loop.run(step)
            loop.save(metrics={"loss": loss})
        loop.save()  # the same step again
        return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    assert threads.run(1, body) == [["step-00000002", "step-00000004"]]


def test_a_folder_without_a_checkpoint_loads_nothing(tmp_path):
    assert threads.run(2, lambda comm: Loop(comm, tmp_path / "none", Case()).checkpoints.load()) == [None, None]
    assert not (tmp_path / "none").exists()


def test_a_damaged_checkpoint_is_set_aside_and_only_damaged_ones_are_an_error(tmp_path):
    threads.run(2, lambda comm: Loop(comm, tmp_path, Case()).run(4, save_at=(2, 4)))

    def damage(step):
        path = tmp_path / "checkpoints" / f"step-{step:08d}" / "rank-001.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)

    damage(4)
    with pytest.warns(UserWarning, match=r"a damaged checkpoint was set aside: .*step-00000004.*checksum mismatch"):
        assert threads.run(3, lambda comm: Loop(comm, tmp_path, Case()).load()) == [2, 2, 2]
    assert (tmp_path / "checkpoints" / "damaged-step-00000004").is_dir()
    damage(2)
    with pytest.raises(CheckpointError, match=r"checksum mismatch\s+need at least one valid"):
        threads.run(2, lambda comm: Loop(comm, tmp_path, Case()).load())
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def test_a_checkpoint_of_another_model_or_other_data_is_refused_with_everything_that_does_not_fit(tmp_path):
    threads.run(2, lambda comm: Loop(comm, tmp_path, Case()).run(1, save_at=(1,)))

    def body(comm):
        loop = Loop(comm, tmp_path, Case(model="unused", unused="allow", optimizer="SGD"))
        loop.checkpoints = Checkpoints(tmp_path, loop.step, Feed.single_rank(SOURCE[:9], batch_size=4))
        before = loop.step.state_dict()
        with pytest.raises(CheckpointError) as refused:
            loop.checkpoints.load()
        after = loop.step.state_dict()
        assert all(torch.equal(after["model"][name], value) for name, value in before["model"].items())
        return str(refused.value)

    for text in threads.run(2, body):
        for got in ("in " + str(tmp_path / "checkpoints" / "step-00000001"), "no model.spare.weight",
                    "num samples 20, now 9", "batch size 8, now 4", "AdamW"):  # fmt: skip
            assert got in text, text


def test_a_checkpoint_of_another_fourfold_stays_as_it_is(tmp_path):
    threads.run(1, lambda comm: Loop(comm, tmp_path, Case()).run(1, save_at=(1,)))
    folder = tmp_path / "checkpoints" / "step-00000001"
    rewrite_manifest(folder, lambda manifest: manifest.update(version=99))
    with pytest.raises(UnreadableCheckpointError, match="another fourfold"):
        threads.run(1, lambda comm: Loop(comm, tmp_path, Case()).load())
    assert folder.is_dir()


def test_extra_values_that_no_save_has_written_are_refused(tmp_path):
    threads.run(1, lambda comm: Loop(comm, tmp_path, Case()).run(1, save_at=(1,)))
    folder = tmp_path / "checkpoints" / "step-00000001"
    rewrite_manifest(folder, lambda manifest: manifest.update(extra={"$os": ["rm"]}))
    with pytest.raises(CheckpointError, match=r"\$os"):
        threads.run(1, lambda comm: Loop(comm, tmp_path, Case()).load())


def test_a_training_that_has_not_loaded_a_folder_does_not_save_there(tmp_path):
    threads.run(2, lambda comm: Loop(comm, tmp_path, Case()).run(4, save_at=(4,)))

    def body(comm):
        loop = Loop(comm, tmp_path, Case())
        with pytest.raises(SettingError, match=r"save\(\) before the first step"):
            loop.save()
        loop.run(1)
        with pytest.raises(SettingError, match=r"the checkpoint of step 4, and this training is at step 1 .*load"):
            loop.save()

    threads.run(2, body)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def run_of_train(folder: Path) -> Any:
    return train(
        Task(
            model=lambda: cases.model("mlp"),
            loss=cases.LOSSES["values"],
            data=lambda: Data(train=SOURCE),
            optimizer=cases.optimizer(Case()),
        ),
        name="run", folder=str(folder), steps=4, batch_size=8, checkpoint_every=2, seed=3,
    )  # fmt: skip


def test_a_run_of_train_is_read_and_never_written(tmp_path):
    result = run_of_train(tmp_path)
    path = tmp_path / "run" / "checkpoints"
    (path / "step-00000004" / "rank-000.safetensors").write_bytes(b"damaged")
    (path / ".part-x-step-00000003").mkdir()
    before = sorted(each.name for each in path.iterdir())

    def body(comm):
        loop = Loop(comm, result.folder, Case(optimizer="AdamW"))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loaded = loop.checkpoints.load()
        loop.run(4)
        with pytest.raises(SettingError, match=r"is a run of ff\.train\s+need a separate folder.*load\(\) reads"):
            loop.save()
        return loaded, [str(each.message) for each in found]

    ((loaded, messages),) = threads.run(1, body)
    assert loaded == (2, {}, {}, path / "step-00000002")
    assert any("a damaged checkpoint was left out" in text for text in messages)
    assert sorted(each.name for each in path.iterdir()) == before


def test_a_loop_without_a_feed_saves_and_loads_and_a_feed_needs_its_place(tmp_path):
    def save(comm):
        loop = Loop(comm, tmp_path, Case())
        checkpoints = Checkpoints(tmp_path, loop.step)
        loop.run(2)
        checkpoints.save(extra={"epoch": 1})
        return checkpoints.load()

    for found in threads.run(2, save):
        assert found[:2] == (2, {"epoch": 1})
    with pytest.raises(CheckpointError, match=r"without a place in the data, and a feed\s+need one saved with a feed"):
        threads.run(1, lambda comm: Loop(comm, tmp_path, Case()).load())


def test_arguments_of_the_wrong_kind_are_refused_all_at_once(tmp_path):
    (tmp_path / "file").touch()

    def body(comm):
        step = build_step(Case(), comm.size, comm)
        with pytest.raises(SettingError) as refused:
            Checkpoints(3, step.model, [], keep=0)  # type: ignore[arg-type]
        with pytest.raises(SettingError, match=r"file is not a folder\s+need a folder"):
            Checkpoints(tmp_path / "file", step)
        with pytest.raises(SettingError, match=r"need one folder for all ranks"):
            Checkpoints(tmp_path / str(comm.rank), step)
        return str(refused.value)

    for text in threads.run(2, body):
        for got in ("folder = 3", "step of type MLP", "feed of type list", "keep = 0", "ff.parallelize(model, loss"):
            assert got in text
    model = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(SettingError, match=r"a DistributedOptimizer\s+need the step .*optimizer\.state_dict\(\)"):
        Checkpoints(tmp_path, optimizer)  # type: ignore[arg-type]
