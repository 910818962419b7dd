"""Opening files: what a folder holds besides its data, and names, marks and nulls, are never taken for damage."""

import bz2
import codecs
import functools
import gzip
import io
import json
import lzma
import os
import re
import shutil
import sqlite3
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps
from tfrecord.writer import TFRecordWriter

import fourfold as ff
from fourfold.feed.formats.mds import parse_encoding
from fourfold.feed.pack.values import decode_image
from fourfold.words.errors import DamagedSample, DataError

MDS = Path(__file__).parents[1] / "format_files" / "mds"


def write_tar(path: Path, *samples: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, sample in enumerate(samples):
            for field, content in sample.items():
                member = tarfile.TarInfo(f"{number}.{field}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def samples_of(path: Any, **options: Any) -> list[Any]:
    source = ff.open_source(path, **options)
    return [source[index] for index in range(len(source))]


def message(path: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        ff.open_source(path, **options)
    assert not isinstance(caught.value, DamagedSample)
    return str(caught.value)


# Folders of Parquet files

NUMBERS, TEXTS = [[1.0], [2.0]], ["a", "b"]
TYPES = {
    "nullable": (pa.list_(pa.float64()), pa.string()),
    "never null": (pa.list_(pa.field("element", pa.float64(), nullable=False)), pa.large_string()),
    "otherwise stored": (pa.list_(pa.float64(), 1), pa.dictionary(pa.int8(), pa.string())),
}


def test_parquet_files_are_one_data_set_if_their_samples_have_one_form(tmp_path: Path):
    for place, (name, types) in enumerate(TYPES.items()):
        fields = [pa.field(column, kind, nullable=name == "nullable") for column, kind in zip("xt", types, strict=True)]
        arrays = [pa.array(values, kind) for values, kind in zip((NUMBERS, TEXTS), types, strict=True)]
        table = pa.table(arrays, schema=pa.schema(fields))
        pq.write_table(table.select(["t", "x"]) if place == 2 else table, tmp_path / f"{place}.parquet")
    found = samples_of(tmp_path)
    assert [list(each) for each in found] == [["x", "t"]] * 6  # in the order of the first file
    assert [(each["x"].tolist(), each["t"]) for each in found] == list(zip(NUMBERS, TEXTS, strict=True)) * 3


def test_parquet_files_may_differ_in_columns_that_are_left_out(tmp_path: Path):
    pq.write_table(pa.table({"x": [1.0], "y": [1.0], "note": ["p"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": [2.0], "y": [2], "note": pa.array([None], pa.null())}), tmp_path / "1.parquet")
    assert "column 'note' of null" in message(tmp_path)
    got = message(tmp_path, columns=["x", "y"])
    assert re.search(r"1\.parquet: y int64 +need y double, as in .*0\.parquet .*columns= without", got)
    assert samples_of(tmp_path, columns=["x"]) == [{"x": 1.0}, {"x": 2.0}]


def test_what_spark_writes_beside_its_data_is_no_data(tmp_path: Path):
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "part-0.snappy.parquet", metadata_collector=(found := []))
    found[0].set_file_path("part-0.snappy.parquet")
    found[0].write_metadata_file(tmp_path / "_metadata")
    (tmp_path / "_SUCCESS").write_bytes(b"")
    for path in (tmp_path, tmp_path / "*"):
        assert samples_of(path) == [{"x": 1.0}]


def test_the_pattern_that_is_suggested_opens_the_files(tmp_path: Path):
    (tmp_path / "a [1]" / "b").mkdir(parents=True)
    (tmp_path / "a [1]" / "README").write_text("?")
    for shard in range(2):
        writer = TFRecordWriter(str(tmp_path / "a [1]" / "b" / f"x.tfrecord-0000{shard}-of-00002"))
        writer.write({"x": (1, "int")})
        writer.close()
    (tmp_path / "a [1]" / "x.csv").write_text("a\n1\n")
    found = re.search('such as "(.*)"', message(tmp_path / "a [1]"))
    assert found is not None
    assert len(samples_of(found[1])) == 2
    for name in ("x.jpg", "y.png", "z.JPG"):
        (tmp_path / "a [1]" / name).write_bytes(b"?")
    assert "a folder of their own" in message(tmp_path / "a [1]")  # no pattern has all of them


# Names of columns


def write_all(folder: Path) -> dict[str, dict[str, Any]]:
    """One file of each format with the fields `first` and `label`; the options that it takes."""
    write_tar(folder / "x.tar", {"FIRST": b"a", "Label": b"b"})
    (folder / "x.csv").write_text("first,label\n1,2\n")
    (folder / "x.jsonl").write_text('{"first": 1}\n{"first": 1, "label": 2}\n')
    np.savez(folder / "x.npz", first=np.arange(3.0), label=np.arange(3))
    (folder / "rows").mkdir()
    shutil.copy(folder / "x.npz", folder / "rows")
    pq.write_table(pa.table({"first": [1.0], "label": [2]}), folder / "x.parquet")
    with h5py.File(folder / "x.h5", "w") as file:
        file["first"] = file["label"] = np.arange(3)
    writer = TFRecordWriter(str(folder / "x.tfrecord"))
    writer.write({"first": (1, "int"), "label": (1, "int")})
    writer.close()
    names = ("x.tar", "x.csv", "x.jsonl", "x.npz", "x.parquet", "x.h5", "x.tfrecord")
    return {"rows": {"rows": True}, **{name: {} for name in names}}


def test_a_name_that_no_record_has_is_refused_when_opened_with_the_nearest_one(tmp_path: Path):
    for name, options in write_all(tmp_path).items():
        for wrong in ({"columns": ["LABEL"]}, {"target": "lable"}, {"columns": ["first"], "target": "labels"}):
            got = message(tmp_path / name, **options, **wrong)
            assert re.search(r"no \w+ 'lab\w+' +need one of (first, label|label, first) +try label", got, re.I), got
        ff.open_source(tmp_path / name, **options, columns=["first"], target="label")
    assert "no column 'LABEL' " in message(MDS, columns=["LABEL"])


def test_names_that_leave_no_inputs_or_are_no_texts_are_refused(tmp_path: Path):
    (tmp_path / "x.csv").write_text("label\n2\n")
    assert "no field but the target label" in message(tmp_path / "x.csv", target="label")
    assert "need at least one of the inputs" in message(tmp_path / "x.csv", columns=["label"], target="label")
    assert "target = 1 " in message(tmp_path / "x.csv", target=1)
    for columns in ("label", [1], [], ["label", "label"], {"label": 1}):
        assert "need a list of different names" in message(tmp_path / "x.csv", columns=columns)


def test_a_record_without_a_field_that_others_have_is_damaged(tmp_path: Path):
    write_all(tmp_path)
    source = ff.open_source(tmp_path / "x.jsonl", target="label")
    with pytest.raises(DamagedSample, match="record 0 cannot be read: no label, but first"):
        source[0]
    assert source[1] == (1, 2)
    (tmp_path / "x.jsonl").write_text('{"first": 1, \n{"first": 1}\n')  # the first one is not even JSON
    assert "no field 'label'" in message(tmp_path / "x.jsonl", target="label")


# Byte-order marks and nulls


def test_byte_order_marks_are_no_part_of_the_text(tmp_path: Path):
    for name, content, expected in (
        ("x.jsonl", '{"x": 1}\n\ufeff{"x": 2}\n', [{"x": 1}, {"x": 2}]),  # of two files, one behind the other
        ("x.txt", "one\n\ufefftwo\n", [{"text": "one"}, {"text": "two"}]),
        ("x.csv", '"x",y\n1,2\n', [{"x": 1, "y": 2}]),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert samples_of(tmp_path / name) == expected
        for other in ("UTF-16", "UTF-32"):
            (tmp_path / name).write_text(content, encoding=other)
            assert f"in {other}   need text in UTF-8   try iconv -f {other} -t UTF-8 {name}" in message(tmp_path / name)
    mark = codecs.BOM_UTF8
    write_tar(tmp_path / "x.tar", {"txt": mark + b"one", "cls": mark + b"1", "json": mark + b'{"x": 1}'})
    assert samples_of(tmp_path / "x.tar") == [{"txt": "one", "cls": 1, "json": {"x": 1}}]
    (tmp_path / "x.jsonl").write_text('\n\n{"x": 1}\n', encoding="utf-8-sig")
    (batch,) = ff.Feed(ff.open_source(tmp_path / "x.jsonl"), batch_size=1, bad_samples=1)
    assert batch["x"].tolist() == [1]


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.txt"])
@pytest.mark.parametrize(("pack", "unpack"), [(gzip.compress, "gzip"), (lzma.compress, "xz"), (bz2.compress, "bzip2")])
def test_text_that_is_compressed_is_not_called_damaged(tmp_path: Path, name: str, pack: Any, unpack: str):
    (tmp_path / name).write_bytes(pack(b'{"x": 1}\n'))
    assert f"compressed data in {name}   need plain text   try {unpack} -dc {name}" in message(tmp_path / name)


@pytest.mark.parametrize("lists", [[[], [1], [2, 3]], [[1], [], [2, 3]], [[], [[4]]], [[], []]], ids=str)
def test_lists_of_other_lengths_lose_no_number(tmp_path: Path, lists: list[Any]):
    """torch makes a tensor of shape [3, 0] of the first of them."""
    (tmp_path / "x.jsonl").write_text(json.dumps({"x": lists}))
    sample = ff.open_source(tmp_path / "x.jsonl")[0]["x"]
    assert json.loads(json.dumps(sample, default=lambda each: each.tolist())) == lists


@pytest.mark.parametrize("name", ["x.jsonl", "x.tar"])
def test_lists_of_json_keep_all_digits(tmp_path: Path, name: str):
    content = b'{"a": [1e300, 16777217, 0.1], "b": [9007199254740993]}'
    if name.endswith(".tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            member = tarfile.TarInfo("0.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    else:
        (tmp_path / name).write_bytes(content + b"\n")
    (sample,) = samples_of(tmp_path / name)
    sample = sample.get("json", sample)
    assert sample["a"].tolist() == [1e300, 16777217, 0.1]
    assert sample["b"].tolist() == [9007199254740993]


def test_a_null_in_json_is_none_and_among_text_in_a_list(tmp_path: Path):
    samples = [{"n": 1, "error": None, "tag": {"name": "a"}}, {"n": 2, "error": "late", "tag": {"name": None}}]
    write_tar(tmp_path / "x.tar", *({"json": json.dumps(each).encode()} for each in samples))
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, samples)))
    for source in (ff.open_source(tmp_path / "x.jsonl"), ff.open_source(tmp_path / "x.tar", columns=["json"])):
        fields = [sample.get("json", sample) for sample in (source[0], source[1])]
        assert fields == samples
        batch, empty = (each.get("json", each) for each in (source.fetch([1, 0]), source.fetch([])))
        assert batch["n"].tolist() == [2, 1]
        assert (batch["error"], batch["tag"]) == (["late", None], {"name": [None, "a"]})
        assert (empty["error"], empty["tag"]) == ([], {"name": []})
    (tmp_path / "x.jsonl").write_text('{"x": null}\n{"x": 3}\n')
    for order in ([0, 1], [1, 0]):  # a number and a null cannot be stacked
        with pytest.raises(DataError, match=r"\['x'\]: (None|int) in sample .* columns= without it"):
            ff.open_source(tmp_path / "x.jsonl").fetch(order)
    (tmp_path / "x.jsonl").write_text('{"x": [1, 2]}\n{"x": [null, 2]}\n')
    with pytest.raises(DataError, match=r"\['x'\]\[0\]: missing in sample 0 .*, None in sample 1 .* in place of null"):
        ff.open_source(tmp_path / "x.jsonl").fetch([0, 1])


# Damage is a damaged sample, whatever is damaged


def whole_samples(source: Any) -> Any:
    """All samples but a damaged one, as a batch."""
    (batch,) = ff.Feed(source, batch_size=len(source), shuffle=False, bad_samples=1)
    return batch


def test_a_number_that_no_tensor_can_hold_is_damage(tmp_path: Path):
    texts = [f'{{"x": {{"y": {number}}}}}' for number in ("1", 2**63, "3")]
    write_tar(tmp_path / "x.tar", *({"json": text.encode()} for text in texts))
    (tmp_path / "x.jsonl").write_text("\n".join(texts))
    (tmp_path / "y.jsonl").write_text("\n".join(texts).replace(": {", ": [{").replace("}}", "}]}"))
    (tmp_path / "z.jsonl").write_text("\n".join(f'{{"x": [{number}]}}' for number in ("1", -(2**63) - 1, "3")))
    for name in ("x.tar", "x.jsonl", "y.jsonl", "z.jsonl"):
        source = ff.open_source(tmp_path / name)
        with pytest.raises(DamagedSample, match=r"1 cannot be read: .*a whole number of more than 64 bits"):
            source.fetch([0, 1])
        assert len(re.findall(r"\b[13]\b", str(whole_samples(source)))) == 2  # the first and the third
    with pytest.raises(ValueError, match="more than 64 bits"):
        parse_encoding("str_int").decode(str(2**63).encode())


def test_an_archive_that_was_cut_off_after_it_was_opened_has_damaged_samples(tmp_path: Path):
    write_tar(tmp_path / "x.tar", {"txt": b"a"}, {"txt": b"b"})
    source = ff.open_source(tmp_path / "x.tar")
    os.truncate(tmp_path / "x.tar", 1024)
    assert whole_samples(source) == {"txt": ["a"]}


def test_nulls_within_lists_and_metadata_that_lie_are_damage_of_their_rows(tmp_path: Path):
    lists = pa.array([[[1], [2]], [[1], None]], pa.list_(pa.list_(pa.int64())))
    pq.write_table(pa.table({"x": lists}), tmp_path / "x.parquet")
    assert whole_samples(ff.open_source(tmp_path / "x.parquet"))["x"].tolist() == [[[1], [2]]]
    features = {"info": {"features": {name: {"_type": "Image"} for name in ("x", "text", "other")}}}
    table = pa.table({"x": [{"y": 1}], "text": ["a"]}).replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, tmp_path / "y.parquet")
    assert samples_of(tmp_path / "y.parquet") == [{"x": {"y": 1}, "text": "a"}]


def png_of_16_bits(color_type: int, channels: int) -> bytes:
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", 1, 1, 16, color_type, 0, 0, 0),
        b"IDAT": zlib.compress(b"\0" + struct.pack(f">{channels}H", *[1000] * channels)),
        b"IEND": b"",
    }
    written = [
        len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4) for kind, data in chunks.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def tiff_of_16_bits(mode: str) -> bytes:
    file, channels = io.BytesIO(), len(mode)
    Image.new(mode, (1, 1)).save(file, "TIFF")
    bits = file.getvalue().replace(struct.pack(f"<{channels}H", *[8] * channels), struct.pack("<H", 16) * channels)
    return bits + bytes(2 * channels)


def test_samples_of_16_bits_are_not_cut_down_to_8(tmp_path: Path):
    for color_type, channels in ((0, 1), (4, 2), (2, 3), (6, 4)):
        (tmp_path / f"{color_type}.png").write_bytes(png_of_16_bits(color_type, channels))
    for mode in ("RGB", "RGBA", "CMYK"):
        (tmp_path / f"{mode}.tif").write_bytes(tiff_of_16_bits(mode))
    for path in tmp_path.iterdir():
        with pytest.raises(DamagedSample, match="samples of more than 8 bits in an image; with images=False"):
            samples_of(path)


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["9007199254740993", "2"], [9007199254740993, 2]),
        (["9007199254740993", "2.5"], ["9007199254740993", "2.5"]),
        (["2.5", "9007199254740993"], ["2.5", "9007199254740993"]),
        (["2.5", "9007199254740992"], [2.5, 9007199254740992.0]),
        (["1", "1e400"], ["1", "1e400"]),
        (["1", "inf"], [1.0, float("inf")]),
        (["9223372036854775808", "1"], ["9223372036854775808", "1"]),
    ],
)
def test_a_column_of_csv_is_of_numbers_only_if_every_cell_survives_it(tmp_path: Path, cells: list[str], values: Any):
    (tmp_path / "x.csv").write_text("x,y\n" + "".join(f"{cell},0\n" for cell in cells))
    found = [sample["x"] for sample in samples_of(tmp_path / "x.csv")]
    assert found == values
    assert list(map(type, found)) == list(map(type, values))


