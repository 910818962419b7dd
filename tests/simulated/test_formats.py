"""Files of other libraries are sources, where they are: each is written by its own library, and read back."""

import io
import itertools
import json
import os
import pickle
import re
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy_format
from PIL import Image
from tfrecord.writer import TFRecordWriter
from webdataset.compat import WebDataset
from webdataset.writer import TarWriter

import fourfold as ff
from fourfold.cli import feed_pack
from fourfold.feed.collate import collate_samples
from fourfold.feed.formats import source as formats_source
from fourfold.feed.formats.arrays import parse_npy
from fourfold.feed.formats.source import stackable
from fourfold.feed.formats.webdataset import split_name
from fourfold.feed.pack.schema import leaves
from fourfold.model.model_call import call_model
from fourfold.torch_kit.tensor_tree import tensor_of_list
from fourfold.verification.one_device import to_float64_model
from fourfold.words.errors import DamagedSample, DataError, SettingError

FILES = Path(__file__).parents[1] / "format_files"
SAMPLES = 10


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


def row(i: int) -> dict[str, Any]:
    """What each format's file holds: sample i, as far as the format can hold it."""
    return {
        "x": np.array([[i, i + 0.5, -i]] * 2, dtype=np.float32),
        "n": np.array(7 * i - 2**40),
        "small": np.array(i, dtype=np.int8),
        "flag": np.array(i % 2 == 0),
        "text": f"text – {i}",
        "raw": bytes([i, 0, 255]),
    }


def pixels(i: int) -> torch.Tensor:
    return torch.tensor([i, 2 * i, 3 * i], dtype=torch.uint8)[:, None, None].expand(3, 4, 5)


def image(i: int) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels(i).permute(1, 2, 0).numpy()))


def check(source: Any, expected: list[Any]) -> None:
    """The laws of a source: samples, batches, files, keys; and a pack of it holds the same."""
    assert len(source) == len(expected) == sum(source.shard_sizes)
    assert len({source.sample_key(i) for i in range(len(source))}) == len(source)
    for i, sample in enumerate(expected):
        check_same([source[i]], [sample])
    order = [len(source) - 1, 0, *range(1, len(source) - 1), 0]
    check_batch(source.fetch(order), [expected[i] for i in order])
    check_batch(source.fetch([]), [])
    with pytest.raises(IndexError):
        source[len(source)]
    check_same([pickle.loads(pickle.dumps(source))[1]], [expected[1]])  # as to a worker of a DataLoader


def check_same(found: list[Any], expected: list[Any]) -> None:
    assert str(collate_samples(found, [0])) == str(collate_samples(expected, [0]))


def check_batch(found: Any, expected: list[Any]) -> None:
    if expected:
        batch = collate_samples(expected, range(len(expected)))
        assert str(found) == str(batch if isinstance(batch, dict) else tuple(batch))
    else:
        assert not any(len(value) for _, value in leaves(found))


def check_pack(folder: Path, source: Any) -> None:
    ff.pack(source, folder / "all.pack")
    pack = ff.open_source(folder / "all.pack")
    assert isinstance(pack, ff.Pack)
    batches = pack.fetch(range(len(source))), source.fetch(range(len(source)))
    assert str([*leaves(batches[0])]) == str([*leaves(batches[1])])


# Parquet and Arrow


def table() -> Any:
    rows = [row(i) for i in range(SAMPLES)]
    columns = {name: [each[name] for each in rows] for name in rows[0]}
    types = {"n": pa.int64(), "small": pa.int8(), "flag": pa.bool_(), "text": pa.string(), "raw": pa.binary()}
    arrays = {
        name: pa.array([getattr(v, "item", lambda v=v: v)() for v in columns[name]], kind)
        for name, kind in types.items()
    }
    nested = pa.list_(pa.list_(pa.float32(), 3))
    return pa.table({"x": pa.array([each.tolist() for each in columns["x"]], nested), **arrays})


def write_parquet(folder: Path) -> None:
    pq.write_table(table().slice(0, 7), folder / "0.parquet", row_group_size=3, compression="zstd")
    pq.write_table(table().slice(7), folder / "1.parquet")


