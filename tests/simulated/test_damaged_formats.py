"""Files of other libraries that are damaged, or that lie: a DataError or samples, never a crash or a huge allocation."""

import contextlib
import io
import shutil
import struct
import sys
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tfrecord.writer import TFRecordWriter

import fourfold as ff
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
    """What Python, numpy and pyarrow allocate is bounded, touched or not."""
    before = pa.default_memory_pool().max_memory()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        assert pa.default_memory_pool().max_memory() < max(before, MOST_BYTES)
    finally:
        tracemalloc.stop()


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
            max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
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
