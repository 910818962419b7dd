"""The laws of checkpoints, all ranks as threads of one process."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fourfold.cli import checkpoint as checkpoints
from fourfold.feed.feed import Feed
from fourfold.run.average import Average
from fourfold.run.checkpoint import keeper as keeping
from fourfold.run.checkpoint import write
from fourfold.run.checkpoint.keeper import Keeper, Place, Progress
from fourfold.run.checkpoint.read import Reader, check_weights, export, load_weights
from fourfold.run.checkpoint.shelf import Shelf, newest_good, read_manifest, verify
from fourfold.run.checkpoint.state import Trained, tensors
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import CheckpointError
from tests import training
from tests.training import Case, batches, build, local, train_oracle


class Log:
    """A log in memory."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.notes: list[str] = []

    def line(self, record: Any) -> None:
        self.lines.append(record)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def position(self) -> int:
        return len(self.lines)

    def cut(self, position: int) -> None:
        del self.lines[position:]

    def sync(self) -> None: ...


class Run:
    """A run of a case on one thread's rank; `save_at` are steps, `valid` the losses measured there."""

    def __init__(self, case: Case, ranks: Any, folder: Path, *, token: str = "a", ema: float | None = None) -> None:
        self.case, self.step = case, build(case, ranks.size, ranks)
        source = [(torch.zeros(1), torch.zeros(1)) for _ in range(40)]
        self.average = Average(self.step.shares_of_weights, ema) if ema else None
        self.feed = Feed(source, batch_size=8)
        self.log = Log()
        trained = Trained(self.step, self.feed, self.average)
        self.keeper = Keeper(trained, Place(folder, token), self.log, seed=0)

    def go(self, start: int, stop: int, *, save_at: Any = (), valid: dict[int, float] | None = None) -> None:
        for number in range(start, stop):
            self.step(local(batches(self.case)[number], self.step.plan.dp, self.step.data_index))
            if self.average is not None and self.step.is_whole:
                self.average.update(number + 1)
            if number + 1 in save_at:
                loss = (valid or {}).get(number + 1)
                self.keeper.save(Progress(number + 1, [1.0], {} if loss is None else {"loss": loss}))
        self.keeper.wait()

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything that is saved."""
        found = tensors(Trained(self.step, self.feed, self.average))
        return {t.tensor.name: torch.cat([p.detach().clone() for p in t.parts]) for t in found.living if t.parts}


CASES = [
    Case(model="tied", clip=0.5, batch_sizes=(12, 12, 11, 12)),
    Case(model="frozen", optimizer="NAdam", batch_sizes=(8, 8, 8, 8), bucket_bytes=900),
    Case(model="mlp", optimizer="SGD", batch_sizes=(8, 8, 8, 8), microbatches=2),
    Case(model="sometimes", unused="allow", batch_sizes=(5, 6, 7, 8)),
    Case(model="tied", clip=0.5, batch_sizes=(12, 12, 11, 12), zero=1),
    Case(model="sometimes", unused="allow", batch_sizes=(5, 6, 7, 8), zero=1),
    Case(model="mlp", microbatches=2, batch_sizes=(12, 12, 11, 12), zero=2),
    Case(model="tied", codec="dct", codec_life=3, batch_sizes=(12, 12, 11, 12), clip=0.5),
    Case(model="mlp", codec="topk", batch_sizes=(12, 12, 11, 12), zero=1),
    Case(model="mlp", codec="powersgd", microbatches=2, batch_sizes=(12, 12, 11, 12), zero=2),
    Case(model="tied", clip=0.5, batch_sizes=(12, 12, 11, 12), sync="local", local_steps=2, outer_momentum=0.9),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}, zero {case.zero}, {case.codec}, {case.sync}")
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(case, tmp_path):
    def undisturbed(ranks):
        run = Run(case, ranks, tmp_path / "whole", ema=0.9)
        run.go(0, 4)
        return run.tensors(), torch.get_rng_state()

    def begin(ranks):
        Run(case, ranks, tmp_path, ema=0.9).go(0, 3, save_at=(2,))

    def go_on(ranks):
        run = Run(case, ranks, tmp_path, token="b", ema=0.9)
        progress = run.keeper.resume()
        assert progress is not None
        assert progress.step == 2
        run.go(2, 4)
        return run.tensors()

    whole = threads.run(3, undisturbed)
    threads.run(3, begin)
    for (expected, _), got in zip(whole, threads.run(3, go_on), strict=True):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("size", "zero", "then"), [(1, 0, 0), (2, 0, 1), (4, 0, 2), (1, 1, 0), (4, 1, 1), (2, 2, 0)])
def test_another_number_of_ranks_at_another_zero_reads_the_same_files(size, zero, then, tmp_path):
    case = Case(model="tied", batch_sizes=(12, 12, 12, 12), zero=zero)
    threads.run(3, lambda ranks: Run(case, ranks, tmp_path).go(0, 2, save_at=(2,)))

    def go_on(ranks):
        run = Run(dataclasses.replace(case, zero=then), ranks, tmp_path)
        assert run.keeper.resume() is not None
        run.go(2, 4)
        return {name: p.detach().clone() for name, p in run.step.model.named_parameters()}

    oracle = train_oracle(case)
    for weights in threads.run(size, go_on):
        for name, weight in oracle.weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("codec", ["int8", "topk", "powersgd", "dct"])
@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 2), (4, 1)])
def test_what_ranks_have_not_sent_is_kept_on_another_number_of_them(size, zero, codec, tmp_path):
    case = Case(codec=codec, batch_sizes=(12, 11, 12, 12))

    def remainders(run):
        return {name: state["remainder"].clone() for name, state in run.step.remembered.living.items()}

    def begin(ranks):
        run = Run(case, ranks, tmp_path)
        run.go(0, 2, save_at=(2,))
        return remainders(run)

    def go_on(ranks):
        run = Run(dataclasses.replace(case, zero=zero, bucket_bytes=900), ranks, tmp_path)
        assert run.keeper.resume() is not None
        found = remainders(run)
        run.go(2, 4)
        return found

    saved, loaded = threads.run(3, begin), threads.run(size, go_on)
    assert any(value.any() for value in saved[0].values())
    for name in saved[0]:
        total, now = (torch.stack([each[name] for each in ranks]).sum(0) for ranks in (saved, loaded))
        torch.testing.assert_close(now, total, rtol=0, atol=1e-15)


def test_what_was_not_sent_is_not_dropped_in_silence(tmp_path):
    case = Case(codec="topk", batch_sizes=(12, 12))
    threads.run(2, lambda ranks: Run(case, ranks, tmp_path).go(0, 2, save_at=(2,)))
    with pytest.raises(CheckpointError, match="what a codec has not sent yet, and codec = 'bf16'"):
        threads.run(2, lambda ranks: Run(dataclasses.replace(case, codec="bf16"), ranks, tmp_path).keeper.resume())


def test_random_numbers_go_on_where_they_were(tmp_path):
    def drawn(ranks):
        Run(Case(), ranks, tmp_path).go(0, 2, save_at=(2,))
        first = torch.rand(4)
        again = Run(Case(), ranks, tmp_path)
        torch.manual_seed(99)
        assert again.keeper.resume() is not None
        return first, torch.rand(4)

    ((first, second),) = threads.run(1, drawn)
    assert torch.equal(first, second)


def saved_twice(folder: Path, size: int = 2) -> Shelf:
    threads.run(size, lambda ranks: Run(Case(), ranks, folder).go(0, 3, save_at=(1, 3)))
    shelf = Shelf(folder)
    assert shelf.steps() == [1, 3]
    return shelf


def flip(path: Path, place: int) -> None:
    text = bytearray(path.read_bytes())
    text[place] ^= 1
    path.write_bytes(text)


DAMAGE = {
    "truncated": ("rank-001.safetensors", lambda path: os.truncate(path, path.stat().st_size - 1)),
    "a flipped bit in the last byte": ("rank-001.safetensors", lambda path: flip(path, -1)),
    "a flipped bit in the header": ("rank-000.safetensors", lambda path: flip(path, 20)),
    "a missing piece": ("rank-000.safetensors", Path.unlink),
    "a missing manifest": ("manifest.json", Path.unlink),
    "half a manifest": ("manifest.json", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "another step in the manifest": (
        "manifest.json",
        lambda path: path.write_text(path.read_text().replace('"step":3', '"step":4')),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_found_named_and_the_one_before_is_used(damage, tmp_path, capsys):
    name, break_it = DAMAGE[damage]
    shelf = saved_twice(tmp_path)
    break_it(shelf.at(3) / name)
    assert any(name in text for text in verify(shelf.at(3)))
    assert newest_good(tmp_path) == shelf.at(1)
    checkpoints.export(str(tmp_path), str(tmp_path / "weights"), step=None, ema=False)
    assert "a newer checkpoint is damaged" in capsys.readouterr().err

    def go_on(ranks):
        run = Run(Case(), ranks, tmp_path, token="b")
        progress = run.keeper.resume()
        assert progress is not None
        run.go(1, 3, save_at=(3,))
        return progress.step, run.log.notes

    (step, notes), (other, _) = threads.run(2, go_on)
    assert (step, other) == (1, 1)
    assert name in notes[0]
    assert Shelf(tmp_path).steps() == [1, 3]
    assert not verify(shelf.at(3))
    assert (shelf.path / "damaged-step-00000003").is_dir()


def test_every_flipped_bit_of_a_file_is_found(tmp_path):
    shelf = saved_twice(tmp_path, 1)
    generator = torch.Generator().manual_seed(0)
    for path in shelf.at(3).iterdir():
        for place in torch.randint(path.stat().st_size - 1, (40,), generator=generator).tolist():
            flip(path, place)
            assert verify(shelf.at(3)), (path, place)
            flip(path, place)
    assert not verify(shelf.at(3))


def test_without_a_good_checkpoint_nothing_is_put_back(tmp_path):
    shelf = saved_twice(tmp_path, 1)
    for step in (1, 3):
        flip(shelf.at(step) / "rank-000.safetensors", -1)
    (progress,) = threads.run(1, lambda ranks: Run(Case(), ranks, tmp_path).keeper.resume())
    assert progress is None
    with pytest.raises(CheckpointError, match="no checkpoint"):
        newest_good(tmp_path)


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    case = Case(batch_sizes=(8,) * 6)
    valid = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0}
    every = tuple(range(1, 7))
    threads.run(2, lambda ranks: Run(case, ranks, tmp_path).go(0, 6, save_at=every, valid=valid))
    shelf = Shelf(tmp_path)
    assert shelf.steps() == [2, 5, 6]
    assert shelf.best() == 2
    assert sorted(path.name for path in shelf.path.iterdir()) == [shelf.at(step).name for step in (2, 5, 6)]


def test_what_another_model_has_saved_is_refused_with_every_difference(tmp_path):
    saved_twice(tmp_path, 1)
    with pytest.raises(CheckpointError) as caught:
        threads.run(1, lambda ranks: Run(Case(model="frozen"), ranks, tmp_path).keeper.resume())
    assert "second.weight" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"spare\.bias") as caught:
        threads.run(1, lambda ranks: Run(Case(model="unused", unused="allow"), ranks, tmp_path).keeper.resume())
    assert "spare.weight" in str(caught.value)


def test_a_snapshot_is_what_the_weights_were_when_it_was_taken(tmp_path, monkeypatch):
    entered, go = threads.threading.Event(), threads.threading.Event()

    def later(path, snapshot, real=write.write_snapshot):
        entered.set()
        assert go.wait(30)
        return real(path, snapshot)

    monkeypatch.setattr(keeping, "write_snapshot", later)

    def body(ranks):
        run = Run(Case(), ranks, tmp_path)
        run.step(batches(Case())[0])
        then = run.tensors()
        run.keeper.save(Progress(1))
        assert entered.wait(30)
        run.step(batches(Case())[1])  # training goes on while nothing has been written yet
        go.set()
        run.keeper.wait()
        return then, run.tensors()

    ((then, now),) = threads.run(1, body)
    with Reader(Shelf(tmp_path).at(1)) as reader:
        for name, value in then.items():
            assert torch.equal(reader.tensor(name).reshape(-1), value)
    assert any(not torch.equal(now[name], value) for name, value in then.items())


def test_a_piece_that_cannot_be_written_leaves_the_checkpoints_before(tmp_path, monkeypatch):
    def fails(path, snapshot, real=write.write_snapshot):
        if path.name == "rank-001.safetensors" and "step-00000003" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, snapshot)

    monkeypatch.setattr(keeping, "write_snapshot", fails)

    def body(ranks):
        run = Run(Case(), ranks, tmp_path)
        run.go(0, 3, save_at=(1, 3))
        return run.log.notes

    (notes, others) = threads.run(2, body)
    assert "step 3 could not be written: rank 1: no space left on device" in notes[0]
    assert not others
    assert [path.name for path in Shelf(tmp_path).path.iterdir()] == ["step-00000001"]
    assert not verify(Shelf(tmp_path).at(1))


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """A file system of 256 KiB at `path`, or a skip where it cannot be had."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "fourfold-test", str(path)]
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs needs root and the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("checked", [True, False], ids=["room is looked for first", "room ends while writing"])
def test_a_full_disk_is_a_warning_and_the_checkpoints_before_stay(checked, tmp_path, monkeypatch):
    if not checked:
        monkeypatch.setattr(Keeper, "_check_room", lambda *_: None)
    monkeypatch.setattr(keeping, "SPARE_BYTES", 0)
    with small_disk(tmp_path / "disk"):
        folder = tmp_path / "disk" / "run"

        def body(ranks):
            run = Run(Case(), ranks, folder)
            run.go(0, 1, save_at=(1,))
            if run.step.rank == 0:
                free = shutil.disk_usage(folder).free
                (tmp_path / "disk" / "other").write_bytes(b"x" * (free - 8192))
            run.step.exchange(None)
            run.go(1, 3, save_at=(3,))
            return run.log.notes

        notes, _ = threads.run(2, body)
        assert "could not be written" in notes[0]
        assert ("MiB needed" if checked else "no space left") in notes[0]
        assert [path.name for path in Shelf(folder).path.iterdir()] == ["step-00000001"]
        assert not verify(Shelf(folder).at(1))