def write_feather(folder: Path) -> None:
    feather.write_feather(table(), str(folder / "x.feather"), chunksize=4, compression="lz4")


def write_stream(folder: Path) -> None:
    with pa.ipc.new_stream(str(folder / "x.arrow"), table().schema) as writer:
        writer.write_table(table(), max_chunksize=4)


@pytest.mark.parametrize(
    ("write", "shard_sizes"), [(write_parquet, [7, 3]), (write_feather, [10]), (write_stream, [10])]
)
def test_rows_of_tables_are_samples(tmp_path: Path, write: Callable[[Path], None], shard_sizes: list[int]):
    (tmp_path / "files").mkdir()
    write(tmp_path / "files")
    source = ff.open_source(tmp_path / "files")
    check(source, [row(i) for i in range(SAMPLES)])
    check_pack(tmp_path, source)
    assert source.shard_sizes == shard_sizes
    pairs = ff.open_source(tmp_path / "files", columns=["small", "x"], target="n")
    check(pairs, [({name: row(i)[name] for name in ("small", "x")}, row(i)["n"]) for i in range(SAMPLES)])
    check(
        ff.open_source(tmp_path / "files", columns=["x"], target="n"),
        [(row(i)["x"], row(i)["n"]) for i in range(SAMPLES)],
    )


@pytest.mark.parametrize("suffix", ["parquet", "csv", "npz"])
def test_numbers_of_a_table_train_in_the_dtype_that_is_asked_for(tmp_path: Path, suffix: str):
    path, count = tmp_path / f"x.{suffix}", 8
    if suffix == "npz":
        np.savez(path, x=np.arange(2.0 * count).reshape(count, 2), y=np.arange(count), label=np.zeros(count, int))
    else:
        both: dict[str, Any] = {"y": list(range(count)), "label": [0] * count}
        both["x"] = [[float(i), i / 2] if suffix == "parquet" else i / 3 for i in range(count)]
        (pq.write_table if suffix == "parquet" else csv.write_csv)(pa.table(both), path)
    inputs, labels = ff.open_source(path, target="label", dtype="float32").fetch(range(count))
    assert {each.dtype for each in inputs.values()} == {torch.float32}
    assert labels.dtype == torch.int64
    assert inputs["y"].tolist() == list(range(count))
    source = ff.open_source(path, target="label", dtype={"x": torch.bfloat16, "label": "int32"})
    inputs, labels = source.fetch(range(count))
    assert (inputs["x"].dtype, inputs["y"].dtype, labels.dtype) == (torch.bfloat16, torch.int64, torch.int32)
    check(source, [source[i] for i in range(count)])


def test_a_dtype_that_is_none_is_refused_and_one_that_is_missing_is_named_by_the_model(tmp_path: Path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": [[0.0, 1.0]] * 4, "label": [0, 1] * 2}), path)
    wrong = {"dtype = 'float23' .*try float32": "float23", "no field 'y'": {"y": "int8"}, "dtype = 3": 3}
    for message, dtype in wrong.items():
        with pytest.raises(DataError, match=message):
            ff.open_source(path, dtype=dtype)
    x, _ = ff.open_source(path, target="label").fetch([0, 1])
    with pytest.raises(RuntimeError) as caught:
        call_model(torch.nn.Linear(2, 1), x)
    assert [note.split("\n")[0] for note in caught.value.__notes__] == ["  inputs of float64"]
    hint = "try x.to(torch.float32) in forward or in ff.Transformed(source, …); or dtype= of ff.open_source"
    assert hint in caught.value.__notes__[0]
    with pytest.raises(RuntimeError) as caught:  # as in `verify`
        call_model(to_float64_model(torch.nn.Linear(2, 1)), torch.arange(2))
    assert hint in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((300, "uint8"), (-1, "uint64"), (2**40, "int32"), (1.5, "int64"), (float("nan"), "int64")),
        *((1e39, "float32"), (100_000, "float16"), (-1e6, "float8_e5m2"), (1e39, "complex64")),
    ],
)
def test_a_number_that_the_dtype_cannot_hold_is_a_damaged_sample(tmp_path: Path, value: float, dtype: str):
    pq.write_table(pa.table({"x": [type(value)(3), value]}), tmp_path / "x.parquet")
    source = ff.open_source(tmp_path / "x.parquet", dtype=dtype)
    assert source[0]["x"].tolist() == 3
    with pytest.raises(DamagedSample, match=f"numbers that {dtype} cannot hold"):
        source[1]


