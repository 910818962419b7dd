"""Laws of staging: it changes where bytes come from, never which; a killed process leaves nothing to believe.

Processes of a node are threads with a cache object each, or real processes where one is killed.
"""

import dataclasses
import errno
import fcntl
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import xxhash

from fourfold.feed.staging import shard_cache
from fourfold.feed.staging.origin import Backoff, FolderOrigin, RemoteOrigin, open_origin, retry, without_password
from fourfold.feed.staging.shard_cache import NoRoomError, Shard, ShardCache
from fourfold.feed.staging.stager import Stager
from fourfold.words.errors import DataError

QUICK = Backoff(first=0.001, longest=0.002, give_up=0.02)


def make_shards(folder: Path, sizes: list[int]) -> list[Shard]:
    folder.mkdir(exist_ok=True)
    generator, shards = random.Random(0), []
    for number, size in enumerate(sizes):
        content = generator.randbytes(size)
        (folder / f"shard-{number}").write_bytes(content)
        shards.append(Shard(f"shard-{number}", size, xxhash.xxh3_128(content).hexdigest()))
    return shards


class CountingOrigin(FolderOrigin):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, backoff=QUICK)
        self.num_bytes = 0

    def read(self, name: str, start: int, stop: int) -> bytes:
        self.num_bytes += stop - start
        return super().read(name, start, stop)


def files(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if not each.name.endswith(".lock")}


def wait_for_files(folder: Path, expected: set[str]) -> None:
    deadline = time.monotonic() + 20
    while files(folder) != expected and time.monotonic() < deadline:
        time.sleep(0.005)
    assert files(folder) == expected


def wait_for_held(stager: Stager, numbers: list[int]) -> None:
    deadline = time.monotonic() + 20
    while None in map(stager.held, numbers) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert None not in map(stager.held, numbers)


def content_of(staged) -> bytes:
    return os.pread(staged.descriptor, staged.shard.num_bytes + 1, 0)


# ---- the cache -----------------------------------------------------------------------------------------


