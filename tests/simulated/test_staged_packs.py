"""Laws of a pack at an origin: it gives what the local pack gives, whatever the cache holds and the origin does."""

import contextlib
import http.server
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fourfold as ff
from fourfold.words.errors import DataError
from tests.simulated.test_feed_orders import Numbers, feeds, global_batches

NUM_SAMPLES, SHARD_BYTES, PLENTY = 61, 10 * 2560, 10**8
ORDERS: dict[str, dict[str, Any]] = {"global": {}, "windowed": {"order": "windowed", "window": 3}, "mixed": {}}
HOW: dict[str, Any] = {"batch_size": 5, "seed": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("packs") / "pack"
    samples = [(torch.full((600,), float(number)), number) for number in range(NUM_SAMPLES)]
    ff.pack(samples, path, shard_bytes=SHARD_BYTES)
    return path


def in_order(source, order):
    """The source, or a mixture of it with itself."""
    return ff.Mixed({name: ff.Weighted(source, 1, repeat=2) for name in "ab"}) if order == "mixed" else source


def batches(source, order, size=1, count=26):
    return global_batches(feeds(in_order(source, order), size, **HOW, **ORDERS[order]), count)


def copies(cache):
    return {file.name for file in Path(cache).rglob("*") if file.is_file() and not file.name.endswith(".lock")}


class Handler(http.server.BaseHTTPRequestHandler):
    """The files of a folder, by ranges; every so many requests fail."""

    def do_GET(self):
        server: Any = self.server
        server.requests.append((self.path.rpartition("/")[2], self.headers["Range"]))
        if server.fail_each and len(server.requests) % server.fail_each == 0:
            self.send_error(503)
            return
        content = (server.folder / self.path.rpartition("/")[2]).read_bytes()
        start, stop = self.headers["Range"].removeprefix("bytes=").split("-")
        part = content[int(start) : int(stop) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format, *_):
        pass


@contextlib.contextmanager
def serving(folder, fail_each=0):
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.fail_each, server.requests = folder, fail_each, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}/data"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.mark.parametrize("order", ORDERS)
@given(
    cache_bytes=st.sampled_from([1, SHARD_BYTES, 3 * SHARD_BYTES + 2000, PLENTY]),
    size=st.integers(1, 3),
    threads=st.integers(1, 3),
)
@settings(deadline=None, max_examples=8)
def test_batches_are_those_of_the_local_pack_whatever_the_cache_holds(
    order, cache_bytes, size, threads, path, tmp_path_factory
):
    cache = tmp_path_factory.mktemp("cache")
    pack = ff.Pack(path, threads=threads, cache=cache, cache_bytes=cache_bytes)
    assert batches(pack, order, size) == batches(ff.Pack(path), order)
    assert sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) <= cache_bytes


@pytest.mark.parametrize("order", ORDERS)
def test_a_server_that_fails_now_and_then_changes_no_batch(order, path, tmp_path, caplog):
    with serving(path, fail_each=9) as (_, url):
        pack = ff.Pack(url, cache=tmp_path, cache_bytes=PLENTY)
        assert batches(pack, order) == batches(ff.Pack(path), order)
    assert "again in" in caplog.text


def test_ranks_of_a_node_share_copies_and_later_epochs_need_no_origin(path, tmp_path):
    with serving(path) as (server, url):
        packs = [ff.Pack(url, cache=tmp_path, cache_bytes=PLENTY) for _ in range(2)]
        ranks = [ff.Feed(pack, **HOW) for pack in packs]
        for index, feed in enumerate(ranks):
            feed._size, feed._index = 2, index
            list(feed)
        assert copies(tmp_path) == {file.name for file in path.iterdir() if file.name != "manifest.json"}
        # Each file is copied once; until a shard's turn comes, single records of it may be read from the origin.
        for name in copies(tmp_path):
            assert server.requests.count((name, f"bytes=0-{(path / name).stat().st_size - 1}")) == 1
        before = len(server.requests)
        again = ff.Feed(packs[0], **HOW)
        list(again)
        assert len(server.requests) == before


def test_a_full_disk_is_no_end_of_training(path, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    pack = ff.Pack(path, cache=tmp_path, cache_bytes=PLENTY)
    for _ in range(2):  # each epoch has a stager of its own
        assert batches(pack, "global") == batches(ff.Pack(path), "global")
    assert "has no room for the index" in caplog.text
    assert caplog.text.count("what it cannot hold is read from") == 1
    assert copies(tmp_path) == set()


def test_workers_and_copies_of_a_pack_read_the_same(path, tmp_path):
    pack: Any = ff.Pack(path, cache=tmp_path, cache_bytes=PLENTY)
    assert pickle.loads(pickle.dumps(pack))[7][1] == 7
    loader = DataLoader(pack, batch_size=5, shuffle=True, num_workers=1, multiprocessing_context="fork")
    assert global_batches([ff.Feed(loader, seed=3)], 13) == batches(ff.Pack(path), "global", count=13)


class Expecting(Numbers):
    """A source that keeps what is expected of it, and what is read."""

    def expect_batches(self, batches):
        self.expected, self.read = list(batches), []
        return

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def test_each_source_of_a_mixture_expects_its_own_samples_and_reads_them():
    sources = [Expecting([40]), Expecting([25], offset=100), Numbers([9], offset=200)]
    parts = {str(number): ff.Weighted(each, 3 - number, repeat=2) for number, each in enumerate(sources)}
    (feed,) = feeds(ff.Mixed(parts), 1, **HOW)
    count = len(list(feed))
    for source in sources[:2]:
        assert len(source.expected) == count
        expected = [number for batch in source.expected for number in batch]
        assert source.read[-len(expected) :] == expected  # the first batch is read twice, to see whether it draws


def damaged_copy(path, folder, name, place):
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with (folder / name).open("r+b") as file:
        file.seek(place)
        file.write(b"\x77")
    return folder


@pytest.mark.parametrize("name", ["shard-00002.data", "index", "manifest.json"])
@pytest.mark.parametrize("cache_bytes", [1, PLENTY])
def test_what_is_damaged_at_the_origin_is_named(path, tmp_path, name, cache_bytes):
    folder = damaged_copy(path, tmp_path / "pack", name, 20)
    with pytest.raises(DataError, match=name.removesuffix(".json")):
        list(ff.Feed(ff.Pack(folder, cache=tmp_path / "cache", cache_bytes=cache_bytes), **HOW))


@pytest.mark.parametrize(("place", "options", "message"), [
    ("http://user:secret@host/data", {}, "http://host/data, and no cache .* cache="),
    ("http://host/data", {"cache": "folder"}, "cache_bytes = None"),
    ("http://host/data", {"cache": 7, "cache_bytes": 10}, "cache = 7"),
    (".", {"cache": "folder", "cache_bytes": 0}, "cache_bytes = 0"),
    (".", {"cache": "folder", "cache_bytes": 10}, "manifest.json"),
    ("missing", {"cache": "folder", "cache_bytes": 10}, "missing, which is no folder"),
])  # fmt: skip
def test_impossible_caches_are_refused(place, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as found:
        ff.Pack(place, **options)
    assert "secret" not in str(found.value)