def test_numbers_that_are_not_finite_stay_what_they_are(tmp_path: Path):
    pq.write_table(pa.table({"x": [[float("inf"), -float("inf"), 3e38]]}), tmp_path / "x.parquet")
    assert ff.open_source(tmp_path / "x.parquet", dtype="float32")[0]["x"].isinf().tolist() == [True, True, False]


def test_tensors_of_arrow_have_their_shape(tmp_path: Path):
    storage = pa.array([list(range(6)), list(range(6, 12)), None, [None] * 6], pa.list_(pa.float32(), 6))
    for permutation, rows in ((None, [[6, 7, 8], [9, 10, 11]]), ([1, 0], [[6, 9], [7, 10], [8, 11]])):
        kind = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=permutation)
        pq.write_table(pa.table({"x": pa.ExtensionArray.from_storage(kind, storage)}), tmp_path / "x.parquet")
        source = ff.open_source(tmp_path / "x.parquet")
        assert source[1]["x"].tolist() == rows
        for row in (2, 3):
            with pytest.raises(DataError, match=f"row {row} cannot be read: x (is|holds a) null"):
                source[row]


def test_no_imaginary_part_is_dropped(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.full((4, 2), 1j, np.complex64))
    source = ff.open_source(tmp_path / "x.npy", dtype="float32")
    with pytest.raises(DataError, match="complex numbers, for float32"):
        source[0]
    with pytest.raises(RuntimeError) as caught:
        call_model(torch.nn.Linear(2, 1), ff.open_source(tmp_path / "x.npy").fetch([0])["x"])
    assert "try torch.view_as_real" in caught.value.__notes__[0]


def test_values_that_no_batch_can_hold_are_refused(tmp_path: Path):
    dates = pa.array([1, 2], pa.timestamp("s"))
    pq.write_table(
        pa.table({"a": [1, None], "when": dates, "cost": pa.array([1, 2], pa.decimal128(5))}), tmp_path / "x.parquet"
    )
    with pytest.raises(DataError) as caught:
        ff.open_source(tmp_path / "x.parquet")
    assert [each.got.split("'")[1] for each in caught.value.problems] == ["when", "cost"]
    source = ff.open_source(tmp_path / "x.parquet", columns=["a"])
    check_same([source[0]], [{"a": np.array(1.0) if source[0]["a"].dtype.kind == "f" else np.array(1)}])
    with pytest.raises(DamagedSample, match=r"x\.parquet, row 1 cannot be read: a is null"):
        source.fetch([0, 1])
    with pytest.raises(DataError, match="no column 'b'"):
        ff.open_source(tmp_path / "x.parquet", columns=["b"])


def test_data_sets_of_hugging_face_are_samples_and_files_that_rows_name_are_not_read(tmp_path: Path):
    secret = tmp_path / "secret.png"
    image(9).save(secret)
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["a", "b"]),
            "grid": datasets.Array2D((2, 3), "float32"),
        }
    )
    grids = [row(i)["x"] for i in range(6)]
    columns = {"image": [image(i) for i in range(6)], "label": [i % 2 for i in range(6)], "grid": grids}
    saved = datasets.Dataset.from_dict(columns, features=features)
    datasets.disable_progress_bars()
    saved.select([3, 1, 2, 0, 5, 4]).save_to_disk(tmp_path / "saved", num_shards=2)
    expected = [{"image": pixels(i), "label": np.array(i % 2), "grid": grids[i]} for i in (3, 1, 2, 0, 5, 4)]
    source = ff.open_source(tmp_path / "saved")
    check(source, expected)
    check_pack(tmp_path, source)
    assert source.shard_sizes == [3, 3]
    saved.to_parquet(tmp_path / "x.parquet")
    encoded = ff.open_source(tmp_path / "x.parquet", images=False)
    assert encoded[2]["image"].startswith(b"\x89PNG")
    assert torch.equal(ff.open_source(tmp_path / "x.parquet", columns=["image"], target="label")[2][0], pixels(2))
    pointing = datasets.Features({"image": datasets.Image()}).arrow_schema
    rows = pa.table({"image": [{"bytes": None, "path": str(secret)}]}, schema=pointing)
    pq.write_table(rows, tmp_path / "pointing.parquet")
    with pytest.raises(DamagedSample, match=r"image\.bytes is null"):
        ff.open_source(tmp_path / "pointing.parquet")[0]
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"several data sets: test, train"):
        ff.open_source(tmp_path / "splits")