def test_weights_are_exported_under_the_models_names_and_loaded_again(tmp_path):
    case = Case(model="tied")

    def body(ranks):
        run = Run(case, ranks, tmp_path, ema=0.5)
        run.go(0, 3, save_at=(3,))
        assert run.average is not None
        return run.step.model.state_dict(), {name: value.clone() for name, value in run.average.values.items()}

    model, averages = threads.run(2, body)[0]
    export(Shelf(tmp_path).at(3), tmp_path / "weights.safetensors")
    export(Shelf(tmp_path).at(3), tmp_path / "ema.safetensors", ema=True)
    exported = load_file(tmp_path / "weights.safetensors")
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[name], value) for name, value in model.items())
    averaged = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(averaged[name], value) for name, value in averages.items())

    fresh = training.model("tied")
    load_weights(fresh, tmp_path / "weights.safetensors")
    assert all(torch.equal(value, model[name]) for name, value in fresh.state_dict().items())
    with pytest.raises(CheckpointError, match=r"no spare\.bias"):
        check_weights(training.model("unused"), tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="a safetensors file"):
        check_weights(fresh, tmp_path / "missing.safetensors")


def test_an_average_follows_its_definition_and_does_not_disturb(tmp_path):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    average, expected = Average({"w": weight}, 0.9), weight.detach().clone()
    for step in range(1, 20):
        with torch.no_grad():
            weight.add_(0.1)
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight.detach()
    torch.testing.assert_close(average.values["w"], expected, rtol=1e-5, atol=1e-6)


