"""Laws of remote origins, against real servers on this machine: HTTP with and without ranges, and S3 (moto)."""

import contextlib
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from fourfold.feed.staging import origin as origin_module
from fourfold.feed.staging.origin import Backoff, open_origin
from fourfold.feed.staging.shard_cache import Shard, ShardCache
from fourfold.feed.staging.stager import Stager
from fourfold.words.errors import DataError

pytest.importorskip("aiohttp")
QUICK = Backoff(first=0.01, longest=0.05, give_up=0.2)
CONTENT = bytes(range(256)) * 40


SILENT = -1  # in place of a status: the connection stays open, and no byte comes


class Handler(http.server.BaseHTTPRequestHandler):
    """One file, by ranges; the server says what is wrong with it."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.num_requests += 1
        if self.path != "/data/shard-0":
            self.send_error(404)
        elif server.failures:
            self._fail(server.failures.pop())
        else:
            self._send(server.has_ranges)

    def _fail(self, status: int) -> None:
        if status == SILENT:
            self.server.released.wait(10)  # type: ignore[attr-defined]
        elif status:
            self.send_error(status)
        else:
            self.wfile.write(b"no HTTP\r\n\r\n")

    def _send(self, has_ranges: bool) -> None:
        asked = self.headers.get("Range", "")
        content = CONTENT
        if asked and has_ranges:
            start, stop = asked.removeprefix("bytes=").split("-")
            content = CONTENT[int(start) : int(stop) + 1]
        self.send_response(206 if asked and has_ranges else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(*, has_ranges: bool = True, failures: tuple[int, ...] = (), port: int = 0) -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.released = threading.Event()
    server.has_ranges, server.failures, server.num_requests = has_ranges, list(failures), 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/data"


def shard() -> Shard:
    return Shard("shard-0", len(CONTENT), xxhash.xxh3_128(CONTENT).hexdigest())


def test_a_server_with_ranges_is_an_origin():
    with serving() as server:
        assert open_origin(url(server), backoff=QUICK).read("shard-0", 100, 300) == CONTENT[100:300]


def test_a_server_without_ranges_is_named_and_no_more_is_read_of_it():
    with serving(has_ranges=False) as server:
        origin = open_origin(url(server), backoff=QUICK)
        with pytest.raises(DataError, match=r"201 bytes of shard-0 .* need a server that answers range"):
            origin.read("shard-0", 100, 300)
        with pytest.raises(DataError, match=r"shard-0 of 1002 bytes or more +need at most 1000"):
            origin.read_up_to("shard-0", 1000)
        assert origin.read_up_to("shard-0", len(CONTENT)) == CONTENT


def test_a_missing_file_is_asked_for_once_and_an_overloaded_server_again(caplog):
    with serving(failures=(503, 0, 429)) as server:  # 0: an answer that is no HTTP, as of a proxy that restarts
        origin = open_origin(url(server), backoff=QUICK)
        assert origin.read("shard-0", 0, 10) == CONTENT[:10]
        assert server.num_requests == 4
        assert len([each for each in caplog.messages if "again in" in each]) == 3
        with pytest.raises(DataError, match="data/shard-1"):
            origin.read("shard-1", 0, 10)
        assert server.num_requests == 5


def test_a_server_that_accepts_and_is_silent_is_asked_again(caplog, monkeypatch):
    monkeypatch.setattr(origin_module, "SILENT_SECONDS", 0.1)
    with serving(failures=(SILENT, SILENT)) as server:
        assert open_origin(url(server), backoff=QUICK).read("shard-0", 0, 10) == CONTENT[:10]
        assert server.num_requests == 3
    said = [each for each in caplog.messages if "again in" in each]
    assert len(said) == 2
    assert all("shard-0: Timeout on reading data from socket; again in" in each for each in said)


@pytest.mark.parametrize("protocol", ["gs", "gcs", "az", "abfs", "abfss"])
def test_the_file_systems_of_clouds_get_a_limit_of_silence(protocol, monkeypatch):
    fsspec, given = pytest.importorskip("fsspec"), {}
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **options: given.update(options) or (None, ""))
    open_origin(f"{protocol}://bucket/data", backoff=QUICK, token="anon")
    limits = [getattr(value, "sock_read", value) for name, value in given.items() if name.endswith("timeout")]
    assert limits == [origin_module.SILENT_SECONDS] * len(limits) != []
    open_origin(f"{protocol}://bucket/data", backoff=QUICK, requests_timeout=7, read_timeout=7)
    assert (given["requests_timeout"], given["read_timeout"]) == (7, 7)


@pytest.mark.parametrize("failures", [(), (403,), (0,) * 100], ids=["missing", "forbidden", "no HTTP"])
def test_no_error_shows_a_password_and_a_missing_file_is_said_to_be_missing(failures, caplog):
    with serving(failures=failures) as server:
        name = "shard-0" if failures else "shard-1"
        with pytest.raises(DataError) as caught:
            open_origin(url(server).replace("//", "//me:secret@"), backoff=QUICK).read(name, 0, 10)
    assert "secret" not in str(caught.value) + caplog.text
    assert ("FileNotFoundError" in str(caught.value)) == (not failures)


def test_a_file_system_that_connects_when_it_is_opened_is_tried_again(monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    answers = iter([ConnectionRefusedError("refused"), ConnectionRefusedError("refused")])

    def connect(url: str, real: Any = fsspec.core.url_to_fs, **options: Any) -> Any:
        for error in answers:
            raise error
        return real(url, **options)

    monkeypatch.setattr(fsspec.core, "url_to_fs", connect)
    with serving() as server:
        assert open_origin(url(server), backoff=QUICK).read("shard-0", 0, 10) == CONTENT[:10]


def test_a_server_that_goes_away_and_comes_back_changes_no_byte():
    with serving() as server:
        port = server.server_address[1]
        origin = open_origin(url(server), backoff=Backoff(first=0.02, longest=0.05, give_up=20.0))
        assert origin.read("shard-0", 0, 10) == CONTENT[:10]
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(origin.read("shard-0", 10, 20)))
    reader.start()
    reader.join(0.15)
    assert reader.is_alive()
    with serving(port=port):
        reader.join(20)
    assert found == [CONTENT[10:20]]


def test_shards_are_staged_from_a_server(tmp_path):
    with serving() as server:
        cache = ShardCache(tmp_path, 10**6)
        stager = Stager(open_origin(url(server), backoff=QUICK), [shard()], cache, [[0], [0]])
        stager.advance()
        copied = cache.copy(shard(), open_origin(url(server), backoff=QUICK).read)
        assert os.pread(copied.descriptor, len(CONTENT) + 1, 0) == CONTENT
        stager.close()


def read_in_child(origin: Any, path: Path) -> None:
    child = os.fork()
    if child == 0:
        path.write_bytes(origin.read("shard-0", 0, 10))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_an_origin_that_was_used_before_a_fork_can_be_used_after_it(tmp_path):
    with serving() as server:
        origin = open_origin(url(server), backoff=QUICK)
        origin.read("shard-0", 0, 10)
        read_in_child(origin, tmp_path / "found")
    assert (tmp_path / "found").read_bytes() == CONTENT[:10]


def test_a_bucket_of_s3_is_an_origin(monkeypatch):
    pytest.importorskip("s3fs")
    moto_server = pytest.importorskip("moto.server")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"endpoint_url": f"http://{host}:{port}", "client_kwargs": {"region_name": "eu-west-1"}}
        import s3fs

        file_system = s3fs.S3FileSystem(**options)
        file_system.mkdir("bucket")
        file_system.pipe_file("bucket/data/shard-0", CONTENT)
        origin = open_origin("s3://bucket/data", backoff=QUICK, **options)
        assert origin.read("shard-0", 100, 300) == CONTENT[100:300]
        with pytest.raises(DataError, match="shard-1"):
            origin.read("shard-1", 0, 10)
    finally:
        server.stop()
