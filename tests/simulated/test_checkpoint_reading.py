"""Laws of reading checkpoints: parts equal torch's slices, and a resume reads and holds what its rank needs."""

import itertools
import math
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fourfold.checkpoint import manager
from fourfold.checkpoint.restore import CheckpointReader
from fourfold.checkpoint.store import CheckpointStore, encode_manifest, read_manifest, verify_checkpoint
from fourfold.checkpoint.writer import (
    DoneMarker,
    HeldPart,
    Holders,
    LiveTensor,
    RankReport,
    Snapshot,
    complete_manifest,
    write_snapshot,
)
from fourfold.plan.checkpoint_boxes import Part, relative_slices, shard_file_name, whole
from fourfold.plan.checkpoint_manifest import TensorKey, TensorKind
from fourfold.testing import threads
from fourfold.words.errors import CheckpointError
from fourfold.words.mesh import Mesh
from tests.cases import Case
from tests.checkpoint_runs import ThreadRun
from tests.pure.test_checkpoint_boxes import SHAPES, parts_in, tilings
from tests.pure.test_checkpoint_manifest import manifest

pytestmark = pytest.mark.usefixtures("without_dry_run")

WEIGHT = TensorKey(TensorKind.MODEL, "a")


def sliced(values: Tensor, part: Part) -> Tensor:
    return values[relative_slices(part.box, whole(tuple(values.shape)).box)].reshape(-1)[part.start : part.stop]


def write(folder: Path, values: Tensor, parts_by_rank: list[list[Part]]) -> None:
    """A checkpoint of one tensor: each rank writes the parts it holds alone."""
    markers = []
    for rank, parts in enumerate(parts_by_rank):
        held = [HeldPart(WEIGHT, "I64", tuple(values.shape), part, Holders()) for part in parts]
        snapshot = Snapshot(held, shard_file_name(rank))
        snapshot.capture([LiveTensor(each, [sliced(values, each.part)]) for each in held])
        file = write_snapshot(folder / shard_file_name(rank), snapshot)
        random = manifest([], Mesh(dp=len(parts_by_rank))).random[rank]
        markers.append(DoneMarker(file, RankReport(snapshot.entries, {}, {}, random)))
    complete = complete_manifest(manifest([], Mesh(dp=len(parts_by_rank))), markers)
    (folder / "manifest.json").write_bytes(encode_manifest(complete))


@given(shape=SHAPES, data=st.data())
def test_a_part_read_from_any_tiling_equals_torchs_slice(shape, data):
    values = torch.arange(math.prod(shape)).view(shape)
    parts = data.draw(tilings(whole(shape).box))
    ranks = data.draw(st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts)))
    wanted = data.draw(parts_in(shape))
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), values, [[p for p, r in zip(parts, ranks, strict=True) if r == rank] for rank in range(3)])
        assert verify_checkpoint(Path(name)) == []
        with CheckpointReader(Path(name)) as reader:
            tensor = reader.tensor(WEIGHT)
            assert torch.equal(tensor.read_all(), values)
            assert torch.equal(reader.read(reader.entries[WEIGHT], wanted), sliced(values, wanted))
            before = reader.num_bytes
            assert torch.equal(tensor.read(wanted.start, wanted.stop), values.reshape(-1)[wanted.start : wanted.stop])
            assert reader.num_bytes - before == 8 * wanted.num_elements  # ranges of the whole: nothing beside them


def test_several_parts_of_a_tensor_in_one_file_have_names_of_their_own(tmp_path):
    values = torch.arange(12).view(3, 4)
    box = whole((3, 4)).box
    write(tmp_path, values, [[Part(box, 0, 3), Part(box, 7, 12)], [Part(box, 3, 7)]])
    assert load_file(tmp_path / shard_file_name(0)).keys() == {"model.a", "model.a#2"}
    with CheckpointReader(tmp_path) as reader:
        assert torch.equal(reader.tensor(WEIGHT).read_all(), values)


