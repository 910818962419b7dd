"""Damaged files of other libraries, and files that lie: a DataError or samples, never a crash or a huge allocation."""

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tfrecord.writer import TFRecordWriter

import fourfold as ff
from fourfold.feed import unpacked
from fourfold.feed.formats import arrow, hdf5, lines, tfrecord
from fourfold.feed.formats.arrays import parse_npy
from fourfold.feed.formats.positioned import PositionedFiles
from fourfold.feed.formats.tfrecord import masked_crc32c, parse_example
from fourfold.feed.pack import layout
from fourfold.feed.pack.schema import EncodedImage
from fourfold.feed.readable import fetch_readable
from fourfold.words.errors import DamagedSample, DataError

FILES = Path(__file__).parents[1] / "format_files"
ROWS, MOST_SAMPLES, MOST_BYTES = 12, 10_000, 2**27
UNPICKLED: list[str] = []
sys.addaudithook(lambda event, args: UNPICKLED.append(str(args)) if event == "pickle.find_class" else None)


def arrow_table() -> pa.Table:
    return pa.table(
        {
            "x": pa.array([[float(i)] * 3 for i in range(ROWS)], pa.list_(pa.float32())),
            "n": list(range(ROWS)),
            "text": [f"text {i}" for i in range(ROWS)],
        }
    )


def write_parquet(folder: Path) -> None:
    pq.write_table(arrow_table(), folder / "x.parquet", row_group_size=5, compression="zstd", write_page_checksum=True)


def write_feather(folder: Path) -> None:
    feather.write_feather(arrow_table(), str(folder / "x.feather"), chunksize=5, compression="lz4")


def write_stream(folder: Path) -> None:
    with pa.ipc.new_stream(str(folder / "x.arrow"), arrow_table().schema) as writer:
        writer.write_table(arrow_table(), max_chunksize=5)


