"""Laws of packs: what is packed is what is read, on any path through a kill, and damage is found."""

import errno
import fcntl
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fourfold as ff
from fourfold.feed.collate import collate_samples
from fourfold.feed.pack import layout
from fourfold.feed.pack.schema import ITEM_BYTES, EncodedImage
from fourfold.feed.pack.values import tensor_of
from fourfold.feed.pack.verify import verify_pack
from fourfold.feed.pack.zstd import Codec
from fourfold.words.errors import DamagedSample, DataError

IN_A_FOLDER = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
counter = itertools.count()


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


def new_path(folder: Path) -> Path:
    return folder / f"pack-{next(counter)}"


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_batch(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_batch(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same_batch, one, other))
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, raw(one)) == (other.dtype, other.shape, raw(other))
    return one == other


@st.composite
def sources(draw: st.DrawFn) -> list[Any]:
    """Samples of one schema: pairs or dicts, of arrays of any dtype, numbers, text and bytes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = ["int", "float", "bool", "text", "bytes", *ITEM_BYTES]
    count = draw(st.integers(1, 40))

    def leaf() -> list[Any]:
        kind = draw(st.sampled_from(kinds))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        if kind == "int":
            return [int(value) for value in rng.integers(-(2**62), 2**62, count)]
        if kind == "float":
            return rng.normal(size=count).tolist()
        if kind == "bool":
            return [bool(value) for value in rng.integers(0, 2, count)]
        if kind == "text":
            return ["aé\0😀"[: int(value)] for value in rng.integers(0, 5, count)]
        if kind == "bytes":
            return [rng.bytes(int(value)) for value in rng.integers(0, 90, count)]
        size = int(np.prod(shape)) * ITEM_BYTES[kind]
        content = rng.integers(0, 2 if kind == "bool" else 256, (count, size), dtype=np.uint8)
        return [tensor_of(row, kind, shape) for row in content]

    names = draw(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3, unique=True))
    columns = {name: leaf() for name in names}
    rows = [{name: values[index] for name, values in columns.items()} for index in range(count)]
    if draw(st.booleans()):
        return rows
    targets = leaf()
    return [(row if len(row) > 1 else row[names[0]], target) for row, target in zip(rows, targets, strict=True)]


@IN_A_FOLDER
@given(
    sources(),
    st.integers(100, 4000),
    st.sampled_from(["none", "zstd"]),
    st.sampled_from(["numbered", "iterable"]),
    st.integers(1, 3),
    st.data(),
)
def test_what_is_read_is_what_was_packed(tmp_path, samples, shard_bytes, compression, kind, threads, data):
    path = new_path(tmp_path)
    given_source = samples if kind == "numbered" else iter(samples)
    packed = ff.pack(given_source, path, shard_bytes=shard_bytes, compression=compression, threads=threads)
    assert packed.num_samples == len(samples)
    pack = ff.Pack(path, threads=threads)
    assert len(pack) == sum(pack.shard_sizes) == len(samples)
    indices = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=20))
    for index in indices:
        assert same_batch(collate_samples([pack[index]], [0]), collate_samples([samples[index]], [0]))
    expected = collate_samples([samples[index] for index in indices or [0]], indices or [0])
    batch = pack.fetch(indices)
    if indices:
        assert same_batch(batch, tuple(expected) if isinstance(samples[0], tuple) else expected)
    assert not verify_pack(path).damage
    shutil.rmtree(path)


def rows(count: int = 60, size: int = 100) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=generator)
    return [(row, index) for index, row in enumerate(pixels)]


def texts(count: int = 60) -> list[dict[str, Any]]:
    return [{"text": f"line {index} " * (index % 7 + 1), "label": index} for index in range(count)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Named(Sequence[Any]):
    """A source with a count of what is read of it."""

    name = "a source"

    def __init__(self, samples: Sequence[Any], before_read: Any = lambda: None) -> None:
        self.samples, self.before_read, self.num_read = samples, before_read, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        self.before_read()
        self.num_read += 1
        return self.samples[index]


class Stream:
    """The same without numbers."""

    name = "a source"

    def __init__(self, samples: Sequence[Any], before_read: Any = lambda: None) -> None:
        self.named = Named(samples, before_read)

    def __iter__(self) -> Iterator[Any]:
        return (self.named[index] for index in range(len(self.named)))


def killed_at(number: int, run: Any) -> bool:
    """Whether a process was killed at its `number`-th call of what is passed to `run`, before `run` had ended."""
    child = os.fork()
    if child == 0:
        calls = itertools.count()

        def tick(*_: Any) -> None:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            run(tick)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("make", [Named, Stream])
@pytest.mark.parametrize("samples", [rows(160), texts(160)])
@pytest.mark.parametrize("where", ["a read", "a write to the disk"])
def test_a_packing_that_is_killed_anywhere_goes_on_and_ends_with_the_same_bytes(tmp_path, samples, make, where):
    options: Any = {"shard_bytes": 2000, "threads": 2}
    ff.pack(make(samples), tmp_path / "whole", **options)
    rng = random.Random(f"{make} {where}")

    def run(tick: Any) -> None:
        if where == "a read":
            ff.pack(make(samples, tick), tmp_path / "again", **options)
        else:
            os.fsync = tick
            ff.pack(make(samples), tmp_path / "again", **options)

    assert killed_at(100 if where == "a read" else 4, run)
    for _ in range(30):
        was_killed = killed_at(rng.randrange(70, 200) if where == "a read" else rng.randrange(3, 20), run)
        if not was_killed or (tmp_path / "again").exists():  # or killed after the last step
            break
    if not (tmp_path / "again").exists():
        ff.pack(make(samples), tmp_path / "again", **options)
    assert content(tmp_path / "again") == content(tmp_path / "whole")


def test_what_is_packed_is_not_read_again(tmp_path):
    samples = rows(400)
    run = lambda tick: ff.pack(Named(samples, tick), tmp_path / "pack", shard_bytes=2000, threads=1)  # noqa: E731
    assert killed_at(64 + 300, run)
    source = Named(samples)
    packed = ff.pack(source, tmp_path / "pack", shard_bytes=2000, threads=1)
    assert packed.num_resumed >= 280
    assert source.num_read == 64 + 400 - packed.num_resumed


def test_a_finished_shard_that_was_damaged_in_the_meantime_is_written_again(tmp_path):
    options: Any = {"shard_bytes": 2000, "threads": 1}
    source = Named(rows(160))
    ff.pack(source, tmp_path / "whole", **options)
    assert killed_at(150, lambda tick: ff.pack(Named(rows(160), tick), tmp_path / "pack", **options))
    os.truncate(tmp_path / "pack.part" / "shard-00000.data", 100)
    note = tmp_path / "pack.part" / "shard-00001.note"
    note.write_bytes(note.read_bytes()[:-1])
    ff.pack(source, tmp_path / "pack", **options)
    assert content(tmp_path / "pack") == content(tmp_path / "whole")


def flip_a_bit(folder: Path, rng: random.Random) -> tuple[str, int]:
    """Change a bit in a random file of a pack, each byte with the same probability; its file and byte."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    at = rng.randrange(sum(sizes.values()))
    name = next(iter(sizes))
    while at >= sizes[name]:
        at -= sizes.pop(name)
        name = next(iter(sizes))
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 1 << rng.randrange(8)
    (folder / name).write_bytes(data)
    return name, at


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("samples", [rows(), texts()])
def test_a_damaged_bit_is_found_100_of_100_times_and_a_damaged_record_named(tmp_path, samples, compression):
    whole = tmp_path / "whole"
    ff.pack(samples, whole, shard_bytes=2000, compression=compression)
    index = np.fromfile(whole / "index", dtype=layout.ENTRY)
    rng, named = random.Random(0), 0
    for number in range(100):
        damaged = tmp_path / f"damaged-{number}"
        shutil.copytree(whole, damaged)
        name, at = flip_a_bit(damaged, rng)
        if name == layout.MANIFEST_FILE:
            with pytest.raises(DataError, match=r"manifest|version"):
                verify_pack(damaged, threads=1)
            continue
        verified = verify_pack(damaged, threads=1)
        assert verified.damage
        sample = sample_at(index, ff.Pack(whole).shard_sizes, name, at)
        assert verified.damaged_samples == ([] if sample is None else [sample])
        pack = ff.Pack(damaged, threads=1)
        for read in (pack.__getitem__, lambda each, pack=pack: pack.fetch([each])):
            if sample is not None:
                with pytest.raises(DamagedSample) as caught:
                    read(sample)
                assert caught.value.key == pack.sample_key(sample)
                named += 1
    assert named > 50