def test_folders_that_are_links_are_followed_but_for_one_that_is_around_them(tmp_path: Path):
    for name, far in (("ant", True), ("bee", False), ("cat", True)):
        (tmp_path / "far" / name if far else tmp_path / "near" / name).mkdir(parents=True)
    for name in ("ant", "cat"):
        (tmp_path / "far" / name / "x.txt").write_text(f"{name}\n")
        (tmp_path / "near" / name).symlink_to(tmp_path / "far" / name)
    (tmp_path / "near" / "bee" / "x.txt").write_text("bee\n")
    (tmp_path / "near" / "bee" / "around").symlink_to(tmp_path / "near")
    source = ff.open_source(tmp_path / "near")
    assert [source[index]["text"] for index in range(len(source))] == ["ant", "bee", "cat"]


def test_folders_that_link_to_each_other_twice_are_refused_in_time(tmp_path: Path):
    for depth in range(30):
        (tmp_path / str(depth)).mkdir()
        (tmp_path / str(depth) / "x.txt").write_text("x\n")
        for name in ("a", "b") if depth else ():
            (tmp_path / str(depth - 1) / name).symlink_to(tmp_path / str(depth))
    with pytest.raises(DataError, match=r"links make more than 64 paths to this folder +need a folder in one place"):
        ff.open_source(tmp_path / "0")


