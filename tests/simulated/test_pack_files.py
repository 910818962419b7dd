"""Plain files are sources, and packs of them hold the same samples; the commands say what they do."""

import csv
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fourfold as ff
from fourfold.cli import feed_pack
from fourfold.feed.collate import collate_samples
from fourfold.words.errors import DamagedSample, DataError, SettingError

MANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


def packed(folder: Path, source: Any) -> ff.Pack:
    number = sum(1 for _ in folder.glob("*.pack"))
    ff.pack(source, folder / f"{number}.pack")
    return ff.Pack(folder / f"{number}.pack")


def check_same(source: Any, pack: ff.Pack, expected: list[Any]) -> None:
    assert len(source) == len(pack) == len(expected)
    for number, sample in enumerate(expected):
        for read in (source[number], pack[number]):
            batches = [collate_samples([each], [0]) for each in (read, sample)]
            assert str(batches[0]) == str(batches[1])
    if hasattr(source, "shard_sizes"):
        assert sum(source.shard_sizes) == len(source)


def texts() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0"), max_size=8)


@MANY
@given(st.lists(st.lists(texts(), min_size=1, max_size=5), min_size=1, max_size=3))
def test_lines_of_text_are_samples(tmp_path, files):
    folder = tmp_path / f"text-{len(os.listdir(tmp_path))}"
    folder.mkdir()
    for number, lines in enumerate(files):
        (folder / f"{number}.txt").write_bytes("\n".join([*lines, ""]).encode())
    check_same(
        source := ff.open_source(folder), packed(tmp_path, source), [{"text": t} for each in files for t in each]
    )


VALUES = st.one_of(st.integers(-(2**63), 2**63 - 1), texts(), st.booleans(), st.floats(allow_nan=False))


@MANY
@given(st.dictionaries(texts().filter(bool), VALUES, min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=5))
def test_objects_of_json_lines_are_samples(tmp_path, example, blanks):
    path = tmp_path / "x.jsonl"
    lines = ["\n" * count + json.dumps({**example, "n": n}) + "\n" for n, count in enumerate([0, *blanks])]
    path.write_text("".join(lines) + "  \n")
    expected = [{**example, "n": number} for number in range(len(lines))]
    check_same(source := ff.open_source(path), packed(tmp_path, source), expected)


CELL = st.one_of(st.text("ab,\"'\n 0x1", max_size=6), st.integers(-(10**25), 10**25).map(str), st.floats().map(str))


@MANY
@given(st.lists(st.lists(CELL, min_size=2, max_size=2), min_size=1, max_size=6))
def test_rows_of_csv_are_samples_and_no_cell_changes(tmp_path, rows):
    path = tmp_path / "x.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["one", "other"], *rows])
    source = ff.open_source(path)
    pack = packed(tmp_path, source)
    assert len(source) == len(pack) == len(rows)
    for number, row in enumerate(rows):
        assert str(pack[number]) == str(source[number])
        for cell, value in zip(row, source[number].values(), strict=True):
            assert value == cell if isinstance(value, str) else str(value) == str(float(cell)) or value == int(cell)