# WebDataset


def write_tars(folder: Path) -> list[Any]:
    expected = []
    for shard in range(2):
        with TarWriter(str(folder / f"{shard}.tar"), encoder=True) as writer:
            for i in range(5 * shard, 5 * shard + 5):
                key = f"folder/{'long' * 40 if i == 3 else ''}{i}"
                values = {
                    "png": image(i).copy(),
                    "cls": i,
                    "txt": row(i)["text"],
                    "npy": row(i)["x"],
                    "raw.bin": row(i)["raw"],
                }
                values["png"] = np.asarray(values["png"]) / 255.0
                writer.write({"__key__": key, **values, "json": {"box": [1, i], "name": "n"}})
                expected.append(
                    {
                        "png": pixels(i),
                        "cls": np.array(i),
                        "txt": row(i)["text"],
                        "npy": row(i)["x"],
                        "raw.bin": row(i)["raw"],
                        "json": {"box": torch.tensor([1, i]), "name": "n"},
                    }
                )
    return expected


def test_samples_of_webdataset_are_samples(tmp_path: Path):
    (tmp_path / "files").mkdir()
    expected = write_tars(tmp_path / "files")
    source = ff.open_source(tmp_path / "files")
    keys = [each["__key__"] for each in WebDataset(source._records.paths, shardshuffle=False)]
    assert [source.sample_key(i).partition("sample ")[2] for i in range(10)] == keys
    check(source, [{name: sample[name] for name in source[0]} for sample in expected])
    check_pack(tmp_path, source)
    pairs = ff.open_source(str(tmp_path / "files" / "*.tar"), columns=["png"], target="cls")
    check(pairs, [(pixels(i), np.array(i)) for i in range(10)])
    assert pairs.bytes_read > 0
    for inputs, labels in ff.Feed(pairs, batch_size=4, shuffle=False):
        assert torch.equal(inputs[:, 1, 0, 0], 2 * labels.to(torch.uint8))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_forms_of_tar_are_read(tmp_path: Path, form: int):
    names = ["a.txt", f"{'b' * 90}/{'c' * 80}.txt", *([] if form == tarfile.USTAR_FORMAT else ["d" * 300 + "–ü.txt"])]
    with tarfile.open(tmp_path / "x.tar", "w", format=form) as archive:
        for number, name in enumerate(names):
            for member, content in ((name, str(number).encode() * 600 * number), (f"./__meta__{number}", b"skipped")):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            folder = tarfile.TarInfo(f"folder{number}.txt")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
    source = ff.open_source(tmp_path / "x.tar")
    assert [each["txt"] for each in map(source.__getitem__, range(len(source)))] == [
        str(n) * 600 * n for n in range(len(names))
    ]
    assert [source.sample_key(n).partition("sample ")[2] + ".txt" for n in range(len(names))] == names


def tar_of(path: Path, *members: tuple[str, bytes, bytes]) -> bytes:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(content)
            archive.addfile(member, io.BytesIO(content))
    return path.read_bytes()