def sample_at(index: np.ndarray, shard_sizes: Sequence[int], name: str, at: int) -> int | None:
    """The sample that a byte of a file belongs to; None: of none."""
    if name == layout.INDEX_FILE:
        return at // layout.ENTRY.itemsize
    shard = int(name.removeprefix("shard-").removesuffix(".data"))
    start = sum(shard_sizes[:shard])
    for sample in range(start, start + shard_sizes[shard]):
        offset, length, _ = index[sample].tolist()
        if offset <= at < offset + length:
            return sample
    return None


def test_an_entry_that_points_to_an_equal_record_is_found(tmp_path):
    ff.pack([(torch.zeros(100), 0)] * 20, tmp_path / "pack")
    path = tmp_path / "pack" / "index"
    index = np.fromfile(path, dtype=layout.ENTRY)
    index[3] = index[4]
    path.write_bytes(index.tobytes())
    assert verify_pack(tmp_path / "pack").damage


def test_entries_outside_their_shard_are_found_whatever_their_size(tmp_path):
    ff.pack(texts(), tmp_path / "pack")
    manifest = ff.Pack(tmp_path / "pack").manifest
    rng = random.Random(0)
    bounds = [0, 1, 64, 128, 192, 256, 2**63, 2**64 - 64, 2**64 - 1]
    for _ in range(500):
        offset, length, size = (rng.choice(bounds) for _ in range(3))
        size %= 2**50
        entry = np.array([(offset, length, 0)], dtype=layout.ENTRY)
        (wrong,) = layout.entry_problems(entry, np.array([size]), manifest)
        is_whole = offset + length <= size and offset % 64 == 0 and length <= manifest.max_record_bytes
        assert wrong == (not is_whole)