def write_tar(folder: Path) -> None:
    with tarfile.open(folder / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for i in range(ROWS):
            array = io.BytesIO()
            np.save(array, np.full(4, i))
            for field, content in (("cls", b"%d" % i), ("npy", array.getvalue()), ("json", b'{"a": [1, 2]}')):
                info = tarfile.TarInfo(f"{'long' * 40}{i}.{field}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def write_tfrecord(folder: Path) -> None:
    writer = TFRecordWriter(str(folder / "x.tfrecord"))
    for i in range(ROWS):
        writer.write({"raw": (b"raw %d" % i, "byte"), "n": ([i, -i], "int"), "x": ([i / 2], "float")})
    writer.close()


def write_hdf5(folder: Path) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = np.arange(3 * ROWS).reshape(ROWS, 3)
        file.create_dataset("deep/n", data=np.arange(ROWS), chunks=(2,), compression="gzip")
        file["text"] = [f"text {i}" for i in range(ROWS)]


def write_npy(folder: Path) -> None:
    np.save(folder / "x.npy", np.arange(3 * ROWS).reshape(ROWS, 3))


def write_npz(folder: Path) -> None:
    np.savez_compressed(folder / "x.npz", inputs=np.arange(3 * ROWS).reshape(ROWS, 3), targets=np.arange(ROWS))


def copy_of(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(FILES / name, folder, dirs_exist_ok=True) and None


WRITERS: dict[str, Callable[[Path], None]] = {
    "parquet": write_parquet,
    "feather": write_feather,
    "stream": write_stream,
    "tar": write_tar,
    "tfrecord": write_tfrecord,
    "hdf5": write_hdf5,
    "npy": write_npy,
    "npz": write_npz,
    **{name: copy_of(name) for name in ("mds", "mds-zstd", "mds-gz", "megatron")},
}
CHECKED = {"tfrecord"}  # each byte is in a checksum: what is read is right


class Damage(NamedTuple):
    """`kind` at a place of a file: a flipped bit, a number written over it, or the end."""

    file: float
    place: float
    kind: str
    value: int = 0


NUMBERS = [0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 5, 2**64 - 1]
parts = st.floats(0, 1, exclude_max=True)
damages = st.one_of(
    st.builds(Damage, parts, parts, st.just("flip"), st.integers(0, 7)),
    st.builds(Damage, parts, parts, st.sampled_from(["<I", ">I", "<Q", ">Q", "text"]), st.sampled_from(NUMBERS)),
    st.builds(Damage, parts, parts, st.just("cut")),
    st.builds(Damage, parts, parts, st.just("insert"), st.integers(0, 255)),
)


def do_damage(content: bytes, damage: Damage) -> bytes:
    at = int(damage.place * len(content))
    if damage.kind == "flip":
        return content[:at] + bytes([content[at] ^ 1 << damage.value]) + content[at + 1 :] if content else content
    if damage.kind == "cut":
        return content[:at]
    if damage.kind == "insert":
        return content[:at] + bytes([damage.value]) + content[at:]
    text = damage.kind == "text"
    form = "<I" if text else damage.kind
    written = b"%d" % damage.value if text else struct.pack(form, damage.value & (2 ** (8 * struct.calcsize(form)) - 1))
    return content[:at] + written + content[at + len(written) :]


@contextlib.contextmanager
def few_bytes() -> Iterator[None]:
    """What Python and numpy reserve is bounded, and what C libraries touch: they reserve more, and fail then."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
    before = resident("VmRSS")
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        assert resident("VmHWM") - before < MOST_BYTES
    finally:
        tracemalloc.stop()


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def read_what_is_there(folder: Path) -> dict[int, Any]:
    """The samples that can be read. What cannot raises DataError, and nothing else."""
    try:
        source = ff.open_source(folder, rows=any(folder.glob("*.np*")))
    except DataError as error:
        assert str(folder) in str(error)  # noqa: PT017  a stranger is told which file it is
        return {}
    assert len(source) <= MOST_SAMPLES
    found = {}
    for index in range(len(source)):
        try:
            found[index] = source[index]
        except DamagedSample as error:
            assert error.key == source.sample_key(index)  # noqa: PT017
    with contextlib.suppress(DataError):
        source.fetch(range(min(3, len(source))))
    return found


@pytest.mark.parametrize("form", WRITERS)
def test_damaged_files_are_an_error_or_samples(form: str):
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        whole.mkdir()
        WRITERS[form](whole)
        contents = {path.name: path.read_bytes() for path in sorted(whole.iterdir())}
        right = {index: str(sample) for index, sample in read_what_is_there(whole).items()}
        assert right

        @settings(
            max_examples=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(st.lists(damages, min_size=1, max_size=3))
        def law(all_damage: list[Damage]) -> None:
            damaged = dict(contents)
            for damage in all_damage:
                file = list(damaged)[int(damage.file * len(damaged))]
                damaged[file] = do_damage(damaged[file], damage)
            folder = Path(name) / "damaged"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for file, content in damaged.items():
                (folder / file).write_bytes(content)
            UNPICKLED.clear()
            with few_bytes():
                found = read_what_is_there(folder)
            assert not UNPICKLED
            if form in CHECKED:
                assert all(str(sample) == right[index] for index, sample in found.items())

        law()


def test_no_range_outside_a_file_is_read(tmp_path: Path):
    (tmp_path / "x").write_bytes(bytes(10))
    files = PositionedFiles([str(tmp_path / "x")])
    assert files.read(0, 2, 8) == bytes(8)
    for offset, length in ((0, 11), (11, 0), (-1, 1), (2, -1), (0, 2**62)):
        with few_bytes(), pytest.raises(ValueError, match="of a file of 10"):
            files.read(0, offset, length)


# Lies that chance hardly finds: each is well-formed, with right checksums


def lying_tar(folder: Path, size: int, kind: bytes = tarfile.REGTYPE) -> None:
    info = tarfile.TarInfo("a.txt")
    info.size, info.type = size, kind
    (folder / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2**21 + 1024))


def lying_tfrecord(folder: Path, size: int) -> None:
    length = struct.pack("<Q", size)
    content = length + struct.pack("<I", masked_crc32c(length)) + bytes(64)
    (folder / "x.tfrecord").write_bytes(content)


def lying_mds(folder: Path, form: str = "mds", **claims: Any) -> None:
    shutil.copytree(FILES / form, folder, dirs_exist_ok=True)
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        for name, value in claims.items():
            part, _, key = name.partition("__")
            (shard[part] if key else shard)[key or part] = value
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("claim", "message"),
    [({"shards": {}}, "shards of type dict"), ({"column_sizes": ["8", None]}, "of '8' bytes, where int has 8")],
)
def test_what_an_index_of_mds_says_is_shown_with_its_type(tmp_path, claim, message):
    shard = {"format": "mds", "version": 2, "samples": 1, "raw_data": {"basename": "x.mds", "bytes": 40}}
    columns = {"column_names": ["x", "y"], "column_encodings": ["int", "str"]} | claim
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard | columns]} | claim))
    (tmp_path / "x.mds").write_bytes(bytes(40))
    with pytest.raises(ff.FourfoldError, match=message):
        ff.open_source(tmp_path)


def bomb_mds(folder: Path) -> None:
    lying_mds(folder, "mds-zstd", raw_data__bytes=2**28)
    for path in folder.glob("*.zstd"):
        path.write_bytes(zstandard.compress(bytes(2**28)))


def lying_shape(folder: Path) -> None:
    columns = {"column_names": ["x"], "column_encodings": ["ndarray:uint8"], "column_sizes": [None]}
    value = bytes([(2 << 2) | 3]) + struct.pack("<2Q", 2**40, 2**24)  # of 2 dims, in 64 bits, and no content
    sample = struct.pack("<I", len(value)) + value
    content = struct.pack("<3I", 1, 12, 12 + len(sample)) + sample
    (folder / "x.mds").write_bytes(content)
    raw = {"basename": "x.mds", "bytes": len(content), "hashes": {}}
    shard = {"format": "mds", "version": 2, "samples": 1, "raw_data": raw, "zip_data": None, "compression": None}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard | columns]}))


def lying_megatron(folder: Path, sequences: int = 1, length: int = 4, pointer: int = 0) -> None:
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, sequences, 0)
    (folder / "x.idx").write_bytes(head + struct.pack("<iq", length, pointer))
    (folder / "x.bin").write_bytes(bytes(16))


def lying_hdf5(folder: Path, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", shape, "u1", chunks=chunks, compression="gzip")


def hdf5_compressed_twice(folder: Path, *filters: str) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_chunk((1, 8))
        for name in filters:
            layout.set_deflate(9) if name == "gzip" else layout.set_filter(h5py.h5z.FILTER_LZF)
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((4, 8)), layout)


def many_ways(folder: Path) -> None:
    """To the last of 12 groups lead 10**11 paths."""
    with h5py.File(folder / "x.h5", "w") as file:
        last = file.create_group("0")
        for number in range(1, 12):
            group = file.create_group(str(number))
            for link in range(10):
                group[f"link{link}"] = last
            last = group


def lying_npy(folder: Path, shape: str, dtype: str = "'<f4'") -> None:
    head = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}".encode()
    (folder / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(8))


def bomb_npz(folder: Path) -> None:
    lying_npy(folder, "(2,)")
    with zipfile.ZipFile(folder / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "x.npy", "inputs.npy")
    (folder / "x.npy").unlink()
    content = bytearray((folder / "x.npz").read_bytes())
    at = content.rindex(b"PK\x01\x02") + 24  # the size that the directory claims
    content[at : at + 4] = struct.pack("<I", 2**31)
    (folder / "x.npz").write_bytes(content)


def npz_with_an_array_twice(folder: Path) -> None:
    lying_npy(folder, "(2,)")
    with zipfile.ZipFile(folder / "x.npz", "w") as archive:
        archive.write(folder / "x.npy", "inputs.npy")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.write(folder / "x.npy", "inputs.npy")
    (folder / "x.npy").unlink()


def struct_of_nothing(folder: Path) -> None:
    write_arrow(folder, pa.array([{}], pa.struct([])))


def rows_without_bytes(folder: Path) -> None:
    for name in "ab":
        lying_npy(folder, f"({2**62}, 0)")
        os.truncate(folder / "x.npy", os.path.getsize(folder / "x.npy") - 8)
        (folder / "x.npy").rename(folder / f"{name}.npy")


def compressed_stream(folder: Path) -> None:
    table = pa.table({"x": np.zeros(2**17)})
    with pa.ipc.new_stream(folder / "x.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as it:
        for _ in range(4):
            it.write_table(table)


def lying_offsets(folder: Path) -> None:
    feather.write_feather(pa.table({"text": ["a" * 1000] * 3}), str(folder / "x.feather"), compression="uncompressed")
    content = (folder / "x.feather").read_bytes()
    offsets = struct.pack("<4i", 0, 1000, 2000, 3000)
    assert content.count(offsets) == 1
    (folder / "x.feather").write_bytes(content.replace(offsets, struct.pack("<4i", 0, 1000, 5000, 3000)))


def lying_rows(folder: Path, count: int) -> None:
    """Arrow that says 2**39 for its number of rows in the first `count` places where it stands; -1: in all of them."""
    feather.write_feather(pa.table({"x": [0.5] * 4711}), str(folder / "x.feather"), compression="zstd")
    content = (folder / "x.feather").read_bytes()
    rows = struct.pack("<q", 4711)
    assert content.count(rows) == 2  # of the batch, and of its column
    (folder / "x.feather").write_bytes(content.replace(rows, struct.pack("<q", 2**39), count))


LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a member larger than its archive": (lambda folder: lying_tar(folder, 2**33 - 1), "ends at byte"),
    "a name of megabytes": (lambda folder: lying_tar(folder, 2**21, tarfile.GNUTYPE_LONGNAME), "a name of 2097152"),
    "a record larger than its file": (lambda folder: lying_tfrecord(folder, 2**40), "record 0 ends at byte"),
    "a record whose end has no number": (lambda folder: lying_tfrecord(folder, 2**64 - 1), "record 0 ends at byte"),
    "more samples than bytes": (lambda folder: lying_mds(folder, "mds-zstd", samples=2**31), "2147483648 samples in"),
    "fewer samples than there are": (lambda folder: lying_mds(folder, samples=1), "as index.json says"),
    "a shard that is elsewhere": (lambda folder: lying_mds(folder, raw_data__basename="../x"), "outside the folder"),
    "a compressed shard of 256 MiB of zeros": (bomb_mds, "268435456 bytes by zstd from"),
    "an array of 2**64 bytes in a sample": (lying_shape, r"0 bytes for uint8 \[1099511627776, 16777216\]"),
    "text after the end of its column": (lying_offsets, "row 0 cannot be read: .*[Oo]ffset"),
    "more rows than its column has": (lambda folder: lying_rows(folder, 1), "a batch of 549755813888 rows"),
    "more rows than bits": (lambda folder: lying_rows(folder, -1), "a batch of 549755813888 rows"),
    "more sequences than bytes": (lambda folder: lying_megatron(folder, sequences=2**60), "for 1152921504606846976"),
    "a sequence after the end": (lambda folder: lying_megatron(folder, pointer=4), "sequence 0: 4 tokens at byte 4"),
    "a sequence before the start": (lambda folder: lying_megatron(folder, pointer=-1), "sequence 0"),
    "less than no tokens": (lambda folder: lying_megatron(folder, length=-1), "sequence 0: -1 tokens"),
    "rows that are nowhere": (lambda folder: lying_hdf5(folder, (2**50,), (8,)), "rows of 1125899906842624 bytes"),
    "a chunk of 2 GiB": (lambda folder: lying_hdf5(folder, (8, 2**28), (8, 2**28)), "(rows|chunks) of 2147483648"),
    "a row of too many chunks": (lambda folder: lying_hdf5(folder, (1, 2**17), (1, 1)), "a row of 131072 chunks"),
    "gzip twice": (lambda folder: hdf5_compressed_twice(folder, "gzip", "gzip"), "x is compressed more than once"),
    "gzip and lzf": (lambda folder: hdf5_compressed_twice(folder, "gzip", "lzf"), "x is compressed more than once"),
    "a shape larger than its file": (lambda folder: lying_npy(folder, f"({2**40},)"), "8 bytes for an array"),
    "a shape below zero": (lambda folder: lying_npy(folder, "(-1, -2)"), "8 bytes for an array"),
    "a shape nested too deep": (lambda folder: lying_npy(folder, f"({3000 * '-'}1,)"), "a head that cannot be read"),
    "a shape nested deeper": (lambda folder: lying_npy(folder, f"({9000 * '-'}1,)"), "a head that cannot be read"),
    "a dtype of nothing": (lambda folder: lying_npy(folder, "(2,)", "()"), "a head that cannot be read"),
    "a shape of no sizes": (lambda folder: lying_npy(folder, "(True, 1)", "'<f8'"), "8 bytes for an array"),
    "groups that hold others ten times each": (many_ways, "more than 2000 datasets and groups"),
    "an array of objects": (lambda folder: lying_npy(folder, "(1,)", "'|O'"), "not of numbers"),
    "an array twice in a zip file": (npz_with_an_array_twice, "inputs.npy twice"),
    "rows without bytes": (rows_without_bytes, f"{2**63} samples"),
    "a struct of nothing": (struct_of_nothing, "column 'x' of struct<>"),
    "an array of 2 GiB in a zip file": (bomb_npz, "inputs.npy of 2147483648 bytes in a file of"),
    "a stream larger than its file": (compressed_stream, "a compressed stream, of more than 1048576 bytes"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_file_claims_is_bounded_before_it_is_believed(tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrow, "MAX_STREAM_BYTES", 2**20)
    write, message = LIES[lie]
    write(tmp_path)
    with few_bytes(), pytest.raises(DataError, match=message):
        ff.open_source(tmp_path, rows=any(tmp_path.glob("*.np*")))[0]


literals = st.recursive(
    st.sampled_from(["", "a", "<f4", "V8", "O", "<U9999999999", b"<f4", None, True, -1, 0, 2, 2**40, 10**30]),
    lambda each: st.lists(each, max_size=3) | st.lists(each, max_size=3).map(tuple) | st.dictionaries(st.text(), each),
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(literals, literals, st.sampled_from(["{{'descr': {}, 'fortran_order': False, 'shape': {}}}", "{{{}: {}}}"]))
def test_a_head_of_an_array_is_read_or_damaged(first: Any, second: Any, form: str):
    head = form.format(repr(first), repr(second)).encode()
    with contextlib.suppress(ValueError), warnings.catch_warnings(action="ignore"):
        parse_npy(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(8))


def test_a_size_that_numpy_cannot_have_is_refused(tmp_path: Path):
    lying_npy(tmp_path, f"(0, {2**70})")
    os.truncate(tmp_path / "x.npy", os.path.getsize(tmp_path / "x.npy") - 8)
    with pytest.raises(DataError, match="0 bytes for an array"):
        ff.open_source(tmp_path / "x.npy")


# Bombs: small files, all that they say is true, that would unpack to 64 MiB


def npz_of_zeros(folder: Path) -> None:
    np.savez_compressed(folder / "x.npz", inputs=np.zeros((4, 2**24), np.uint8))


def parquet_of_one_number(folder: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**21, np.int8)), pa.array([0.5])).cast(pa.float64())
    pq.write_table(pa.table({f"x{i}": column for i in range(4)}), folder / "x.parquet", row_group_size=2**21)


def parquet_of_one_text(folder: Path) -> None:
    rows = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**6, np.int8)), pa.array(["a" * 2**20]))
    pq.write_table(pa.table({"x": rows.cast(pa.string())}), folder / "x.parquet", compression="zstd")


def parquet_of_a_name_with_a_dot(folder: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**23, np.int8)), pa.array([0.5])).cast(pa.float64())
    pq.write_table(pa.table({"a.x": column}), folder / "x.parquet", row_group_size=2**23)


def parquet_of_one_text_in_columns(folder: Path) -> None:
    """A few rows of one column fit; 64 columns of them have 512 MiB."""
    rows = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**6, np.int8)), pa.array(["a" * 2**17]))
    column = rows.cast(pa.string())
    pq.write_table(pa.table({f"x{i}": column for i in range(64)}), folder / "x.parquet", compression="zstd")


def arrow_of_one_text_in_a_list(folder: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**6, np.int8)), pa.array(["a" * 2**20]))
    feather.write_feather(pa.table({"x": pa.ListArray.from_arrays([0, 2**6], texts)}), str(folder / "x.feather"))


def parquet_of_one_text_in_a_dictionary(folder: Path) -> None:
    """A text of 12 MiB: it, its page, and its place in a batch and in a table are more than its file says."""
    table = pa.table({"x": ["a" * 12 * 2**20], "y": [os.urandom(2**14)]})
    pq.write_table(table, folder / "x.parquet", compression="zstd", dictionary_pagesize_limit=2**30)


def arrow_of_large_metadata(folder: Path) -> None:
    table = pa.table({"x": [1]}).replace_schema_metadata({"huggingface": EMPTY_LISTS})
    with pa.ipc.new_stream(str(folder / "x.arrow"), table.schema) as stream:
        stream.write_table(table)


def hdf5_of_one_text(folder: Path) -> None:
    """Every place of a row refers to the text of the first."""
    with h5py.File(folder / "x.h5", "w") as file:
        texts = file.create_dataset("x", (1, 2, 2**7), h5py.string_dtype())
        texts[0, 0, 0] = "a" * 2**19
        start = texts.id.get_offset()
    content = (folder / "x.h5").read_bytes()
    refers = content[start : start + 16] * 2**8
    (folder / "x.h5").write_bytes(content[:start] + refers + content[start + len(refers) :])


def hole(name: str, head: bytes = b"") -> Callable[[Path], None]:
    """A file of 64 MiB and more that takes no room on the disk."""

    def write(folder: Path) -> None:
        (folder / name).write_bytes(head)
        os.truncate(folder / name, 2**26 + len(head) + 1024)

    return write


def tar_head() -> bytes:
    info = tarfile.TarInfo("a.txt")
    info.size = 2**26
    return info.tobuf(tarfile.GNU_FORMAT)


def empty_record() -> bytes:
    length = bytes(8)
    return length + struct.pack("<2I", masked_crc32c(length), masked_crc32c(b""))


def npy_with_a_hole(folder: Path) -> None:
    lying_npy(folder, f"(1, {2**26})", "'|u1'")
    os.truncate(folder / "x.npy", os.path.getsize(folder / "x.npy") - 8 + 2**26)


def write_arrow(folder: Path, column: Any) -> None:
    table = pa.table({"first": [1], "x": column})
    with pa.ipc.new_file(folder / "x.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as it:
        it.write_table(table)


def arrow_of_zeros(folder: Path) -> None:
    write_arrow(folder, [bytes(2**26)])


def arrow_of_one_long_name(folder: Path) -> None:
    write_arrow(folder, pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(["a" * 2**26])))


def chunk_of_zeros(folder: Path) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((1, 2**26), "u1"), chunks=(1, 2**26), compression="gzip")


def pack_of_zeros(folder: Path) -> None:
    ff.pack([{"x": bytes(2**26)}], folder / "pack", compression="zstd")


def pack_with_a_hole(folder: Path) -> None:
    """A pack whose shard takes no room on the disk."""
    ff.pack([(np.zeros(8, np.uint8), 0)] * 2, folder / "pack")
    pack, length = folder / "pack", 2**26 + 8
    manifest = json.loads((pack / "manifest.json").read_bytes())["manifest"]
    manifest["schema"]["fields"][0]["shape"] = [2**26]
    manifest |= {"max_record_bytes": length, "shards": [[2, 2**30, "0" * 32]]}
    body = json.dumps(manifest, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(body.encode())
    (pack / "manifest.json").write_text(f'{{"xxh3_128":"{digest}","manifest":{body}}}\n')
    with (pack / "shard-00000.data").open("r+b") as file:
        file.truncate(2**30)
    np.array([(0, length, 0), (2**29, length, 0)], dtype=layout.ENTRY).tofile(pack / "index")


def image_of_one_color(folder: Path) -> None:
    Image.new("RGB", (2000, 2000)).save(folder / "x.png")


def image_of_one_large_tile(folder: Path) -> None:
    """2 × 2 pixels, in a tile of 2000 × 2000."""
    tile = zlib.compress(bytes(2000 * 2000 * 3))
    shorts = {256: 2, 257: 2, 258: 8, 259: 8, 262: 2, 277: 3, 284: 1, 322: 2000, 323: 2000}
    content = b"II*\0" + struct.pack("<IH", 8, 11)
    for tag in sorted([*shorts, 324, 325]):  # the last two: where the tile is, and of how many bytes
        kind, value = (3, shorts[tag]) if tag in shorts else (4, 146 if tag == 324 else len(tile))
        content += struct.pack("<HHII", tag, kind, 1, value)
    (folder / "x.tif").write_bytes(content + bytes(4) + tile)


def chunk_of_more_than_it_has(folder: Path) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        rows = file.create_dataset("x", (1, 8), "u1", chunks=(1, 8), compression="gzip", shuffle=True)
        rows.id.write_direct_chunk((0, 0), zlib.compress(bytes(2**26)))


def mds_of_zeros(folder: Path) -> None:
    """A shard of 64 MiB, which is within the ratio that honest data may have."""
    lying_mds(folder, "mds-zstd", raw_data__bytes=2**26)
    for path in folder.glob("*.zstd"):
        path.write_bytes(zstandard.compress(bytes(2**26)))


def example(kind: bytes, content: bytes) -> bytes:
    """An Example with one feature, a list of a kind."""
    return message(b"\x0a", message(b"\x0a", b"\x0a\x01x" + message(b"\x12", message(kind, content))))


def write_record(folder: Path, body: bytes) -> None:
    """A record; its zeros take no room on the disk."""
    length = struct.pack("<Q", len(body))
    with (folder / "x.tfrecord").open("wb") as file:
        file.write(length + struct.pack("<I", masked_crc32c(length)) + body.rstrip(b"\0"))
        file.seek(len(length) + 4 + len(body))
        file.write(struct.pack("<I", masked_crc32c(body)))


def record_of_small_numbers(folder: Path) -> None:
    write_record(folder, example(b"\x1a", message(b"\x0a", bytes(5 * 2**20))))


def record_of_features(folder: Path) -> None:
    entries = (message(b"\x0a", message(b"\x0a", b"%x" % i) + b"\x12\x02\x1a\x00") for i in range(53_000))
    write_record(folder, message(b"\x0a", b"".join(entries)))


EMPTY_LISTS = b'{"x":[' + b"[]," * 180_000 + b"[]]}"
UNEVEN_LISTS = b'{"x":[' + b"[1],[1,2]," * 2**15 + b"[]]}"
ONE_EMOJI = b'{"x":"' + b"a" * 2**23 + "\U0001f600".encode() + b'"}'


def json_in_mds(folder: Path, text: bytes) -> None:
    content = struct.pack("<4I", 1, 12, 16 + len(text), len(text)) + text
    packed = zstandard.compress(content)
    (folder / "x.zstd").write_bytes(packed)
    shard = {
        "column_names": ["x"],
        "column_encodings": ["json"],
        "column_sizes": [None],
        "compression": "zstd",
        "format": "mds",
        "raw_data": {"basename": "x", "bytes": len(content)},
        "samples": 1,
        "version": 2,
        "zip_data": {"basename": "x.zstd", "bytes": len(packed)},
    }
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))


def json_in_tar(folder: Path) -> None:
    with tarfile.open(folder / "x.tar", "w") as archive:
        info = tarfile.TarInfo("a.json")
        info.size = len(EMPTY_LISTS)
        archive.addfile(info, io.BytesIO(EMPTY_LISTS))


def json_line(folder: Path) -> None:
    (folder / "x.jsonl").write_bytes(EMPTY_LISTS + b"\n")


BOMBS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a .npz": (npz_of_zeros, "x.npz", "arrays of 67108992 bytes, and memory of 32.0 MiB for each rank"),
    "rows of a .npz": (npz_of_zeros, "", "arrays of 67108992 bytes"),
    "a file of .npz": (npz_of_zeros, "", "arrays of 67108992 bytes"),
    "a row group of one number": (parquet_of_one_number, "", "a part of 67108864 bytes"),
    "a row group of one text": (parquet_of_one_text, "", "row group 0 of [0-9]+ bytes"),
    "a dictionary of one text": (parquet_of_one_text_in_a_dictionary, "", "a dictionary in row group 0 of 503[0-9]+ b"),
    "columns of one text": (parquet_of_one_text_in_columns, "", "row group 0 of [0-9]+ bytes"),
    "a list of one text": (arrow_of_one_text_in_a_list, "", "the values of a dictionary of 67108864 bytes"),
    "metadata of datasets": (
        arrow_of_large_metadata,
        "",
        "metadata of `datasets`: the values",
    ),
    "texts of HDF5": (hdf5_of_one_text, "", "the texts of a row of [0-9]+ bytes"),
    "a hole in a tar": (hole("x.tar", tar_head()), "", "a record of 67108864 bytes"),
    "a hole in records": (hole("x.tfrecord", empty_record()), "", "record 1: the checksum of its length is wrong"),
    "a hole in an image": (hole("x.jpg"), "", "a file of 67109888 bytes"),
    "a hole in a text": (hole("x.txt"), "", "a line of more than 33554432 bytes"),
    "a hole in a table": (hole("x.csv", b"a,b\n1,"), "", "a line of more than 33554432 bytes"),
    "a hole in a row": (npy_with_a_hole, "x.npy", "a record of 67108864 bytes"),
    "a hole in rows": (npy_with_a_hole, "", "a record of 67108864 bytes"),
    "a column with a dot in its name": (parquet_of_a_name_with_a_dot, "", "a part of 67108864 bytes"),
    "a batch of Arrow": (arrow_of_zeros, "", "a part of 67108880 bytes"),
    "a dictionary of Arrow": (arrow_of_one_long_name, "", "dictionaries of 67108872 bytes"),
    "a chunk": (chunk_of_zeros, "", "a row of 67108864 bytes"),
    "a record": (pack_of_zeros, "pack", "a record of 67108872 bytes"),
    "a hole": (pack_with_a_hole, "pack", "a record of 67108872 bytes"),
    "a shard": (mds_of_zeros, "", "a part of 134[0-9]{6} bytes"),
    "a tile of an image": (image_of_one_large_tile, "", "2000 × 2000 pixels of 128000000 bytes"),
    "what a chunk unpacks to": (chunk_of_more_than_it_has, "", "a chunk that unpacks to more than 12 bytes"),
    "small numbers of a record": (record_of_small_numbers, "", "5242880 numbers of 41943040 bytes"),
    "features of a record": (record_of_features, "", "[0-9]+ features of [0-9]+ bytes"),
    "JSON in a shard": (
        lambda folder: json_in_mds(folder, EMPTY_LISTS),
        "",
        "the values of a JSON text of 3[0-9]{7} b",
    ),
    "uneven lists of JSON": (
        lambda folder: json_in_mds(folder, UNEVEN_LISTS),
        "",
        "the lists of a JSON text of 33[0-9]{6}",
    ),
    "text of JSON": (
        lambda folder: json_in_mds(folder, ONE_EMOJI),
        "",
        "the values of a JSON text of 335[0-9]{5} bytes",
    ),
    "JSON in a tar": (json_in_tar, "", "the values of a JSON text of [0-9]{8} bytes"),
    "a line of JSON": (json_line, "", "the values of a JSON text of [0-9]{8} bytes"),
    "an image": (image_of_one_color, "", "2000 × 2000 pixels of 128000000 bytes"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_nothing_unpacks_to_more_than_the_memory_of_a_rank(tmp_path: Path, bomb: str, monkeypatch: pytest.MonkeyPatch):
    write, name, message = BOMBS[bomb]
    write(tmp_path)
    size = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    assert size < 2**20
    for module in (unpacked, arrow, hdf5, lines):
        monkeypatch.setattr(module, "share_bytes", lambda: 2**25)
    with few_bytes(), pytest.raises(DataError, match=message):
        ff.open_source(tmp_path / name, rows=bomb.startswith(("rows", "a hole in rows")))[0]


LARGE_BYTES, MARGIN_BYTES = 2**26, 2**23


class Noise:
    """Samples that compress a little: an array of LARGE_BYTES, and a text."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.randint(0, 4, (LARGE_BYTES,), dtype=torch.uint8), "text": "text"}


def large_mds(folder: Path, form: str) -> None:
    count, size = 64, LARGE_BYTES // 64
    values = np.random.default_rng(0).integers(0, 4, LARGE_BYTES, np.uint8).tobytes()
    start = 4 * (count + 2)
    content = struct.pack(f"<{count + 2}I", count, *range(start, start + LARGE_BYTES + 1, size)) + values
    packed = zstandard.compress(content, 1) if form == "zstd" else gzip.compress(content, 1)
    (folder / f"x.mds.{form}").write_bytes(packed)
    shard = {"format": "mds", "version": 2, "samples": count, "compression": form}
    shard |= {"column_names": ["x"], "column_encodings": [f"ndarray:uint8:{size}"], "column_sizes": [size]}
    shard |= {"raw_data": {"basename": "x.mds", "bytes": len(content)}}
    shard |= {"zip_data": {"basename": f"x.mds.{form}", "bytes": len(packed)}}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


LARGE: dict[str, Callable[[Path], Any]] = {
    "MDS, zstd": lambda folder: large_mds(folder, "zstd"),
    "MDS, gzip": lambda folder: large_mds(folder, "gz"),
    "a pack, zstd": lambda folder: ff.pack(Noise(), folder / "pack", compression="zstd"),
    "a pack": lambda folder: ff.pack(Noise(), folder / "pack"),
    "a big-endian array": lambda folder: np.save(folder / "x.npy", np.zeros(LARGE_BYTES // 8, ">f8")),
}


MEASURE = """
import json, sys
from pathlib import Path
import fourfold as ff
from fourfold.feed import unpacked
from tests.simulated.test_damaged_formats import resident

ff.open_source(sys.argv[1])  # imports what reads a format
modules = [module for module in sys.modules.values() if "check_fits" in vars(module)]
for folder in sys.argv[1:]:
    checked = []
    for module in modules:
        module.check_fits = lambda num_bytes, what, *, times=1: checked.append(times * num_bytes)
    source = ff.open_source(folder)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    source.fetch([0])
    print(json.dumps([resident("VmHWM") - before, max(checked)]))
"""


def test_what_is_held_at_once_is_no_more_than_was_checked(tmp_path: Path):
    folders = []
    for kind, make in LARGE.items():
        (tmp_path / kind).mkdir()
        make(tmp_path / kind)
        folders.append(str(next((tmp_path / kind).glob("pack"), tmp_path / kind)))
    # A process of its own: where steps have been trained, the C library keeps freed memory, which does not show.
    ended = subprocess.run([sys.executable, "-c", MEASURE, *folders], check=True, capture_output=True, timeout=100)
    measured = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(measured) == len(LARGE)
    for kind, (held, checked) in zip(LARGE, measured, strict=True):
        assert LARGE_BYTES < held < checked + MARGIN_BYTES, kind


def zeros(folder: Path) -> Any:
    """16 records of 2 MiB, of which nothing is on the disk."""
    ff.pack([{"x": torch.zeros(2**21, dtype=torch.uint8), "t": "a"} for _ in range(16)], folder, compression="zstd")
    return ff.Pack(folder)


def images_in_a_pack(folder: Path) -> Any:
    image = io.BytesIO()
    Image.new("RGB", (700, 700)).save(image, "PNG")
    ff.pack([{"x": EncodedImage(image.getvalue())} for _ in range(32)], folder)
    return ff.Pack(folder)


def images_in_a_folder(folder: Path) -> Any:
    folder.mkdir()
    for number in range(32):
        Image.new("RGB", (700, 700)).save(folder / f"{number}.png")
    return ff.open_source(folder)


def arrays_in_a_tar(folder: Path) -> Any:
    folder.mkdir()
    array = io.BytesIO()
    np.save(array, np.zeros(2**21, np.uint8))
    with tarfile.open(folder / "x.tar", "w") as archive:
        for number in range(16):
            info = tarfile.TarInfo(f"{number}.npy")
            info.size = len(array.getvalue())
            archive.addfile(info, io.BytesIO(array.getvalue()))
    return ff.open_source(folder)


@pytest.mark.parametrize("make", [zeros, images_in_a_pack, images_in_a_folder, arrays_in_a_tar])
def test_a_batch_that_unpacks_to_more_than_memory_is_too_large_and_not_damaged(
    tmp_path: Path, make: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
):
    source = make(tmp_path / "x")
    monkeypatch.setattr(unpacked, "share_bytes", lambda: 2**25)
    source.fetch([0, 1])
    with few_bytes(), pytest.raises(DataError, match=r"(?s)a batch that fits.*a smaller batch_size") as caught:
        source.fetch(range(len(source)))
    assert not isinstance(caught.value, DamagedSample)


def test_all_sources_of_a_process_share_the_memory_for_what_is_unpacked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unpacked, "share_bytes", lambda: 100)
    first, second, made = unpacked.Unpacked[str](), unpacked.Unpacked[str](), []

    def get(source: unpacked.Unpacked[str], key: str, num_bytes: int) -> None:
        source.get(key, num_bytes, lambda: made.append(key) or key)

    get(first, "a", 40)
    get(second, "b", 60)
    get(first, "a", 40)
    get(second, "c", 50)  # for which b has to go, as a was used after it
    get(first, "a", 40)
    assert made == ["a", "b", "c"]
    get(first, "d", 100)
    get(second, "c", 50)
    assert made == ["a", "b", "c", "d", "c"]


def test_a_process_that_is_forked_while_a_thread_unpacks_can_unpack():
    begun, forked = threading.Event(), threading.Event()
    thread = threading.Thread(target=unpacked.Unpacked().get, args=(0, 1, lambda: begun.set() or forked.wait()))
    thread.start()
    assert begun.wait(60)
    child = multiprocessing.get_context("fork").Process(target=unpacked.Unpacked().get, args=(0, 1, str))
    child.start()
    child.join(60)
    child.kill()
    forked.set()
    thread.join()
    assert child.exitcode == 0


def test_numbers_of_an_example_take_memory_in_proportion_to_them():
    def numbers(*parts: bytes) -> bytes:
        return example(b"\x1a", b"".join(parts))

    count = 50_000
    tracemalloc.start()
    try:
        found = parse_example(numbers(b"\x08\x07" * count))["x"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.tolist() == [7] * count
    assert peak < 80 * count
    assert parse_example(numbers(b"\x0a\x02\x81\x01", b"\x08" + b"\xff" * 9 + b"\x01"))["x"].tolist() == [129, -1]
    with pytest.raises(ValueError, match="cut off"):  # though the next part would go on with it
        parse_example(numbers(b"\x0a\x01\x81", b"\x0a\x01\x01"))


def message(tag: bytes, content: bytes) -> bytes:
    size = len(content)
    return tag + bytes([*(size >> shift & 0x7F | 0x80 for shift in (0, 7, 14)), size >> 21]) + content


def test_no_field_of_an_example_is_left_out_without_a_word():
    with pytest.raises(ValueError, match=r"a tf\.train\.SequenceExample, with feature_lists; only"):
        parse_example(message(b"\x12", b""))
    feature, number = message(b"\x1a", b"\x08\x01"), b"\x48\x01"  # number: a field 9

    def entry(value: bytes, other: bytes = b"") -> bytes:
        return message(b"\x0a", b"\x0a\x01x" + message(b"\x12", value) + other)

    assert parse_example(message(b"\x0a", entry(feature)))["x"].tolist() == [1]
    lists = [message(kind, number) for kind in (b"\x0a", b"\x12", b"\x1a")]
    features = [entry(feature) + number, entry(feature, number), *(entry(each) for each in (feature + number, *lists))]
    for wrong in (message(b"\x0a", entry(feature)) + number, *(message(b"\x0a", each) for each in features)):
        with pytest.raises(ValueError, match="a field 9, which is unknown"):
            parse_example(wrong)


def test_short_values_of_an_example_are_counted_before_they_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unpacked, "share_bytes", lambda: 6_000)
    assert parse_example(example(b"\x0a", message(b"\x0a", b"ab") * 80))["x"] == [b"ab"] * 80
    with pytest.raises(ValueError, match="100 values of 7100 bytes"):
        parse_example(example(b"\x0a", message(b"\x0a", b"ab") * 100))


def test_a_table_of_many_columns_is_read_in_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each call of pyarrow goes over all columns."""
    pq.write_table(pa.table({f"x.{i}": [i, -i] for i in range(300)} | {"x": [{"y": 1}] * 2}), tmp_path / "x.parquet")
    calls, read = list[Any](), pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: calls.append(k) or read(*a, **k))
    found = ff.open_source(tmp_path)[1]
    assert found == {f"x.{i}": -i for i in range(300)} | {"x": {"y": 1}}
    assert len(calls) == 1


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_a_damaged_length_has_its_number_however_many_are_checked_at_once(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tfrecord, "CHECKED_AT_ONCE", at_once)
    content, path = bytearray(empty_record() * 5), tmp_path / "x.tfrecord"
    path.write_bytes(content)
    assert len(ff.open_source(path)) == 5
    content[-5] ^= 1  # of the checksum of the last length
    path.write_bytes(content)
    with pytest.raises(DataError, match="record 4: the checksum of its length is wrong"):
        ff.open_source(path)


def test_names_that_are_no_text_are_written_out_in_files_of_the_run(tmp_path: Path):
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for number in (b"1", b"x"):
            info = tarfile.TarInfo(f"\udcff{number.decode()}.cls")
            info.size = 1
            archive.addfile(info, io.BytesIO(number))
    (record,) = fetch_readable(ff.open_source(tmp_path), [0, 1]).damaged
    assert b"udcffx" in msgspec.json.encode(record)


def test_an_image_whose_head_has_other_types_is_damaged(tmp_path: Path):
    Image.new("RGB", (3, 2)).save(tmp_path / "x.tif")
    content = bytearray((tmp_path / "x.tif").read_bytes())
    where_pixels_are = content.index(struct.pack("<HH", 273, 4))
    struct.pack_into("<H", content, where_pixels_are + 2, 11)  # a float
    (tmp_path / "x.tif").write_bytes(content)
    with pytest.raises(DamagedSample, match="an image that cannot be decoded"):
        ff.open_source(tmp_path)[0]
    (tmp_path / "x.tif").write_bytes(b"something else")
    with pytest.raises(DamagedSample, match="it is no JPEG, PNG") as caught:
        ff.open_source(tmp_path)[0]
    assert "0x" not in str(caught.value)


@pytest.mark.parametrize("form", ["mds-zstd", "mds-gz"])
def test_a_compressed_shard_may_have_several_members_and_nothing_behind_them(tmp_path: Path, form: str):
    copy_of(form)(tmp_path)
    whole = str(ff.open_source(tmp_path)[0])
    path = next(tmp_path.glob("*.00000.mds.*"))
    content = zstandard.decompress(path.read_bytes()) if form == "mds-zstd" else gzip.decompress(path.read_bytes())
    compress = zstandard.compress if form == "mds-zstd" else gzip.compress
    members = compress(content[:50]) + compress(content[50:])
    path.write_bytes(members)
    assert str(ff.open_source(tmp_path)[0]) == whole
    path.write_bytes(members + b"tail")
    with pytest.raises(DamagedSample):
        ff.open_source(tmp_path)[0]
