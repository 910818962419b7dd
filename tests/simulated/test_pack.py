"""Laws of packs: what is packed is what is read, on any path through a kill, and damage is found."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fourfold as ff
from fourfold.feed.collate import collate_samples
from fourfold.feed.pack.schema import ITEM_BYTES
from fourfold.feed.pack.values import tensor_of
from fourfold.feed.pack.verify import verify_pack

IN_A_FOLDER = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
counter = itertools.count()


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
    st.integers(1, 2000),
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