def test_nothing_of_an_archive_is_left_out_without_a_word(tmp_path: Path):
    path = tmp_path / "x.tar"
    one = tar_of(path, ("a.txt", tarfile.REGTYPE, b"a"))
    for tail in (one, bytes(2**21) + b"a"):
        path.write_bytes(one + tail)
        with pytest.raises(DataError, match=r"x.tar: more behind the end of the archive.* try tar --concatenate"):
            ff.open_source(path)
    for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE):
        tar_of(path, ("a.txt", tarfile.REGTYPE, b"a"), ("a.cls", kind, b""), ("README", kind, b""))
        with pytest.raises(DataError, match=r"a\.cls: a link or a device.* try tar --dereference --hard-dereference"):
            ff.open_source(path)
        assert ff.open_source(path, columns=["txt"])[0] == {"txt": "a"}
    named = b"16 path=b.c.txt\n"
    tar_of(path, ("p", tarfile.SOLARIS_XHDTYPE, named), ("a.txt", tarfile.REGTYPE, b"a"))
    assert ff.open_source(path)[0] == {"c.txt": "a"}
    tar_of(path, ("p", tarfile.XGLTYPE, named), ("a.txt", tarfile.REGTYPE, b"a"))
    with pytest.raises(DataError, match="a path for all members"):
        ff.open_source(path)


def test_names_of_members_are_divided_as_webdataset_divides_them(tmp_path: Path):
    its = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
    for name in map("".join, itertools.chain.from_iterable(itertools.product("a./", repeat=n) for n in range(8))):
        found = its.fullmatch(name)
        assert split_name(name) == (found and found.groups())
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a/" * 2**18 + "b", "s0.txt"):  # for webdataset's expression, an hour
            archive.addfile(tarfile.TarInfo(name))
    assert ff.open_source(tmp_path / "x.tar")[0] == {"txt": ""}