def test_a_copy_is_made_once_for_all_processes_of_a_node(tmp_path):
    (shard,), origin = make_shards(tmp_path / "data", [100_000]), CountingOrigin(tmp_path / "data")
    found = []

    def process():
        found.append(content_of(ShardCache(tmp_path / "cache", 10**6).copy(shard, origin.read)))

    threads = [threading.Thread(target=process) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [(tmp_path / "data" / shard.name).read_bytes()] * 6
    assert origin.num_bytes == shard.num_bytes


@pytest.mark.parametrize("seed", range(20))
def test_copies_are_whole_and_within_the_limit_whatever_is_opened_and_closed(tmp_path, seed):
    generator = random.Random(seed)
    shards = make_shards(tmp_path / "data", [generator.randrange(1, 4000) for _ in range(12)])
    read, cache = FolderOrigin(tmp_path / "data").read, ShardCache(tmp_path / "cache", 9000)
    held, refused = [], 0
    for _ in range(100):
        if held and generator.random() < 0.5:
            held.pop(generator.randrange(len(held))).close()
        shard = generator.choice(shards)
        try:
            held.append(cache.copy(shard, read))
        except NoRoomError:
            refused += 1
            in_use = {each.shard for each in held}
            assert sum(each.num_bytes for each in in_use | {shard}) > 9000
        for each in held:
            assert content_of(each) == (tmp_path / "data" / each.shard.name).read_bytes()
        assert sum((tmp_path / "cache" / name).stat().st_size for name in files(tmp_path / "cache")) <= 9000
    assert refused or seed


def test_a_copy_that_was_opened_again_is_held_until_both_are_closed(tmp_path):
    shards = make_shards(tmp_path / "data", [1000] * 2)
    read, cache = FolderOrigin(tmp_path / "data").read, ShardCache(tmp_path / "cache", 1500)
    first = cache.copy(shards[0], read)
    again = first.again()
    first.close()
    with pytest.raises(NoRoomError):
        cache.copy(shards[1], read)
    assert content_of(again) == (tmp_path / "data" / "shard-0").read_bytes()
    again.close()
    cache.copy(shards[1], read).close()


def test_the_least_recently_used_copy_is_evicted(tmp_path):
    shards = make_shards(tmp_path / "data", [1000] * 4)
    read, cache = FolderOrigin(tmp_path / "data").read, ShardCache(tmp_path / "cache", 3000)
    for number in (0, 1, 2, 0, 3):
        time.sleep(0.002)  # file systems tell times apart that are this far apart
        cache.copy(shards[number], read).close()
    assert files(tmp_path / "cache") == {"shard-0", "shard-2", "shard-3"}


def test_a_shard_with_another_digest_is_no_copy(tmp_path):
    (shard,) = make_shards(tmp_path / "data", [3000])
    content = bytearray((tmp_path / "data" / shard.name).read_bytes())
    content[1500] ^= 1
    (tmp_path / "data" / shard.name).write_bytes(content)
    cache = ShardCache(tmp_path / "cache", 10**6)
    with pytest.raises(DataError, match=r"shard-0 with digest .* need .* as its manifest says"):
        cache.copy(shard, FolderOrigin(tmp_path / "data").read)
    assert files(tmp_path / "cache") == set()
    assert cache.open(shard) is None


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x.lock", "x.part", "a\0b"])
def test_names_that_are_no_plain_file_names_are_rejected(tmp_path, name):
    with pytest.raises(DataError, match="a name of a file, without folders"):
        ShardCache(tmp_path / "cache", 10**6).copy(Shard(name, 1, ""), lambda *_: b"x")


def test_a_file_of_another_data_set_is_not_taken_for_a_copy(tmp_path):
    (shard,), cache = make_shards(tmp_path / "data", [3000]), ShardCache(tmp_path / "cache", 10**6)
    (tmp_path / "cache" / shard.name).write_bytes(b"other")
    with pytest.raises(DataError, match=r"of 5 bytes .*need 3000, or no file"):
        cache.copy(shard, FolderOrigin(tmp_path / "data").read)


KILLED = """
import os, sys
from fourfold.feed.staging.shard_cache import Shard, ShardCache
cache, size = ShardCache(sys.argv[1], 10**6), int(sys.argv[2])
held = cache.copy(Shard("held", 4, "PLACEHOLDER"), lambda name, start, stop: b"held")
def read(name, start, stop):
    print("copying", flush=True)
    sys.stdin.read()
cache.copy(Shard("shard-0", size, ""), read)
"""


def test_a_process_that_is_killed_leaves_nothing_that_others_wait_for_or_believe(tmp_path):
    (shard, other) = make_shards(tmp_path / "data", [600_000, 999_998])
    cache, read = ShardCache(tmp_path / "cache", 10**6), FolderOrigin(tmp_path / "data").read
    script = KILLED.replace("PLACEHOLDER", xxhash.xxh3_128(b"held").hexdigest())
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), str(shard.num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"copying\n"
            assert files(tmp_path / "cache") == {"held", "shard-0.part"}
            with pytest.raises(NoRoomError):  # the part has its room
                cache.copy(other, read)
        finally:
            child.kill()
            child.wait()
    staged = cache.copy(other, read)  # in the room of the part and the copy that the process held
    assert content_of(staged) == (tmp_path / "data" / other.name).read_bytes()
    assert files(tmp_path / "cache") == {"shard-1"}
    staged.close()
    assert content_of(cache.copy(shard, read)) == (tmp_path / "data" / shard.name).read_bytes()


def test_a_full_disk_is_no_room_and_leaves_no_part(tmp_path, monkeypatch):
    (shard,) = make_shards(tmp_path / "data", [3000])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_cache.os, "posix_fallocate", full)
    with pytest.raises(NoRoomError):
        ShardCache(tmp_path / "cache", 10**6).copy(shard, FolderOrigin(tmp_path / "data").read)
    assert files(tmp_path / "cache") == set()


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/cache: Not a directory .*need a folder that can be written"):
        ShardCache(tmp_path / "file" / "cache", 10**6)
    with pytest.raises(DataError, match="a cache of 0 bytes"):
        ShardCache(tmp_path, 0)


# ---- the stager ----------------------------------------------------------------------------------------


def read_shard(stager: Stager, origin: FolderOrigin, shards: list[Shard], number: int) -> bytes:
    staged = stager.held(number)
    return origin.read(shards[number].name, 0, shards[number].num_bytes) if staged is None else content_of(staged)