@pytest.mark.parametrize("path", [None, 5, ["a.csv", "b.csv"], b"a.csv"])
def test_what_is_no_path_is_refused(path: Any):
    for call in (ff.open_source, ff.Pack, functools.partial(ff.pack, [1])):
        with pytest.raises(DataError, match="need a path"):
            call(path)
    with pytest.raises(DataError, match=r"the URL https://host/a\.csv +need a path on this machine"):
        ff.open_source("https://host/a.csv")


def test_a_long_cell_of_csv_is_read(tmp_path: Path):
    (tmp_path / "x.csv").write_text(f"x,text\n1,{'a' * 2**18}\n")
    assert len(samples_of(tmp_path / "x.csv")[0]["text"]) == 2**18


def test_files_of_npz_are_read_however_their_arrays_are_stored(tmp_path: Path):
    rows = np.arange(6.0).reshape(2, 3)
    np.savez(tmp_path / "x.npz", x=np.asfortranarray(rows))
    assert [sample["x"].tolist() for sample in samples_of(tmp_path, rows=True)] == rows.tolist()
    np.save(tmp_path / "x.npy", rows)
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", compression) as archive:
            archive.write(tmp_path / "x.npy", "x.npy")
        assert "x.npy: a compression that numpy does not write" in message(tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["\ud800", "a" * 5000, "missing"])