def test_pickles_are_refused_when_opened(tmp_path: Path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in ("1.txt", "1.pyd"):
            (tmp_path / name).write_bytes(pickle.dumps(print))
            archive.add(tmp_path / name, name)
    with pytest.raises(DataError, match="a pickle, which is never read"):
        ff.open_source(tmp_path / "x.tar")
    assert len(ff.open_source(tmp_path / "x.tar", columns=["txt"])) == 1
    index = json.loads((FILES / "mds" / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_encodings"][0] = "pkl"
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="a pickle, which is never read"):
        ff.open_source(tmp_path / "mds")


# TFRecord


def write_tfrecords(folder: Path) -> list[Any]:
    expected = []
    for shard in range(2):
        writer = TFRecordWriter(str(folder / f"train.tfrecord-{shard:05}-of-00002"))
        for i in range(5 * shard, 5 * shard + 5):
            numbers, values = [i, -i, 2**62 + i], np.array([i / 3, -1e30], np.float32)
            writer.write({"raw": (b"\x00" * i, "byte"), "n": (numbers, "int"), "x": (values.tolist(), "float")})
            expected.append({"n": np.array(numbers), "raw": b"\x00" * i, "x": values})
        writer.close()
    return expected


def test_examples_of_tfrecord_are_samples(tmp_path: Path):
    (tmp_path / "files").mkdir()
    expected = write_tfrecords(tmp_path / "files")
    source = ff.open_source(tmp_path / "files")
    check(source, expected)
    check_pack(tmp_path, source)
    (tmp_path / "unnamed").write_bytes(next((tmp_path / "files").iterdir()).read_bytes())
    assert len(ff.open_source(tmp_path / "unnamed")) == 5
    (tmp_path / "x.tfrecord").write_bytes(b"\x1f\x8b" + bytes(100))
    with pytest.raises(DataError, match="compressed by gzip"):
        ff.open_source(tmp_path / "x.tfrecord")


# MDS and Megatron: files that their libraries have written, in `tests/format_files`


def mds_sample(i: int) -> dict[str, Any]:
    return {
        "any": np.arange(i + 1).reshape(1, -1),
        "big": 10**i,
        "dec": str(i / 8).removesuffix(".0"),
        "dims": np.full((i + 1, 300 if i == 4 else 2), i, np.int16),
        "fixed": np.full((2, 3), i, np.float32),
        "half": np.array(i / 2, np.float16),
        "image": torch.full((3, 2, 3), 40 * i, dtype=torch.uint8),
        "jpeg": torch.full((3, 2, 3), 40 * i, dtype=torch.uint8),
        "json": {"a": torch.tensor([1, i])},
        "number": np.array(i),
        "pil": np.full((3, 2, 3), 40 * i, np.uint8),
        "raw": bytes([i]) * i,
        "real": i / 4,
        "small": np.array(i, np.uint8),
        "text": f"text {i}",
    }


@pytest.mark.parametrize("folder", ["mds", "mds-zstd", "mds-gz"])
def test_samples_of_mds_are_samples(folder: str):
    alike = [name for name in mds_sample(0) if name not in ("any", "dims")]  # a batch stacks equal shapes
    source = ff.open_source(FILES / folder, columns=alike)
    check(source, [{name: mds_sample(i)[name] for name in alike} for i in range(5)])
    whole = ff.open_source(FILES / folder)
    for i in range(5):
        check_same([whole[i]], [mds_sample(i)])
    assert len(source.shard_sizes) == 2
    pairs = ff.open_source(FILES / folder, columns=["fixed"], target="number")
    check(pairs, [(mds_sample(i)["fixed"], np.array(i)) for i in range(5)])


def megatron_sequences(base: int) -> list[np.ndarray]:
    lengths = [(doc, n + 2) for doc in range(3) for n in range(doc + 1)]
    return [np.arange(base + 10 * doc, base + 10 * doc + length, dtype=np.uint16) for doc, length in lengths]


def test_sequences_of_megatron_are_samples_and_their_tokens_are_rows():
    sequences = [*megatron_sequences(0), *megatron_sequences(1000)]
    source = ff.open_source(FILES / "megatron")
    assert [each["tokens"].tolist() for each in map(source.__getitem__, range(12))] == [
        each.tolist() for each in sequences
    ]
    assert source[0]["tokens"].dtype == np.uint16
    assert source.shard_sizes == [6, 6]
    one = ff.open_source(FILES / "megatron" / "b")  # as Megatron names it
    assert one.sample_key(2).endswith("b.bin, sequence 2")
    tokens = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    rows = ff.open_source(FILES / "megatron", length=5)
    for i in range(len(rows)):
        inputs, targets = rows[i]
        assert torch.equal(inputs["tokens"], tokens[5 * i : 5 * i + 5])
        assert torch.equal(targets, tokens[5 * i + 1 : 5 * i + 6])
    assert len(rows) == (len(tokens) - 1) // 5
    for batch, targets in ff.Feed(rows, batch_size=3):
        assert batch["tokens"].shape == targets.shape


# HDF5 and arrays


def test_rows_of_hdf5_are_samples(tmp_path: Path):
    (tmp_path / "files").mkdir()
    for number, rows in enumerate((range(6), range(6, 10))):
        with h5py.File(tmp_path / "files" / f"{number}.h5", "w") as file:
            for name in ("x", "small", "flag"):
                file[name] = np.stack([row(i)[name] for i in rows])
            file.create_dataset("deep/n", data=[row(i)["n"] for i in rows], chunks=(2,), compression="gzip")
            file["text"] = [row(i)["text"] for i in rows]
    source = ff.open_source(tmp_path / "files")
    expected = [
        {"deep/n": row(i)["n"], **{name: row(i)[name] for name in ("flag", "small", "text", "x")}} for i in range(10)
    ]
    check(source, expected)
    check_pack(tmp_path, source)
    check(
        ff.open_source(tmp_path / "files", columns=["x"], target="deep/n"),
        [(row(i)["x"], row(i)["n"]) for i in range(10)],
    )


def test_hdf5_reads_nothing_outside_its_file(tmp_path: Path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.arange(3)
    (tmp_path / "raw").write_bytes(bytes(24))
    layout = h5py.VirtualLayout(shape=(3,), dtype="i8")
    layout[:] = h5py.VirtualSource(tmp_path / "secret.h5", "x", shape=(3,))
    writes: dict[str, Callable[[Any], Any]] = {
        "link": lambda file: file.__setitem__("x", h5py.ExternalLink("secret.h5", "x")),
        "raw": lambda file: file.create_dataset("x", (3,), "i8", external=[(str(tmp_path / "raw"), 0, 24)]),
        "virtual": lambda file: file.create_virtual_dataset("x", layout),
        "circle": lambda file: file.create_group("g").__setitem__("g", file["/"]),
        "huge": lambda file: file.create_dataset("x", (2, 2**40), "i8", chunks=(1, 2**20)),
    }
    for name, write in writes.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            write(file)
        with pytest.raises(DataError, match=rf"{name}\.h5: .*(link|other files|deep|rows of 17592186044416 bytes)"):
            ff.open_source(tmp_path / f"{name}.h5")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, None])
def test_rows_of_many_array_files_are_samples(tmp_path: Path, save: Any):
    (tmp_path / "files").mkdir()
    for number, rows in enumerate((range(6), range(6, 10))):
        inputs, targets = np.stack([row(i)["x"] for i in rows]).astype(">f4"), np.stack([row(i)["n"] for i in rows])
        if save is None:
            np.save(tmp_path / "files" / f"{number}.npy", inputs)
        else:
            save(tmp_path / "files" / f"{number}.npz", inputs=inputs, targets=targets)
    source = ff.open_source(tmp_path / "files", rows=True)
    check(source, [{"x": row(i)["x"]} if save is None else (row(i)["x"], row(i)["n"]) for i in range(10)])
    check_pack(tmp_path, source)
    assert source.shard_sizes == [6, 4]
    assert len(ff.open_source(tmp_path / "files")) == 2  # a file is a sample
    np.save(tmp_path / "files" / "9.npy", np.array([print]), allow_pickle=True)
    with pytest.raises(DataError, match=r"(array of object|several|npy)"):
        ff.open_source(tmp_path / "files", rows=True)


# Plain files, and what is at a path


def by_each_list(value: Any) -> Any:
    """As `stackable`, which looks at the shapes of lists once: a tensor of each list of which torch makes one."""
    if isinstance(value, dict):
        return {name: by_each_list(each) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    try:
        tensor = tensor_of_list(value)
        return torch.as_tensor(value, dtype=torch.float64) if tensor.is_floating_point() else tensor
    except (TypeError, ValueError, RuntimeError):
        return [by_each_list(each) for each in value]


numbers = st.integers(-3, 3) | st.sampled_from([0.5, float("inf"), True, None, "a"])
values = st.recursive(numbers, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=1), each))