def test_parts_that_do_not_fit_together_are_no_checkpoint(tmp_path):
    values, box = torch.arange(12).view(3, 4), whole((3, 4)).box
    with pytest.raises(CheckpointError, match=r"model\.a: its parts leave a gap, or overlap"):
        write(tmp_path, values, [[Part(box, 0, 3)], [Part(box, 4, 12)]])


def test_tensors_of_a_file_are_mapped_and_read_as_they_are_used(tmp_path):
    save_file({"a": torch.ones(1000)}, tmp_path / "file")
    with safe_open(tmp_path / "file", framework="pt") as file:
        one, other = file.get_tensor("a"), file.get_tensor("a")
    assert one.data_ptr() == other.data_ptr()  # the memory of the file, not copies


class Count:
    """What each rank's reader has read: bytes in all, and the most bytes of tensors that were held at once."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.peaks: dict[int, int] = {}

    def reader(self, folder: Path) -> CheckpointReader:
        return CountingReader(folder, self)


class CountingReader(CheckpointReader):
    def __init__(self, folder: Path, count: Count) -> None:
        super().__init__(folder)
        self._count, self._rank, self._held = count, threading.get_ident(), 0

    def read(self, entry: Any, wanted: Part) -> Tensor:
        found = super().read(entry, wanted).clone()  # lives as long as its views
        num_bytes = found.numel() * found.element_size()
        self._held += num_bytes
        self._count.peaks[self._rank] = max(self._count.peaks.get(self._rank, 0), self._held)
        weakref.finalize(found, self._release, num_bytes)
        return found

    def _release(self, num_bytes: int) -> None:
        self._held -= num_bytes

    def __exit__(self, *error: Any) -> bool | None:
        self._count.bytes[self._rank] = self.num_bytes
        return super().__exit__(*error)


@pytest.mark.parametrize(("size", "zero"), [*itertools.product((1, 2, 4), (3,)), (4, 1), (3, 0)])
def test_a_resume_reads_what_its_rank_keeps_and_holds_one_tensor_more(size, zero, tmp_path, monkeypatch):
    case, count = Case(zero=zero, batch_sizes=(12, 12)), Count()
    threads.run(2, lambda comm: ThreadRun(case, comm, tmp_path, ema=0.9).run_steps(0, 2, save_at=(2,)), hosts=2)
    monkeypatch.setattr(manager, "CheckpointReader", count.reader)

    def resume(comm):
        run = ThreadRun(case, comm, tmp_path, ema=0.9)
        assert run.checkpoints.resume() is not None
        assert run.ema is not None
        states = run.step.state_refs()["optimizer"]
        kept = [*run.step.weight_shards.values(), *run.ema.values.values()]
        kept += [part for own in states.values() for value in own.values() if isinstance(value, list) for part in value]
        return threading.get_ident(), sum(each.numel() * each.element_size() for each in kept)

    largest = 24 * 24 * 8
    ranks = threads.run(size, resume, hosts=size)
    if zero == 3:  # every element on one rank
        manifest = read_manifest(CheckpointStore(tmp_path).step_dir(2))
        assert sum(kept for _, kept in ranks) == sum(8 * entry.num_elements for entry in manifest.tensors)
    for rank, kept in ranks:
        assert count.bytes[rank] == kept
        assert 0 < count.peaks[rank] <= largest


@pytest.mark.parametrize("size", [2, 4])
def test_frozen_weights_are_loaded_one_at_a_time(size, tmp_path, monkeypatch):
    case, count = Case(model="frozen", batch_sizes=(12, 12)), Count()
    threads.run(2, lambda comm: ThreadRun(case, comm, tmp_path).run_steps(0, 2, save_at=(2,)))
    monkeypatch.setattr(manager, "CheckpointReader", count.reader)
    threads.run(size, lambda comm: ThreadRun(case, comm, tmp_path).checkpoints.resume())
    assert {peak <= 24 * 24 * 8 for peak in count.peaks.values()} == {True}
