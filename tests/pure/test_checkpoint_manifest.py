"""Laws of checkpoint manifests: which are refused, and that version 1 is read as the present one."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.checkpoint_boxes import ELEMENT_BYTES, divide_writing, shard_file_name
from fourfold.plan.checkpoint_manifest import (
    MANIFEST_VERSION,
    DataState,
    FileEntry,
    FirstStepRecord,
    Manifest,
    Place,
    RngState,
    StoredPart,
    TensorEntry,
    TensorKind,
    manifest_problems,
    tensors_by_file,
)
from fourfold.words.mesh import Mesh
from fourfold.words.ranges import Box

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(sorted(ELEMENT_BYTES)), SHAPES), min_size=1, max_size=8)
MESHES = st.builds(Mesh, dp=st.integers(1, 4), cp=st.integers(1, 3))


def weights(rows: list[tuple[str, tuple[int, ...]]], size: int) -> tuple[TensorEntry, ...]:
    """Tensors that `size` ranks hold, and whose writing they divide."""
    sizes = [(math.prod(shape), ELEMENT_BYTES[dtype]) for dtype, shape in rows]
    shares = [divide_writing(sizes, rank, size) for rank in range(size)]
    entries = []
    for number, (dtype, shape) in enumerate(rows):
        parts = []
        for rank in range(size):
            start, stop = shares[rank][number]
            if start < stop or (rank == 0 and not sizes[number][0]):
                is_whole = (start, stop) == (0, sizes[number][0])
                parts.append(StoredPart(shard_file_name(rank), str(number), range=None if is_whole else (start, stop)))
        entries.append(TensorEntry(TensorKind.MODEL, str(number), dtype, shape, tuple(parts)))
    return tuple(entries)


def manifest(rows: list[tuple[str, tuple[int, ...]]], mesh: Mesh) -> Manifest:
    """A manifest as it is written, of these tensors."""
    return Manifest(
        version=MANIFEST_VERSION,
        step=3,
        tensors=weights(rows, mesh.size),
        aliases={},
        scalars={},
        groups=({"lr": 0.1},),
        record=FirstStepRecord((0,), 1.0),
        feed=DataState(0, 0, 4, 2, 10, "global", 1, ""),
        random=tuple(RngState("00", place=Place(dp=index)) for index in range(mesh.dp)),
        metrics_bytes=0,
        losses=(1.0,),
        valid={},
        best=None,
        files={shard_file_name(rank): FileEntry(10_000_000, "") for rank in range(mesh.size)},
        mesh=mesh,
        optimizer="AdamW",
    )


@given(rows=TENSORS, mesh=MESHES)
def test_a_written_manifest_has_no_problems_and_survives_a_round_trip(rows, mesh):
    written = manifest(rows, mesh)
    assert not list(manifest_problems(written))
    assert msgspec.json.decode(msgspec.json.encode(written), type=Manifest) == written
    elements = sum(math.prod(t.shape) for tensors in tensors_by_file(written).values() for t in tensors.values())
    assert elements == sum(math.prod(shape) for _, shape in rows)


def changed(**fields: Any) -> Manifest:
    return msgspec.structs.replace(manifest([("F32", (4, 2))], Mesh(dp=2)), **fields)


def entry(*stored: tuple[Any, ...], shape=(4, 2), dtype="F32", kind="model", **fields: Any) -> tuple[TensorEntry, ...]:
    """One tensor; each part is (file, box, range), with numbered names."""
    parts = tuple(
        StoredPart(file, str(number), box and Box(*box), range) for number, (file, box, range) in enumerate(stored)
    )
    return (TensorEntry(TensorKind(kind), "a", dtype, shape, parts, **fields),)


FIRST, SECOND = "rank-000.safetensors", "rank-001.safetensors"
ROWS_0, ROWS_2 = ((0, 0), (2, 2)), ((2, 0), (2, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": -1}, "step -1"),
        ({"files": {"../../etc/passwd": FileEntry(100, "")}}, "'../../etc/passwd'"),
        ({"files": {FIRST: FileEntry(20, ""), SECOND: FileEntry(8, "")}}, "bytes of tensors in a file of 8"),
        ({"aliases": {"b": "c"}}, "c, which is not there"),
        ({"feed": DataState(0, 0, 11, 2, 10, "global", 1, "")}, "position 11 of 10"),
        ({"mesh": Mesh(dp=4, cp=2)}, "2 random states on a mesh of pp 1 × dp 4 × cp 2 × tp 1, which has 4 places"),
        ({"mesh": Mesh(dp=-2, cp=-1)}, "every size must be at least 1"),
        ({"mesh": Mesh(dp=2, cp=0), "random": ()}, "every size must be at least 1"),
        ({"random": (RngState("00"), RngState("00", place=Place(dp=2)))}, "2 random states on a mesh of"),
        ({"random": (RngState("00"), RngState("01"))}, "two random states of one place"),
        ({"random": (RngState("00"), RngState("0", place=Place(dp=1)))}, "not written in hexadecimal digits"),
        ({"random": (RngState("00"), RngState("zz", place=Place(dp=1)))}, "not written in hexadecimal digits"),
        ({"random": (RngState("00"), RngState("00", "0g", Place(dp=1)))}, "not written in hexadecimal digits"),
        ({"random": (RngState("00"), RngState("", place=Place(dp=1)))}, "not written in hexadecimal digits"),
        ({"tensors": entry((FIRST, None, None), dtype="F12")}, "dtype 'F12'"),
        ({"tensors": entry((FIRST, None, None), shape=(-4, -2))}, "shape"),
        ({"tensors": entry((FIRST, None, None), shape=(2**60, 2))}, "shape"),
        ({"tensors": entry((FIRST, None, None), shape=(10**4000,) * 17)}, "shape"),
        ({"tensors": entry((FIRST, ((0,) * 10**5, (10**1000,) * 10**5), None))}, "a box of other dims"),
        ({"tensors": entry(("rank-009.safetensors", None, None))}, "not among the files"),
        ({"tensors": entry((FIRST, ((1, 0), (4, 2)), None))}, "offsets (1, 0)"),
        ({"tensors": entry((FIRST, ((-1, 0), (4, 2)), None))}, "offsets (-1, 0)"),
        ({"tensors": entry((FIRST, ((0,), (4,)), None))}, "a box of other dims"),
        ({"tensors": entry((FIRST, None, (0, 9)))}, "elements 0 to 9"),
        ({"tensors": entry((FIRST, None, (-1, 8)))}, "elements -1 to 8"),
        ({"tensors": entry((FIRST, ROWS_0, (0, 5)), (SECOND, None, (5, 8)))}, "elements 0 to 5"),
        ({"tensors": entry((FIRST, ROWS_0, None))}, "a gap"),
        ({"tensors": entry((FIRST, None, (0, 3)), (SECOND, None, (4, 8)))}, "a gap"),
        ({"tensors": entry()}, "a gap"),
        ({"tensors": entry((FIRST, ROWS_0, None), (SECOND, ((1, 0), (2, 2)), None))}, "or overlap"),
        ({"tensors": entry((FIRST, ((0, 0), (4, 1)), None), (SECOND, ((0, 0), (4, 1)), None))}, "or overlap"),
        ({"tensors": entry((FIRST, None, (0, 4)), (SECOND, None, (3, 7)))}, "or overlap"),
        ({"tensors": entry((FIRST, ROWS_0, (1, 4)), (SECOND, None, (0, 5)))}, "or overlap"),
        ({"tensors": entry((FIRST, None, None)) * 2}, "two tensors model.a"),
        (
            {
                "tensors": (
                    *entry((FIRST, None, None)),
                    *entry((FIRST, None, None), kind="ema"),
                )
            },
            f"two tensors called 0 in {FIRST}",
        ),
        ({"tensors": entry((FIRST, None, None), key="step")}, "the key 'step'"),
        ({"tensors": entry((FIRST, None, None), kind="optimizer")}, "the key ''"),
        ({"tensors": entry((FIRST, None, None), place=Place(dp=1))}, "the place Place("),
        ({"tensors": entry((FIRST, None, None), kind="codec", key="remainder")}, "the place None"),
        (
            {"tensors": entry((FIRST, None, None), kind="codec", key="remainder", place=Place(dp=2))},
            "which the mesh does not have",
        ),
    ],
)
def test_an_inconsistent_manifest_is_refused(fields, message):
    assert any(message in text for text in manifest_problems(changed(**fields)))


def test_a_place_in_a_stream_of_unknown_length_is_trusted():
    assert list(manifest_problems(changed(feed=DataState(0, 0, 11, 2, 0, "stream", 0, "")))) == []


@pytest.mark.parametrize(("dtype", "elements", "fits"), [
    ("F64", 2**43, True), ("F64", 2**43 + 1, False), ("I8", 2**46, True), ("I8", 2**46 + 1, False),
])  # fmt: skip
def test_the_size_limit_of_a_tensor_is_in_bytes(dtype, elements, fits):
    tensors = entry((FIRST, None, None), shape=(elements,), dtype=dtype)
    found = list(
        manifest_problems(changed(tensors=tensors, files={FIRST: FileEntry(2**50, ""), SECOND: FileEntry(8, "")}))
    )
    assert (not found) == fits


def malformed_manifests() -> Iterator[bytes]:
    text = msgspec.json.encode(changed())
    yield text[: len(text) // 2]
    yield text.replace(b'"step":3', b'"step":"3"')
    yield text.replace(b'"step":3', b'"steps":3')
    yield text.replace(b'"range":[0,4]', b'"range":[0,"4"]')
    yield text.replace(b'"range":[0,4]', b'"range":[0,4,8]')
    yield text.replace(b'"range":[0,4]', b'"box":[[0,0]]')
    yield text.replace(b'"kind":"model"', b'"kind":"modal"')
    yield text.replace(b'"dp":2', b'"dp":"2"')
    yield b"[]"


@pytest.mark.parametrize("text", list(malformed_manifests()))
def test_a_malformed_manifest_is_refused(text):
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text, type=Manifest)