@settings(max_examples=300, deadline=None)
@given(values)
def test_lists_of_json_are_tensors_where_torch_makes_one(value: Any):
    assert str(stackable(value)) == str(by_each_list(value))


def test_a_deep_list_is_tried_once(monkeypatch: pytest.MonkeyPatch):
    value, tried = [*range(1000), "text"], []
    for _ in range(200):
        value = [value]
    monkeypatch.setattr(formats_source, "tensor_of_list", lambda each: tried.append(len(each)) or tensor_of_list(each))
    assert str(stackable(value)) == str(value)
    assert len(tried) == 1


def test_a_file_is_one_sample_however_often_its_pattern_finds_it(tmp_path: Path):
    (tmp_path / "images" / "images").mkdir(parents=True)
    (tmp_path / "images" / "images" / "a.txt").write_text("x\n")
    assert len(ff.open_source(tmp_path / "**" / "images" / "**" / "*.txt")) == 1


def test_plain_files_are_in_batches_with_their_text(tmp_path: Path):
    lines = [{"a": i, "b": [1, 2.5], "t": f"t{i}"} for i in range(4)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    check(
        ff.open_source(tmp_path / "x.jsonl"),
        [{**each, "b": torch.tensor([1, 2.5], dtype=torch.float64)} for each in lines],
    )
    (tmp_path / "x.csv").write_text("a,b\n1,x\n2,y\n")
    check(ff.open_source(tmp_path / "x.csv", target="a"), [("x", 1), ("y", 2)])
    (tmp_path / "x.txt").write_text("one\ntwo\n")
    check(ff.open_source(tmp_path / "x.txt"), [{"text": "one"}, {"text": "two"}])
    for number in range(3):
        path = tmp_path / "images" / ["dog", "cat"][number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image(number).save(path)
    source = ff.open_source(tmp_path / "images")
    check(source, [(pixels(1), 0), (pixels(0), 1), (pixels(2), 1)])
    check_pack(tmp_path, source)
    assert source.classes == ["cat", "dog"]
    assert source.shard_sizes == [1, 1, 1]


def test_what_cannot_be_opened_is_said_with_what_can(tmp_path: Path):
    def error(path: Any, **options: Any) -> str:
        with pytest.raises(DataError) as caught:
            ff.open_source(path, **options)
        return str(caught.value)

    (tmp_path / "x.foo").write_text("?")
    (tmp_path / "train.csv").write_text("a\n1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "lone.bin").write_bytes(b"?")
    os.mkfifo(tmp_path / "pipe.tar")
    for known in ("pack", "images", ".parquet", "MDS", "WebDataset", ".tfrecord", ".h5", "Megatron"):
        assert known in error(tmp_path / "x.foo")
    assert "1 csv" in error(tmp_path)
    assert "of no known kind" in error(tmp_path)
    assert "no files" in error(tmp_path / "empty")
    assert "of no known kind" in error(tmp_path / "lone.bin")
    assert "no file that fits" in error(tmp_path / "*.parquet")
    assert "is no file" in error(tmp_path / "pipe.tar")
    assert f"try {tmp_path / 'train.csv'}" in error(tmp_path / "trian.csv")
    assert "rows= for csv" in error(tmp_path / "train.csv", rows=True)
    assert "length= for csv" in error(tmp_path / "train.csv", length=3)
    assert "columns = 'a'" in error(tmp_path / "train.csv", columns="a")
    assert "no field 'nunber'" in error(FILES / "mds", target="nunber")
    assert "try number" in error(FILES / "mds", target="nunber")
    assert "no column 'none'" in error(FILES / "mds", columns=["text"], target="none")
    assert "no field 'b'" in error(tmp_path / "train.csv", columns=["b"])


def test_files_with_other_columns_are_named(tmp_path: Path):
    pq.write_table(table(), tmp_path / "0.parquet")
    pq.write_table(table().rename_columns(["x", "m", "small", "flag", "text", "raw"]), tmp_path / "1.parquet")
    with pytest.raises(DataError, match=r"1\.parquet: no n, m int64 +need n int64, no m, as in .*0\.parquet"):
        ff.open_source(tmp_path)


def test_the_command_packs_fields_of_all_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pq.write_table(table(), tmp_path / "x.parquet")
    assert feed_pack.run_pack([str(tmp_path / "x.parquet"), str(tmp_path / "p"), "columns=x,small", "target=n"]) == 0
    expected = [({"x": row(i)["x"], "small": row(i)["small"]}, row(i)["n"]) for i in range(SAMPLES)]
    pack = ff.open_source(tmp_path / "p")
    check_same([pack[7]], [expected[7]])
    np.savez(tmp_path / "x.npz", inputs=np.zeros((3, 2)), targets=np.arange(3))
    assert feed_pack.run_pack([str(tmp_path / "x.npz"), str(tmp_path / "q"), "rows=true"]) == 0
    assert len(ff.open_source(tmp_path / "q")) == 3
    with pytest.raises(SettingError, match=r"rows = maybe .*need true or false"):
        feed_pack.run_pack([str(tmp_path / "x.npz"), str(tmp_path / "r"), "rows=maybe"])
    with pytest.raises(SettingError, match=r"target= for x\.py:a"):
        feed_pack.run_pack(["x.py:a", str(tmp_path / "r"), "target=a"])
    assert "packed 10 samples" in capsys.readouterr().out


def test_columns_of_one_name_are_refused_in_few_words(tmp_path: Path):
    names = [f"feature_{n // 2}" for n in range(1500)]
    table = pa.Table.from_arrays([pa.array([0])] * len(names), names=names)
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"several columns named feature_0, feature_1, .* …") as caught:
        ff.open_source(tmp_path / "x.parquet")
    assert len(str(caught.value)) < 800


def test_one_thread_at_a_time_parses_the_head_of_an_array(monkeypatch):
    """Python 3.11's parser of literals, with which numpy reads a head, fails where two threads are in it."""
    inside, most = [], []
    read = npy_format.read_array_header_1_0

    def read_slowly(file: Any) -> Any:
        inside.append(file)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()
        return read(file)

    monkeypatch.setattr(npy_format, "read_array_header_1_0", read_slowly)
    content = io.BytesIO()
    np.save(content, np.zeros((3, 4)))
    with ThreadPoolExecutor(4) as pool:
        shapes = list(pool.map(lambda _: parse_npy(content.getvalue()).shape, range(12)))
    assert shapes == [(3, 4)] * 12
    assert max(most) == 1