def test_pieces_are_balanced_in_bytes(tmp_path):
    shelf = saved_twice(tmp_path, 4)
    sizes = [file.num_bytes for file in read_manifest(shelf.at(3)).files.values()]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)


def own_states(run: Run) -> dict[str, Tensor]:
    """The first moments of Adam on this rank."""
    states = run.step.living_state()["optimizer"]
    return {name: torch.cat([part.clone() for part in state["exp_avg"]]) for name, state in states.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_states_of_local_steps_are_each_ranks_own_or_on_another_number_of_ranks_their_mean(size, tmp_path):
    case = Case(sync="local", local_steps=2, outer_momentum=0.9, batch_sizes=(12, 12))

    def begin(ranks):
        run = Run(case, ranks, tmp_path)
        run.go(0, 2, save_at=(2,))
        return own_states(run), run.step.living_state()["outer"]

    def go_on(ranks):
        run = Run(case, ranks, tmp_path)
        assert run.keeper.resume() is not None
        return own_states(run), run.step.living_state()["outer"]

    saved = threads.run(3, begin)
    for rank, (states, outer) in enumerate(threads.run(size, go_on)):
        for name, state in states.items():
            rows = torch.stack([own[name] for own, _ in saved])
            assert not torch.equal(rows[0], rows[1])
            assert torch.equal(state, rows[rank] if size == 3 else rows.mean(0))
            assert torch.equal(outer[name], saved[0][1][name])


def test_ranks_that_learn_by_themselves_may_go_on_together(tmp_path):
    case = Case(sync="local", local_steps=2, outer_momentum=0.9, batch_sizes=(12, 12, 12, 12))
    threads.run(3, lambda ranks: Run(case, ranks, tmp_path).go(0, 2, save_at=(2,)))

    def go_on(ranks, **fields):
        run = Run(dataclasses.replace(case, sync="step", **fields), ranks, tmp_path)
        assert run.keeper.resume() is not None
        run.go(2, 4)
        return [p.detach().clone() for p in run.step.model.parameters()]

    whole, split = threads.run(2, go_on), threads.run(3, lambda ranks: go_on(ranks, zero=2))
    for a, b in zip(whole[0], split[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)