def test_numbers_of_csv_that_would_change_are_text(tmp_path):
    rows = ["a,b,c,d,e", "1,007,1.5,12345678901234567890,1_0", "2,12,3,1,2"]
    (tmp_path / "x.csv").write_text("\ufeff" + "\r\n".join(rows) + "\r\n\r\n")
    source = ff.open_source(tmp_path / "x.csv")
    assert source[0] == {"a": 1, "b": "007", "c": 1.5, "d": "12345678901234567890", "e": "1_0"}
    assert source[1] == {"a": 2, "b": "12", "c": 3.0, "d": "1", "e": "2"}
    assert source.sample_key(1).endswith("x.csv, record 1")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "a,b\n1,2\n3\n", "row 1 with 1 columns"),
        ("x.csv", "a,a\n1,2\n", "a different name"),
        ("x.csv", "", "no rows"),
        ("x.csv", b"a\n\xff\n", "line 2"),
        ("x.jsonl", '{"a": 1}\n[1]\n', "x.jsonl, record 1 cannot be read: a list, not an object"),
        ("x.jsonl", '{"a": 1}\n{"a"\n', "x.jsonl, record 1 cannot be read"),
        ("x.jsonl", '{"a": 1}\n{"a": null}\n', "record 1: a is a NoneType"),
        ("x.jsonl", '{"a": 1}\n{"b": 1}\n', "record 1 has b"),
        ("x.txt", b"\xff\n", "record 0 cannot be read"),
        ("x.txt", "", "no samples"),
        ("x.npy", b"\x93NUMPY", "x.npy"),
        ("x.npz", b"PK", "x.npz"),
    ],
)
def test_damaged_files_are_named_with_the_record(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        ff.pack(ff.open_source(tmp_path / name), tmp_path / "pack")
    assert message in str(caught.value)


CELLS, NAMES = ",".join(["0", "255"] * 900), [f"feature_{n}" for n in range(1500)]
WIDE = ",".join(NAMES)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (CELLS, CELLS, r"the file seems to have no header row +need .* +try sed -i \"1i \$\(seq -s ',' 1800\)\" a.csv"),
        (f"id,{WIDE},{WIDE}", "", r"a first row with several columns named feature_0, feature_1, .*feature_.* …"),
        (f",{WIDE}", "", "a first row with a column without a name"),
        (f"{WIDE},a", f"{WIDE},b", "column 1500 named 'b' +need 'a', as in the first file"),
        (f"{WIDE},a", WIDE, "1500 columns +need 1501, as in the first file"),
    ],
)
def test_what_is_wrong_with_many_columns_is_said_in_few_words(tmp_path, first, second, message):
    (tmp_path / "a.csv").write_text(f"{first}\n")
    (tmp_path / "b.csv").write_text(f"{second}\n")
    with pytest.raises(DataError, match=message) as caught:
        ff.open_source(tmp_path)
    assert len(str(caught.value)) < 800


def test_arrays_are_samples_by_row_or_by_file(tmp_path):
    rng = np.random.default_rng(0)
    many = {"inputs": rng.normal(size=(5, 3)), "targets": np.arange(5)}
    np.save(tmp_path / "x.npy", many["inputs"].astype(">f4"))
    np.savez(tmp_path / "x.npz", **many)
    for suffix in ("npy", "npz"):
        (tmp_path / suffix).mkdir()
    for number in range(3):
        np.save(tmp_path / "npy" / f"{number}.npy", rng.normal(size=(number, 2)))
        np.savez_compressed(tmp_path / "npz" / f"{number}.npz", a=np.arange(3), b=np.float16(number))
    rows = [{"x": torch.from_numpy(row.astype("f4"))} for row in many["inputs"]]
    check_same(source := ff.open_source(tmp_path / "x.npy"), packed(tmp_path, source), rows)
    pairs = list(zip(torch.from_numpy(many["inputs"]), torch.from_numpy(many["targets"]), strict=True))
    check_same(source := ff.open_source(tmp_path / "x.npz"), packed(tmp_path, source), pairs)
    for suffix in ("npy", "npz"):
        source = ff.open_source(tmp_path / suffix)
        check_same(source, packed(tmp_path, source), [source[number] for number in range(3)])