@pytest.mark.parametrize("limit", [1, 2500, 6000, 10**6])
@pytest.mark.parametrize("num_ahead", [1, 3, 50])
def test_batches_are_the_same_whatever_the_cache_holds(tmp_path, limit, num_ahead):
    generator = random.Random(limit + num_ahead)
    shards = make_shards(tmp_path / "data", [generator.randrange(1, 2000) for _ in range(9)])
    origin = FolderOrigin(tmp_path / "data")
    expected = [(tmp_path / "data" / each.name).read_bytes() for each in shards]
    batches = [[generator.randrange(9) for _ in range(generator.randrange(5))] for _ in range(60)]
    stager = Stager(origin, shards, ShardCache(tmp_path / "cache", limit), iter(batches), num_ahead=num_ahead)
    for batch in batches:
        assert [read_shard(stager, origin, shards, n) for n in batch] == [expected[n] for n in batch]
        stager.advance()
    stager.close()
    # A thread may be in the middle of a copy that nothing needs any more: it closes it when it is done.
    deadline = time.monotonic() + 20
    while any(is_locked(tmp_path / "cache" / name) for name in files(tmp_path / "cache")):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):  # a thread has just renamed or removed it
        return True
    return False


def test_shards_are_copied_before_their_batch_and_each_once(tmp_path):
    shards, origin = make_shards(tmp_path / "data", [1000] * 8), CountingOrigin(tmp_path / "data")
    stager = Stager(origin, shards, ShardCache(tmp_path / "cache", 10**6), ([n] for n in range(8)), num_ahead=3)
    wait_for_files(tmp_path / "cache", {"shard-0", "shard-1", "shard-2"})
    for number in range(8):
        read_shard(stager, origin, shards, number)
        stager.advance()
    assert origin.num_bytes <= 8 * 1000 + 1000  # one may be read before its copy has begun
    stager.close()


class SlowOrigin(CountingOrigin):
    """An origin that takes its time."""

    def read(self, name, start, stop):
        time.sleep(0.02)
        return super().read(name, start, stop)


def test_shards_that_were_read_before_their_copy_was_made_are_copied_for_the_next_epoch(tmp_path):
    shards, origin = make_shards(tmp_path / "data", [1000] * 12), SlowOrigin(tmp_path / "data")
    stager = Stager(origin, shards, ShardCache(tmp_path / "cache", 12_000), ([n] for n in range(12)))
    for _ in range(12):  # all batches are read at once, from the origin
        stager.advance()
    stager.close()
    wait_for_files(tmp_path / "cache", {f"shard-{n}" for n in range(12)})


@pytest.mark.parametrize("limit", [12_000, 2500])
def test_a_shard_that_is_read_whole_passes_the_origin_once_where_there_is_room(tmp_path, limit):
    shards, origin = make_shards(tmp_path / "data", [1000] * 12), SlowOrigin(tmp_path / "data")
    stager = Stager(origin, shards, ShardCache(tmp_path / "cache", limit), ([n] for n in range(12)))
    for number in range(12):
        staged = stager.held(number, is_read_whole=True)
        content = origin.read(shards[number].name, 0, 1000) if staged is None else content_of(staged)
        assert content == (tmp_path / "data" / shards[number].name).read_bytes()
        stager.advance()
    stager.close()
    assert limit < 12_000 or origin.num_bytes == 12 * 1000


def test_a_copy_that_a_batch_ahead_needs_is_held(tmp_path):
    shards, origin = make_shards(tmp_path / "data", [1000] * 3), FolderOrigin(tmp_path / "data")
    stager = Stager(origin, shards, ShardCache(tmp_path / "cache", 2000), [[0], [1], [0]])
    wait_for_held(stager, [0, 1])
    other = ShardCache(tmp_path / "cache", 2000)
    with pytest.raises(NoRoomError):
        other.copy(shards[2], origin.read)
    stager.advance()
    stager.advance()  # batch 2 needs shard 0 again
    other.copy(shards[2], origin.read).close()
    assert files(tmp_path / "cache") == {"shard-0", "shard-2"}
    stager.close()