def test_a_frame_that_claims_too_much_is_not_decompressed():
    codec = Codec()
    frame = codec.compress(bytes(10**6))
    assert len(codec.decompress(frame, 10**6)) == 10**6
    for damaged, limit in ((frame, 10**6 - 1), (frame[:-3], 10**6), (b"", 10), (b"text", 10)):
        with pytest.raises(ValueError, match=r"."):
            codec.decompress(damaged, limit)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_a_pack_claims_breaks_its_reader(tmp_path, seed):
    # The index and the shards with any content: an error with a name, or the samples as they were.
    samples = texts(30) if seed % 2 else rows(30)
    ff.pack(samples, tmp_path / "pack", shard_bytes=1500, compression="zstd" if seed % 3 == 0 else "none")
    rng = np.random.default_rng(seed)
    path = tmp_path / "pack" / ("index" if seed % 4 < 2 else "shard-00000.data")
    data = bytearray(path.read_bytes())
    for at in rng.integers(0, len(data), 20):
        data[at] = rng.integers(0, 256)
    path.write_bytes(data)
    pack = ff.Pack(tmp_path / "pack")
    for number, sample in enumerate(samples):
        try:
            read = pack[number]
        except DamagedSample:
            continue
        assert same_batch(collate_samples([read], [0]), collate_samples([sample], [0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "a pack of version 2"),
        ({"alignment": 3}, "alignment 3"),
        ({"alignment": 2**40}, "alignment"),
        ({"max_record_bytes": 2**60}, "records of"),
        ({"shards": []}, "0 shards"),
        ({"shards": [[0, 0, "0" * 32]]}, "with 0 records"),
        ({"shards": [[2**62, 100, "0" * 32]] * 2}, "bytes, as packed"),
        ({"shards": [[1, 2**62, "0" * 32]]}, "with 1 records"),
        ({"index_digest": "../../etc/passwd"}, "no digest"),
        ({"compression": "pickle"}, "cannot be read"),
        ({"names": ["../x"]}, "cannot be read"),
        ({"schema": {"fields": []}}, "0 fields"),
        ({"schema": {"fields": [{"path": ["x"], "kind": "array", "dtype": "object"}]}}, "dtype 'object'"),
        ({"schema": {"fields": [{"path": ["x"], "kind": "array", "shape": [2**40, 2**40]}]}}, "bytes in a record"),
        ({"schema": {"fields": [{"path": ["x"], "kind": "array", "shape": [-2]}]}}, "a shape"),
        ({"schema": {"fields": [{"path": ["x"], "kind": "array", "shape": [1] * 99}]}}, "a shape"),
        ({"schema": {"fields": [{"path": [], "kind": "array"}]}}, "a path of no"),
        ({"schema": {"fields": [{"path": ["x"], "kind": "text"}]}}, "text stored as"),
        ({"schema": {"fields": [{"path": ["x"], "kind": "int", "dtype": "int8"}]}}, "int stored as"),
        ({"schema": {"fields": [{"path": ["x"], "kind": "array"}] * 2}}, "a path within"),
        ({"schema": {"fields": [{"path": ["x"], "kind": "array"}], "is_pair": True}}, "outside inputs"),
    ],
)
def test_a_manifest_is_bounded_before_it_is_believed(tmp_path, change, message):
    ff.pack(rows(10), tmp_path / "pack")
    path = tmp_path / "pack" / "manifest.json"
    manifest = {**json.loads(path.read_bytes())["manifest"], **change}
    body = json.dumps(manifest, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(body.encode())
    path.write_text('{"xxh3_128":"' + digest + '","manifest":' + body + "}\n")
    with pytest.raises(DataError, match=re.escape(message)):
        ff.Pack(tmp_path / "pack")


@pytest.mark.parametrize("name", ["shard-00000.data", "index"])
def test_a_folder_in_the_place_of_a_file_is_refused_whatever_its_size(tmp_path, name):
    ff.pack(rows(10), tmp_path / "pack")
    (tmp_path / "pack" / name).unlink()
    (tmp_path / "pack" / name).mkdir()
    with pytest.raises(DataError, match=f"{name}, which is no regular file"):
        ff.Pack(tmp_path / "pack")


def test_a_manifest_without_an_end_is_refused(tmp_path, monkeypatch):
    ff.pack(rows(10), tmp_path / "pack")
    path = tmp_path / "pack" / "manifest.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="is a pipe"):
        ff.Pack(tmp_path / "pack")
    path.unlink()
    path.symlink_to("/dev/zero")
    monkeypatch.setattr(layout, "MAX_MANIFEST_BYTES", 2**16)
    with pytest.raises(DataError, match="more than 65536 bytes"):
        ff.Pack(tmp_path / "pack")


def refused(message: str, *sources: Any, **options: Any) -> None:
    folder = Path(tempfile.mkdtemp())
    for source in sources:
        with pytest.raises(DataError, match=re.escape(message)):
            ff.pack(source, folder / "pack", **options)
    shutil.rmtree(folder)


def test_sources_that_cannot_be_packed_are_refused_with_the_sample():
    refused("no samples in list", [])
    refused("no samples in generator", (each for each in ()))
    refused("a dict", {"x": 1})
    refused("sample 0 is a str", ["text"], iter(["text"]))
    refused("sample 1 has inputs, targets", [(1, 2), {"x": 1}][::-1])
    refused("sample 1: targets is a NoneType", [(1, 2), (1, None)])
    refused("an array of object", [(np.array([None]), 0)])
    refused("an array of float128", [(np.zeros(3, "f16"), 0)])
    refused("inputs: float32 [3] in sample 0, float64 [3] in sample 1", [(np.zeros(3, t), 0) for t in ("f4", "f8")])
    long = [(np.zeros(3), 0)] * 300
    refused("sample 299: inputs = torch.float32 [3]", changed(long, "f4"))
    refused("sample 77: inputs of shape [4]", changed(long, (4,)))
    refused("try variable=inputs", changed(long, (4,)))
    refused("variable = targets", long, variable=["targets"])
    refused("compression = lz4", long, compression="lz4")
    refused("threads = 0", long, threads=0)


def changed(samples: list[Any], what: Any) -> list[Any]:
    """With another dtype in the last sample, or another shape in sample 77, which is not among those read first."""
    if isinstance(what, str):
        samples = [*samples, *samples]
        return [*samples[:299], (np.zeros(3, what), 0), *samples[300:]]
    return [*samples[:77], (np.zeros(what), 0), *samples[78:]]


def test_shapes_that_vary_late_can_be_declared(tmp_path):
    samples = changed([(np.zeros(3), 0)] * 300, (4,))
    ff.pack(samples, tmp_path / "pack", variable=["inputs"])
    pack = ff.Pack(tmp_path / "pack")
    assert pack[77][0].shape == (4,)
    assert pack.fetch([1, 2])[0].shape == (2, 3)
    with pytest.raises(DataError, match=r"\[3\] in sample 1 .*, float64 \[4\] in sample 77 "):
        pack.fetch([1, 77])


def test_a_source_that_raises_is_named_with_its_sample(tmp_path):
    class Broken(Named):
        def sample_key(self, index: int) -> str:
            return f"photo-{index}.jpg"

        def __getitem__(self, index: int) -> Any:
            return self.samples[index] if index != 70 else self.samples[index][5]

    with pytest.raises(DataError, match=r"photo-70\.jpg: IndexError"):
        ff.pack(Broken(rows(200)), tmp_path / "pack")
    with pytest.raises(DataError, match="sample 70: IndexError"):
        ff.pack(map(Broken(rows(200)).__getitem__, range(200)), tmp_path / "other")


def test_a_packing_of_another_source_or_by_another_process_is_refused(tmp_path):
    assert killed_at(70, lambda tick: ff.pack(Named(rows(), tick), tmp_path / "pack", shard_bytes=999, threads=1))
    with pytest.raises(DataError, match="is being packed, or its packing was cut off"):
        ff.Pack(tmp_path / "pack")
    for other in (Named(rows(59)), Named(rows(60, 101)), Named([(row + 1, label) for row, label in rows()])):
        with pytest.raises(DataError, match="a packing that was not finished"):
            ff.pack(other, tmp_path / "pack", shard_bytes=999)
    with (tmp_path / "pack.part" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="written by another process"):
            ff.pack(Named(rows()), tmp_path / "pack", shard_bytes=999)
    ff.pack(Named(rows()), tmp_path / "pack", shard_bytes=999)
    with pytest.raises(DataError, match="something at"):
        ff.pack(Named(rows()), tmp_path / "pack", shard_bytes=999)


def test_truncated_and_missing_files_are_all_named_before_anything_is_read(tmp_path):
    ff.pack(rows(), tmp_path / "pack", shard_bytes=2000)
    (tmp_path / "pack" / "shard-00000.data").unlink()
    for name in ("shard-00001.data", "index"):
        os.truncate(tmp_path / "pack" / name, 100)
    with pytest.raises(DataError) as caught:
        ff.Pack(tmp_path / "pack")
    assert [problem.got.split()[0].strip(":") for problem in caught.value.problems] == [
        *("shard-00000.data", "shard-00001.data", "index")
    ]


def test_a_full_disk_is_named_and_the_packing_goes_on_once_there_is_room(tmp_path, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(DataError, match="no space left on device"):
            ff.pack(Named(rows()), tmp_path / "pack")
    ff.pack(Named(rows()), tmp_path / "pack")
    assert len(ff.Pack(tmp_path / "pack")) == 60


def test_a_source_may_use_the_memory_of_its_samples_again(tmp_path):
    def samples() -> Iterator[Any]:
        row = np.zeros(50, np.uint8)
        for number in range(100):
            row[:] = number
            yield row, number

    own = [(row.copy(), number) for row, number in samples()]
    ff.pack(itertools.chain(own[:64], itertools.islice(samples(), 64, None)), tmp_path / "pack")
    pack = ff.Pack(tmp_path / "pack")
    assert all((pack[number][0] == number).all() for number in range(100))
    assert not verify_pack(tmp_path / "pack").damage


def test_a_batch_keeps_its_content_while_others_are_read(tmp_path):
    samples = rows(64, 70_000)  # several stretches in a batch
    ff.pack(samples, tmp_path / "pack", shard_bytes=10**6)
    pack = ff.Pack(tmp_path / "pack", threads=3)
    rng, kept = random.Random(0), []
    for _ in range(40):
        indices = rng.sample(range(64), 32)
        batch = pack.fetch(indices)
        part = rng.choice([batch[0], batch[0][3:], batch[0].view(torch.int16), torch.from_numpy(batch[0].numpy())])
        kept.append((part, part.clone()))
        assert torch.equal(batch[0], torch.stack([samples[index][0] for index in indices]))
        if len(kept) > 5:
            kept.pop(rng.randrange(len(kept)))
    assert all(torch.equal(part, copy) for part, copy in kept)


def test_memory_of_batches_is_used_again(tmp_path):
    ff.pack(rows(64), tmp_path / "pack")
    pack = ff.Pack(tmp_path / "pack")
    places = set()
    for _ in range(5):
        batch = pack.fetch(range(32))
        places.add(batch[0].data_ptr())
        del batch
    assert len(places) == 1


def test_a_feed_reads_a_pack_and_a_worker_process_gets_its_path(tmp_path):
    ff.pack(rows(), tmp_path / "pack", shard_bytes=2000)
    seen = [int(label) for _, labels in ff.Feed(ff.Pack(tmp_path / "pack"), batch_size=7) for label in labels]
    assert sorted(seen) == list(range(60))
    copy = pickle.loads(pickle.dumps(ff.Pack(tmp_path / "pack", threads=3)))
    assert is_equal_sample(copy[5], ff.Pack(tmp_path / "pack")[-55])


def is_equal_sample(one: Any, other: Any) -> bool:
    return torch.equal(one[0], other[0]) and one[1] == other[1]


def test_images_are_packed_as_files_and_read_as_pixels(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rng, samples, pixels = np.random.default_rng(0), [], []
    for number in range(6):
        pixels.append(rng.integers(0, 256, (4 + number % 2, 5, 3), dtype=np.uint8))
        image.fromarray(pixels[-1]).save(tmp_path / "image.png")
        samples.append((EncodedImage((tmp_path / "image.png").read_bytes()), number))
    samples.append((EncodedImage(samples[0][0][:60]), 9))
    ff.pack(samples, tmp_path / "pack")
    pack = ff.Pack(tmp_path / "pack")
    assert all(np.array_equal(pack[number][0].permute(1, 2, 0), pixels[number]) for number in range(6))
    assert pack.fetch([0, 2, 4])[0].shape == (3, 3, 4, 5)
    with pytest.raises(DataError, match=r"\[3, 4, 5\] in sample 0 .*, uint8 \[3, 5, 5\] in sample 1 "):
        pack.fetch([0, 1])
    with pytest.raises(DamagedSample, match="an image that cannot be decoded"):
        pack[6]
    assert ff.Pack(tmp_path / "pack", images=False)[6][0] == samples[6][0]
