"""Laws of checkpoints: which rank writes which box, where a box is stored, and which manifests are refused."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.checkpoint_boxes import (
    ELEMENT_BYTES,
    GlobalTensor,
    StoredBox,
    assign_shards,
    intersection,
    relative_slices,
    shard_file_name,
)
from fourfold.plan.checkpoint_manifest import (
    MANIFEST_VERSION,
    DataState,
    FileEntry,
    FirstStepRecord,
    Manifest,
    RngState,
    TensorEntry,
    manifest_problems,
)
from fourfold.words.box import Box
from fourfold.words.mesh import Mesh

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(sorted(ELEMENT_BYTES)), SHAPES, st.booleans()), min_size=1, max_size=8)


def named(rows: list[tuple[str, tuple[int, ...], bool]]) -> list[GlobalTensor]:
    return [GlobalTensor(f"model.{number}", *row) for number, row in enumerate(rows)]


def manifest(tensors: list[GlobalTensor], size: int) -> Manifest:
    """A manifest as it is written, of these tensors on `size` ranks."""
    stored_boxes = assign_shards(tensors, size)
    return Manifest(
        version=MANIFEST_VERSION,
        step=3,
        tensors={t.name: TensorEntry(t.dtype, t.shape, stored_boxes[t.name]) for t in tensors},
        aliases={},
        scalars={},
        groups=({"lr": 0.1},),
        record=FirstStepRecord((0,), 1.0),
        feed=DataState(0, 0, 4, 2, 10, 1),
        random=(RngState("00"),) * size,
        metrics_bytes=0,
        losses=(1.0,),
        valid={},
        best=None,
        files={shard_file_name(rank): FileEntry(10_000_000, "") for rank in range(size)},
    )


@given(rows=TENSORS, size=st.integers(1, 7))
def test_boxes_tile_every_tensor_and_a_written_manifest_has_no_problems(rows, size):
    tensors = named(rows)
    for tensor in tensors:
        covered = np.zeros(tensor.shape, dtype=int)
        whole = Box((0,) * len(tensor.shape), tensor.shape)
        for stored in assign_shards(tensors, size)[tensor.name]:
            covered[relative_slices(stored.box, whole)] += 1
        assert (covered == 1).all()
    assert not list(manifest_problems(manifest(tensors, size)))


@given(rows=TENSORS, size=st.integers(1, 7))
def test_file_sizes_differ_by_at_most_two_rows(rows, size):
    tensors = [tensor._replace(is_unsharded=False) for tensor in named(rows)]
    file_bytes = dict.fromkeys(map(shard_file_name, range(size)), 0)
    for tensor in tensors:
        for stored in assign_shards(tensors, size)[tensor.name]:
            file_bytes[stored.file] += math.prod(stored.lengths) * ELEMENT_BYTES[tensor.dtype]
    row = max(t.num_bytes // t.shape[0] if t.shape and t.shape[0] else t.num_bytes for t in tensors)
    assert max(file_bytes.values()) - min(file_bytes.values()) <= 2 * row + 1


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
def test_a_box_is_assembled_from_the_boxes_of_any_number_of_ranks(shape, data):
    tensor = GlobalTensor("model.a", "F32", tuple(shape))
    values = np.arange(math.prod(shape)).reshape(shape)
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(data.draw(st.integers(1, n - x)) for n, x in zip(shape, offsets, strict=True))
    wanted, whole = Box(offsets, lengths), Box((0,) * len(shape), tensor.shape)
    result = np.full(lengths, -1)
    for stored in assign_shards([tensor], data.draw(st.integers(1, 5)))["model.a"]:
        values_of_box = values[relative_slices(stored.box, whole)]
        common = intersection(stored.box, wanted)
        if common is not None:
            result[relative_slices(common, wanted)] = values_of_box[relative_slices(common, stored.box)]
    assert (result == values[relative_slices(wanted, whole)]).all()


def changed(**fields: Any) -> Manifest:
    return msgspec.structs.replace(manifest([GlobalTensor("model.a", "F32", (4, 2))], 2), **fields)


def entry(
    *stored_boxes: tuple[str, tuple[int, ...], tuple[int, ...]], shape=(4, 2), dtype="F32"
) -> dict[str, TensorEntry]:
    return {"model.a": TensorEntry(dtype, shape, tuple(StoredBox(*each) for each in stored_boxes))}


FIRST, SECOND = "rank-000.safetensors", "rank-001.safetensors"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"step": -1}, "step -1"),
        ({"files": {"../../etc/passwd": FileEntry(100, "")}}, "'../../etc/passwd'"),
        ({"files": {FIRST: FileEntry(20, ""), SECOND: FileEntry(8, "")}}, "bytes of tensors in a file of 8"),
        ({"aliases": {"model.b": "model.c"}}, "model.c, which is not there"),
        ({"feed": DataState(0, 0, 11, 2, 10, 1)}, "position 11 of 10"),
        (
            {"mesh": Mesh(dp=2, sp=2)},
            "a mesh of pp 1 × dp 2 × sp 2 × tp 1 is 4 ranks, and there are random states of 2",
        ),
        ({"mesh": Mesh(dp=-2, sp=-1)}, "every size must be at least 1"),
        ({"mesh": Mesh(dp=2, sp=0), "random": ()}, "every size must be at least 1"),
        ({"random": (RngState("00"), RngState("0"))}, "not written in hexadecimal digits"),
        ({"random": (RngState("00"), RngState("zz"))}, "not written in hexadecimal digits"),
        ({"random": (RngState("00"), RngState("00", "0g"))}, "not written in hexadecimal digits"),
        ({"random": (RngState("00"), RngState(""))}, "not written in hexadecimal digits"),
        ({"tensors": entry((FIRST, (0, 0), (4, 2)), dtype="F12")}, "dtype 'F12'"),
        ({"tensors": entry((FIRST, (0, 0), (-4, -2)), shape=(-4, -2))}, "shape"),
        ({"tensors": entry((FIRST, (0, 0), (2**60, 2)), shape=(2**60, 2))}, "shape"),
        ({"tensors": entry(("rank-009.safetensors", (0, 0), (4, 2)))}, "not among the files"),
        ({"tensors": entry((FIRST, (1, 0), (4, 2)))}, "offsets (1, 0)"),
        ({"tensors": entry((FIRST, (-1, 0), (4, 2)))}, "offsets (-1, 0)"),
        ({"tensors": entry((FIRST, (0,), (4,)))}, "offsets (0,)"),
        ({"tensors": entry((FIRST, (0, 0), (2, 2)))}, "a gap"),
        ({"tensors": entry((FIRST, (0, 0), (2, 2)), (SECOND, (1, 0), (2, 2)))}, "or overlap"),
        ({"tensors": entry((FIRST, (0, 0), (4, 1)), (SECOND, (0, 0), (4, 1)))}, "or overlap"),
        ({"tensors": entry((FIRST, (0, 0), (2, 2)), (FIRST, (2, 0), (2, 2)))}, "two boxes in one file"),
    ],
)
def test_an_inconsistent_manifest_is_refused(fields, message):
    assert any(message in text for text in manifest_problems(changed(**fields)))


@pytest.mark.parametrize(("dtype", "elements", "fits"), [
    ("F64", 2**43, True), ("F64", 2**43 + 1, False), ("I8", 2**46, True), ("I8", 2**46 + 1, False),
])  # fmt: skip
def test_the_size_limit_of_a_tensor_is_in_bytes(dtype, elements, fits):
    tensors = entry((FIRST, (0,), (elements,)), shape=(elements,), dtype=dtype)
    found = list(
        manifest_problems(changed(tensors=tensors, files={FIRST: FileEntry(2**50, ""), SECOND: FileEntry(8, "")}))
    )
    assert (not found) == fits


def malformed_manifests() -> Iterator[bytes]:
    text = msgspec.json.encode(changed())
    yield text[: len(text) // 2]
    yield text.replace(b'"step":3', b'"step":"3"')
    yield text.replace(b'"step":3', b'"steps":3')
    yield text.replace(b'"offsets":[0,0]', b'"offsets":[0,"0"]')
    yield text.replace(b'"mesh":null', b'"mesh":{"dp":"2"}')
    yield text.replace(b'"mesh":null', b'"mesh":4')
    yield b"[]"


@pytest.mark.parametrize("text", list(malformed_manifests()))
def test_a_malformed_manifest_is_refused(text):
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text, type=Manifest)