def test_no_pickle_is_read(tmp_path):
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    np.save(tmp_path / "x.npy", np.array([Bomb()]), allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=np.array([Bomb()]))
    for name in ("x.npy", "x.npz"):
        with pytest.raises(DataError, match=r"allow_pickle=False|Python objects in dtype"):
            ff.open_source(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


def image_folder(folder: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for number in range(9):
        path = folder / "images" / ["dog", "cat"][number % 3 == 0] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((3, 4, 3), number, np.uint8)).save(path)
    return folder / "images"


def test_images_have_the_labels_of_their_folders(tmp_path):
    folder = image_folder(tmp_path)
    source = ff.open_source(folder)
    pack = packed(tmp_path, source)
    numbers = [0, 3, 6, 1, 2, 4, 5, 7, 8]
    check_same(source, pack, [(torch.full((3, 3, 4), n, dtype=torch.uint8), int(n % 3 != 0)) for n in numbers])
    assert source.classes == ["cat", "dog"]
    assert pack.schema.fields[1].classes == ("cat", "dog")
    assert Counter(int(label) for label in pack.fetch(range(9))[1]) == {0: 3, 1: 6}
    assert torch.equal(pack[0][0], torch.zeros(3, 3, 4, dtype=torch.uint8))
    (folder / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(DamagedSample, match=r"0\.png"):
        source[0]
    flat = ff.open_source(folder / "dog")
    assert list(flat[0]) == ["image"]


def test_folders_of_several_kinds_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.npy").write_text("a")
    with pytest.raises(DataError, match="1 text, 1 npy"):
        ff.open_source(tmp_path)


def test_the_commands_pack_verify_and_show(tmp_path, capsys, monkeypatch):
    folder, pack = image_folder(tmp_path), tmp_path / "images.pack"
    assert feed_pack.run_pack([str(folder), str(pack), "shard_bytes=1kB", "threads=2"]) == 0
    assert "packed 9 samples" in capsys.readouterr().out
    assert feed_pack.run_verify(str(pack), 1) == 0
    assert "9 records" in capsys.readouterr().out
    assert feed_pack.run_show(str(pack)) == 0
    shown = capsys.readouterr().out
    for text in ("inputs    image", "targets   int     2 classes", "1 dog   6   66.7 %", "samples   9"):
        assert text in shown
    shard = pack / "shard-00000.data"
    data = bytearray(shard.read_bytes())
    data[20] ^= 1
    shard.write_bytes(data)
    assert feed_pack.run_verify(str(pack), 1) == 1
    assert f"damaged: {shard}, record 0" in capsys.readouterr().out
    assert feed_pack.run_show(str(pack)) == 0
    shown = capsys.readouterr().out
    for text in ("unreadable   1   11.1 %", "0 cat        2   22.2 %", "1 dog        6   66.7 %"):
        assert text in shown


def test_a_source_of_a_python_file_is_packed(tmp_path):
    (tmp_path / "mine.py").write_text("def samples():\n    return ({'x': i} for i in range(5))\nrows = [(1, 2)]\n")
    feed_pack.run_pack([f"{tmp_path / 'mine.py'}:samples", str(tmp_path / "a")])
    feed_pack.run_pack([f"{tmp_path / 'mine.py'}:rows", str(tmp_path / "b")])
    assert ff.Pack(tmp_path / "a")[4] == {"x": 4}
    assert ff.Pack(tmp_path / "b")[0] == (1, 2)
    for name in ("mine.py:other", "mine.py", "none.py:x", "none"):
        with pytest.raises(DataError):
            feed_pack.run_pack([str(tmp_path / name), str(tmp_path / "c")])


def test_wrong_words_are_all_named(tmp_path):
    with pytest.raises(SettingError) as caught:
        feed_pack.run_pack(["a", "thread=3", "compression=lz4", "shard_bytes=0"])
    assert [problem.got for problem in caught.value.problems] == [
        *("thread=3", "compression = lz4", 'shard_bytes = "0"', "a")
    ]
    assert caught.value.problems[0].attempt == "threads=3"


def test_lustres_command_is_printed_where_lustre_is(monkeypatch, capsys, tmp_path):
    assert feed_pack.stripe_command("x", 2**28) is None
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/lfs")
    assert feed_pack.stripe_command("x", 2**28) == "mkdir -p x.part && lfs setstripe -c 4 -S 4M x.part"
    assert feed_pack.stripe_command("x", 2**19) == "mkdir -p x.part && lfs setstripe -c 1 -S 4M x.part"


@pytest.mark.parametrize(
    "samples", [[{"a": 2**53 + 1}, {"a": 2.5}], [{"a": 2.5}, {"a": 2**53 + 1}], [{"a": 0.5}, {"a": 10**400}]]
)
def test_a_whole_number_that_no_float_is_is_refused_among_floats(tmp_path, samples):
    with pytest.raises(DataError, match=r"a = \d+ +need a number that a float has room for"):
        ff.pack(samples, tmp_path / "pack")