def test_files_that_cannot_be_are_named(tmp_path: Path, name: str):
    shutil.copytree(MDS, tmp_path / "mds")
    index = json.loads((tmp_path / "mds" / "index.json").read_text())
    for compression in (None, "gz"):
        files = {key: {"basename": name, "bytes": 1000} for key in ("raw_data", "zip_data")}
        index["shards"][0] |= {**files, "compression": compression}
        (tmp_path / "mds" / "index.json").write_text(json.dumps(index))
        assert "need a file that can be read" in message(tmp_path / "mds")
    (tmp_path / "mds" / "index.json").unlink()
    (tmp_path / "mds" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "need a file that can be read" in message(tmp_path / "mds")
    for path in (name, f"{name}\0", "~missing/x"):
        assert "nothing at " in message(path)


# What is there, and cannot be read


def test_files_that_are_not_read_are_named_for_what_they_are(tmp_path: Path):
    write_tar(tmp_path / "x.tar", {"txt": b"a"})
    for name, content, cause, remedy in (
        ("x.tar.gz", gzip.compress(b"?"), "compressed by gzip", "gunzip it first"),
        ("x.jsonl.bz2", bz2.compress(b"?"), "compressed by bzip2", "bunzip2 it first"),
        ("x.zip", b"PK\x03\x04", "a zip archive", "unzip"),
        ("x.json", b"[]", "one JSON document", "jq -c '.[]'"),
        ("index.json", b"{}", "perhaps the index of a folder", "its folder"),
        ("x.db", b"", "a database of SQLite", "ff.sql"),
    ):
        (tmp_path / name).write_bytes(content)
        if name == "x.db":
            with sqlite3.connect(tmp_path / name) as connection:
                connection.execute("CREATE TABLE t (x)")
        got = message(tmp_path / name)
        assert cause in got
        assert re.search(f"try .*{re.escape(remedy)}", got)
    shutil.copytree(MDS, tmp_path / "mds", ignore=shutil.ignore_patterns("index.json"))
    assert re.search("a shard of MDS in a folder without index.json .* try the index.json", message(tmp_path / "mds"))


@pytest.mark.parametrize("splits", [("train", "val"), ("Train2017", "val2017"), ("training", "test")])
def test_a_folder_of_several_data_sets_is_refused_by_their_names(
    tmp_path: Path, splits: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    for split in splits:
        for name in ("cat", "dog"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(tmp_path / "images" / split / name / "0.png")
            (tmp_path / split).mkdir(exist_ok=True)
            pq.write_table(pa.table({"x": [1.0]}), tmp_path / split / "0.parquet")
    first, *_ = sorted(splits)
    for path in (tmp_path / "images", f"{tmp_path}/images/*/*/*.png"):
        got = message(path)
        assert f"holds several data sets: {', '.join(sorted(splits))}" in got
        assert f"try {tmp_path}/images/{first}" in got
    assert ff.open_source(tmp_path / "images" / first).classes == ["cat", "dog"]
    shutil.rmtree(tmp_path / "images" / max(splits))
    got = message(tmp_path / "images")
    assert f"with one class, {first}, and folders below it" in got
    assert f"try {tmp_path}/images/{first}" in got
    shutil.rmtree(tmp_path / "images" / first / "cat")
    assert ff.open_source(tmp_path / "images" / first).classes == ["dog"]
    monkeypatch.chdir(tmp_path / "images" / first / "dog")
    assert [len(ff.open_source(path)) for path in (".", "*", "*.png", "**/*.png")] == [1] * 4
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "images")
    assert "several data sets" in message(tmp_path)
    assert len(ff.open_source(f"{tmp_path}/*/*.parquet")) == 2  # a pattern says that all are meant
    assert torch.equal(ff.open_source(tmp_path / first).fetch([0])["x"], torch.tensor([1.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_images_are_turned_as_their_exif_data_says(kind: str) -> None:
    """In every format, as `datasets` does; data that are damaged say nothing."""
    image = Image.fromarray(np.arange(2 * 3 * 8 * 24, dtype=np.uint8).reshape(16, 24, 3))
    for orientation in range(9):
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        image.save(file, kind, exif=exif, lossless=True)
        with Image.open(file) as shown:
            expected = np.array(ImageOps.exif_transpose(shown)).transpose(2, 0, 1)
        assert np.array_equal(decode_image(file.getvalue()).numpy(), expected), orientation
    if kind in ("WEBP", "JPEG"):
        damaged = io.BytesIO()
        image.save(damaged, kind, exif=b"Exif\0\0MM\0*\0\0\0", lossless=True)
        assert decode_image(damaged.getvalue()).shape == (3, 16, 24)
