"""Forged files with right checksums: an error with a name or samples, soon, in bounded memory, from their folder."""

import copy
import json
import random
import shutil
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

import fourfold as ff
from fourfold.checkpoint.initial_weights import WeightFiles
from fourfold.checkpoint.restore import CheckpointReader
from fourfold.checkpoint.store import file_checksum, verify_checkpoint
from fourfold.feed.pack import layout
from fourfold.feed.pack.verify import describe_pack, verify_pack
from fourfold.feed.pack.zstd import Codec
from fourfold.plan.checkpoint_boxes import whole
from fourfold.testing import threads
from fourfold.words.errors import FourfoldError
from tests.cases import Case
from tests.checkpoint_runs import ThreadRun
from tests.simulated.test_damaged_formats import copy_of, few_bytes

MOST_SECONDS = 5  # of processor time, for what takes a few hundredths
NUMBERS = [-1, 0, 1, 7, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 1e308, -0.5]
OTHERS = [None, True, "", "x", "\0", "0" * 32, "../secret", "a" * 10**5, [], {}, [[0]], {"x": 1}]
OPENED: list[str] = []
sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value of JSON has others."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def forged(value: Any, rng: random.Random, secret: Path) -> Any:
    """The value with something else at a place: a number, a name, nothing, itself twice or nested deeply."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 2, 3])):
        if found := list(places(value)):
            change(value, rng.choice(found), rng, secret)
    return value


def change(inner: Any, path: tuple[Any, ...], rng: random.Random, secret: Path) -> None:
    *way, key = path
    for each in way:
        inner = inner[each]
    kind = rng.choice(["number", "number", "other", "path", "gone", "twice", "deep", "same"])
    if kind == "gone":
        del inner[key]
    elif kind == "twice":
        inner[key] = copy.deepcopy(inner[key]) + inner[key] if isinstance(inner[key], list) else [inner[key]] * 2
    elif kind == "deep":
        for _ in range(rng.choice([1, 20, 200])):
            inner[key] = [inner[key]]
    elif kind == "same" and isinstance(inner, dict):
        inner[key] = copy.deepcopy(inner[rng.choice(list(inner))])
    else:
        inner[key] = rng.choice({"number": NUMBERS, "path": [str(secret), "../secret"]}.get(kind, OTHERS))


# What is forged: how it is made, forged once, and read to its end


def make_pack(folder: Path) -> None:
    samples = [{"x": torch.zeros(i % 3, 2 + i % 2), "label": i, "t": "text" * (i % 5)} for i in range(12)]
    ff.pack(samples, folder / "pack", shard_bytes=300, variable=["x"])


def make_rows(folder: Path) -> None:
    ff.pack([(torch.arange(4.0) + i, i) for i in range(12)], folder / "pack", shard_bytes=300)


def make_zstd(folder: Path) -> None:
    ff.pack([{"x": torch.zeros(4), "t": "text" * i} for i in range(12)], folder / "pack", compression="zstd")


def forge_manifest(folder: Path, rng: random.Random) -> None:
    path = folder / "pack" / "manifest.json"
    body = msgspec.json.encode(forged(json.loads(path.read_bytes())["manifest"], rng, folder.parent / "secret"))
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    path.write_bytes(b'{"xxh3_128":"%s","manifest":%s}\n' % (digest, body))


def forge_index(folder: Path, rng: random.Random) -> None:
    """Entries elsewhere, and with heads that say something else; each with the digest of what is there."""
    pack = folder / "pack"
    manifest = json.loads((pack / "manifest.json").read_bytes())["manifest"]
    index, shard = np.fromfile(pack / "index", dtype=layout.ENTRY), bytearray((pack / "shard-00000.data").read_bytes())
    number = rng.randrange(manifest["shards"][0][0])
    name = rng.choice(["offset", "length", "head", "content"])
    offset, length, _ = index[number].tolist()
    if name in ("offset", "length"):
        near = [
            offset + 64,
            length + 1,
            length - 1,
            0,
            64,
            len(shard),
            *(each for each in NUMBERS if 0 <= each < 2**64),
        ]
        index[number][name] = int(rng.choice(near))
    elif manifest["compression"] == "zstd":
        stored = Codec().compress(bytes(rng.choice([0, 1, 8, 2**20])) + bytes(shard[offset : offset + 40]))
        stored = stored[:length].ljust(length, b"\0")
        shard[offset : offset + length] = stored
    else:
        at = offset + (8 * rng.randrange(3) if name == "head" else rng.randrange(length // 8) * 8)
        shard[at : at + 8] = struct.pack("<Q", int(rng.choice(NUMBERS)) & 2**64 - 1)
    offset, length, _ = index[number].tolist()
    index[number]["digest"] = xxhash.xxh3_64_intdigest(bytes(shard[offset : offset + length]))
    (pack / "index").write_bytes(index.tobytes())
    (pack / "shard-00000.data").write_bytes(shard)


def read_pack(folder: Path) -> None:
    with few_bytes():
        pack = ff.Pack(folder / "pack")
        for number in range(min(len(pack), 12)):
            attempt(lambda number=number: pack[number])
        attempt(lambda: pack.fetch([0, 1]))
        verify_pack(folder / "pack")
        attempt(lambda: describe_pack(folder / "pack"))
        attempt(lambda: ff.Pack(folder / "pack", cache=folder / "cache", cache_bytes=10**6)[0])


def make_checkpoint(folder: Path) -> None:
    threads.run(2, lambda comm: ThreadRun(Case(), comm, folder, ema=0.9).run_steps(0, 1, save_at=(1,)))


def checkpoint_in(folder: Path) -> Path:
    return next(folder.rglob("manifest.json")).parent


def rewrite(folder: Path, manifest: Any) -> None:
    body = msgspec.json.encode(manifest)
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    (folder / "manifest.json").write_bytes(b'{"xxh3_128":"%s","manifest":%s}' % (digest, body))


def forge_checkpoint(folder: Path, rng: random.Random) -> None:
    where = checkpoint_in(folder)
    manifest = json.loads((where / "manifest.json").read_bytes())["manifest"]
    rewrite(where, forged(manifest, rng, folder.parent / "secret"))


def forge_header(path: Path, rng: random.Random, secret: Path) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(forged(json.loads(content[8 : 8 + size]), rng, secret)).encode()
    claimed = rng.choice([len(header)] * 6 + [0, 2**40, 2**63, 2**64 - 1])
    path.write_bytes(struct.pack("<Q", claimed) + header + content[8 + size :])


def forge_tensors(folder: Path, rng: random.Random) -> None:
    where = checkpoint_in(folder)
    manifest = json.loads((where / "manifest.json").read_bytes())["manifest"]
    name = rng.choice(list(manifest["files"]))
    forge_header(where / name, rng, folder.parent / "secret")
    size = (where / name).stat().st_size
    manifest["files"][name] = {"num_bytes": size, "checksum": file_checksum(where / name)}
    rewrite(where, manifest)


def read_checkpoint(folder: Path) -> None:
    where = checkpoint_in(folder)
    damage = verify_checkpoint(where)
    with CheckpointReader(where) as reader:
        for key, entry in reader.entries.items():
            attempt(lambda key=key: reader.tensor(key).read_all())
            attempt(lambda entry=entry: reader.read(entry, whole(entry.shape)))
    if not damage:
        threads.run(2, lambda comm: ThreadRun(Case(), comm, folder, token="b", ema=0.9).checkpoints.resume())


def make_weights(folder: Path) -> None:
    for name in "ab":
        save_file({f"{name}.{i}": torch.zeros(i + 1, 2) for i in range(3)}, folder / f"{name}.safetensors")
    names = {f"{name}.{i}": f"{name}.safetensors" for name in "ab" for i in range(3)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def forge_weights(folder: Path, rng: random.Random) -> None:
    if rng.random() < 0.5:
        forge_header(folder / "a.safetensors", rng, folder.parent / "secret")
    else:
        forge_json("model.safetensors.index.json")(folder, rng)


def forge_json(name: str) -> Callable[[Path, random.Random], None]:
    def forge(folder: Path, rng: random.Random) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(forged(content, rng, folder.parent / "secret")))

    return forge


def read_weights(folder: Path) -> None:
    files = WeightFiles(folder)
    for name in files.shapes:
        attempt(lambda name=name: files.read(name))


def read_source(folder: Path) -> None:
    source = ff.open_source(folder)
    for number in range(min(len(source), 20)):
        attempt(lambda number=number: source[number])


def make_database(folder: Path) -> None:
    with sqlite3.connect(folder / "x.db") as connection:
        connection.execute("CREATE TABLE t (id INTEGER, x REAL)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(i, i / 2) for i in range(20)])
    read_database(folder)


def read_database(folder: Path) -> None:
    source = ff.sql(f"sqlite:///{folder}/x.db", "SELECT * FROM t", key="id", index=str(folder / "index"))
    attempt(lambda: source.fetch(range(len(source))))


FORGERIES: dict[
    str, tuple[Callable[[Path], Any], Callable[[Path, random.Random], None], Callable[[Path], None], int]
] = {
    "manifest of a pack": (make_pack, forge_manifest, read_pack, 100),
    "manifest of a pack of rows": (make_rows, forge_manifest, read_pack, 60),
    "index of a pack": (make_pack, forge_index, read_pack, 60),
    "index of a pack of rows": (make_rows, forge_index, read_pack, 40),
    "index of a pack of zstd": (make_zstd, forge_index, read_pack, 30),
    "manifest of a checkpoint": (make_checkpoint, forge_checkpoint, read_checkpoint, 80),
    "files of a checkpoint": (make_checkpoint, forge_tensors, read_checkpoint, 30),
    "files of weights": (make_weights, forge_weights, read_weights, 100),
    "index of MDS": (copy_of("mds"), forge_json("index.json"), read_source, 60),
    "index of compressed MDS": (copy_of("mds-zstd"), forge_json("index.json"), read_source, 60),
    "index of a query": (make_database, forge_json("index/manifest.json"), read_database, 40),
}


def attempt(call: Callable[[], Any]) -> None:
    try:
        call()
    except FourfoldError as error:
        assert len(str(error)) < 10**4  # noqa: PT017


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_with_right_checksums_is_an_error_with_a_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    make, forge, read, count = FORGERIES[name]
    (tmp_path / "secret").write_bytes(bytes(1000))
    (tmp_path / "whole").mkdir()
    make(tmp_path / "whole")
    for seed in range(count):
        folder = tmp_path / "forged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        forge(folder, random.Random(seed))
        OPENED.clear()
        before = time.process_time()
        try:
            attempt(lambda folder=folder: read(folder))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        assert time.process_time() - before < MOST_SECONDS, seed
        assert not any("secret" in each for each in OPENED), seed