def test_what_is_wrong_with_a_shard_is_raised_where_it_is_read(tmp_path):
    shards, origin = make_shards(tmp_path / "data", [1000] * 2), FolderOrigin(tmp_path / "data", backoff=QUICK)
    (tmp_path / "data" / "shard-1").write_bytes(bytes(1000))
    stager = Stager(origin, shards, ShardCache(tmp_path / "cache", 10**6), [[0], [1]])
    wait_for_held(stager, [0])
    stager.advance()
    with pytest.raises(DataError, match="shard-1 with digest"):
        wait_for_held(stager, [1])
    stager.close()


# ---- the origin ----------------------------------------------------------------------------------------


class Unreachable:
    def __init__(self, num_failures: int, error: Exception) -> None:
        self.num_failures, self.error, self.num_calls = num_failures, error, 0

    def __call__(self) -> str:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise self.error
        return "content"


class Answer(Exception):
    """An error of aiohttp, as far as it is looked at."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message='no'")
        self.status = status


@pytest.mark.parametrize("error", [ConnectionRefusedError("refused"), TimeoutError(), OSError(errno.EIO, "I/O error")])
def test_an_origin_that_comes_back_is_waited_for(error, caplog):
    attempt = Unreachable(3, error)
    assert retry(attempt, "http://host/shard-0", dataclasses.replace(QUICK, give_up=60.0)) == "content"
    assert attempt.num_calls == 4
    assert len([each for each in caplog.messages if "http://host/shard-0: " in each and "again in" in each]) == 3


@pytest.mark.parametrize(("error", "is_retried"), [
    (FileNotFoundError("missing"), False), (PermissionError("no"), False), (Answer(403), False), (Answer(404), False),
    (Answer(429), True), (Answer(503), True), (ValueError("a bug"), False),
])  # fmt: skip
def test_only_errors_that_may_pass_are_retried(error, is_retried):
    attempt = Unreachable(10**9, error)
    with pytest.raises(DataError):
        retry(attempt, "the file", QUICK)
    assert (attempt.num_calls > 1) == is_retried


def test_an_origin_that_stays_away_is_given_up_with_its_last_error():
    with pytest.raises(DataError, match=r"the file: refused, for 0 s +need an origin that can be reached"):
        retry(Unreachable(10**9, ConnectionRefusedError("refused")), "the file", QUICK)


def test_delays_double_up_to_the_longest_and_end():
    delays = list(Backoff(first=1.0, longest=8.0, give_up=60.0).delays())
    assert all(0.5 * base <= delay <= base for base, delay in zip([1, 2, 4, 8, 8, 8], delays, strict=False))
    assert 60 / 8 <= len(delays) <= 12


def test_an_origin_is_given_up_in_time_if_its_attempts_take_long(monkeypatch):
    monkeypatch.setattr("time.monotonic", itertools.count(0.0, 4.0).__next__)
    assert len(list(Backoff(first=0.1, give_up=10.0).delays())) == 2


def test_a_file_that_is_shorter_than_the_manifest_says_is_named(tmp_path):
    make_shards(tmp_path / "data", [1000])
    with pytest.raises(DataError, match="500 bytes of shard-0 for the range 500 to 1500"):
        FolderOrigin(tmp_path / "data").read("shard-0", 500, 1500)


def test_a_memory_file_system_of_fsspec_is_an_origin():
    import fsspec

    fsspec.filesystem("memory").pipe_file("/staging-test/shard-0", bytes(range(100)))
    origin = open_origin("memory://staging-test", backoff=QUICK)
    assert isinstance(origin, RemoteOrigin)
    assert origin.read("shard-0", 10, 20) == bytes(range(10, 20))
    with pytest.raises(DataError, match="shard-1"):
        origin.read("shard-1", 0, 1)


def test_origins_that_cannot_be_opened_are_named(tmp_path):
    with pytest.raises(DataError, match="which is no folder"):
        open_origin(tmp_path / "missing")
    with pytest.raises(DataError, match=r"unknown://host/x: .*need a URL that fsspec knows"):
        open_origin("unknown://host/x")
    with pytest.raises(DataError, match=r"https://host/x\?… +need the URL of a folder") as found:
        open_origin("https://name:secret@host/x?token=secret")
    assert "secret" not in str(found.value)


def test_urls_are_shown_without_passwords():
    assert without_password("https://me:secret@host:80/a/b?key=secret") == "https://host:80/a/b"
    assert without_password("s3://bucket/a/") == "s3://bucket/a"
