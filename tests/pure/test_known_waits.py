"""Laws of known waits: what a rank waits for stands where others can read it, and nowhere else is anybody called."""

import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fourfold.environment import known_waits
from fourfold.environment.known_waits import SLOT_WORDS, KnownWait, waiting_for
from fourfold.feed.staging.origin import Backoff, retry
from fourfold.launcher.forked_process import fork
from fourfold.trainer.heartbeat import RECORD_WORDS, WAIT_WORDS, Heartbeat
from fourfold.trainer.link_watch import wait_text


@pytest.fixture
def slot() -> Iterator[memoryview]:
    made = memoryview(bytearray(8 * SLOT_WORDS)).cast("q")
    known_waits.write_to(made)
    yield made
    known_waits.write_to(memoryview(bytearray(8 * SLOT_WORDS)).cast("q"))


def test_a_slot_holds_the_oldest_wait_and_when_the_last_one_ended(slot: memoryview) -> None:
    assert known_waits.read(slot) == KnownWait()
    with waiting_for("an origin") as say:
        first = known_waits.read(slot)
        with waiting_for("a copy"):
            assert known_waits.read(slot)[:2] == first[:2]
        say("an origin: connection refused" + "." * 1000)
        now = known_waits.read(slot)
        assert (first.what, now.since) == ("an origin", first.since)
        assert now.what.startswith("an origin: connection refused...")
        say(os.fsdecode(b"a folder named \xff"))  # which no text in UTF-8 can be
        assert known_waits.read(slot).what == r"a folder named \udcff"
    after = known_waits.read(slot)
    assert (after.what, after.since) == ("", 0.0)
    assert after.until >= first.since


class _SlotReadAtEachWrite:
    """A slot that is read after each word written, as a launcher may that looks at any moment."""

    def __init__(self) -> None:
        self.words, self.seen = memoryview(bytearray(8 * SLOT_WORDS)).cast("q"), list[KnownWait]()

    def __getitem__(self, key: Any) -> Any:
        return self.words[key]

    def __setitem__(self, key: int, value: int) -> None:
        self.words[key] = value
        self.seen.append(known_waits.read(self.words))


def test_who_looks_at_any_moment_sees_a_wait_or_one_that_has_just_ended() -> None:
    slot = _SlotReadAtEachWrite()
    known_waits.write_to(slot)  # type: ignore[arg-type]
    try:
        with waiting_for("an origin") as say:
            slot.seen.clear()
            say("an origin: connection refused")
            during = len(slot.seen)
        said, ended = slot.seen[:during], slot.seen[during:]
    finally:
        known_waits.write_to(memoryview(bytearray(8 * SLOT_WORDS)).cast("q"))
    began = said[-1].since
    assert said
    assert ended
    assert all(wait.since == began or wait.until > began for wait in said + ended)


def test_a_thread_that_ends_its_wait_leaves_that_of_another(slot: memoryview) -> None:
    def wait() -> None:
        with waiting_for("the second"):
            pass

    with waiting_for("the first"):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert known_waits.read(slot).what == "the first"


def test_a_fork_writes_into_the_slot_only_while_its_parent_does_not_wait() -> None:
    shared = memoryview(mmap.mmap(-1, 8 * SLOT_WORDS)).cast("q")
    known_waits.write_to(shared)
    found = []

    def wait() -> None:
        with waiting_for("the worker's origin"):
            os._exit(0)

    try:
        with waiting_for("the parent's"):
            assert fork(wait).wait() == 0
            found.append(known_waits.read(shared).what)
        assert fork(wait).wait() == 0
        found.append(known_waits.read(shared).what)
        with waiting_for("the parent's"):  # the owner is gone
            found.append(known_waits.read(shared).what)
    finally:
        known_waits.write_to(memoryview(bytearray(8 * SLOT_WORDS)).cast("q"))
    assert found == ["the parent's", "the worker's origin", "the parent's"]


def test_an_origin_that_does_not_answer_is_known_with_its_last_error(slot: memoryview) -> None:
    found = []

    def attempt() -> int:
        found.append(known_waits.read(slot).what)
        if len(found) < 3:
            raise ConnectionError("refused")
        return 7

    assert retry(attempt, "http://host/x", Backoff(first=0.001, longest=0.001)) == 7
    assert found == ["http://host/x", "http://host/x: refused", "http://host/x: refused"]
    assert known_waits.read(slot).since == 0


def test_the_longest_wait_is_shown_once_it_has_lasted_and_no_step_ends() -> None:
    words = memoryview(bytearray(8 * 2 * RECORD_WORDS)).cast("q")
    heartbeat, other = Heartbeat(words), words[RECORD_WORDS:][WAIT_WORDS]
    known_waits.write_to(other)
    with waiting_for("http://host/x: refused"):
        since = known_waits.read(other).since
        assert wait_text(heartbeat, since + 2) == ""
        assert wait_text(heartbeat, since + 72) == "rank 1 waits 1:12 for http://host/x: refused"
        heartbeat.phase_start = since + 71  # a step has ended: the wait is for batches that are read ahead
        assert wait_text(heartbeat, since + 72) == ""
    known_waits.write_to(memoryview(bytearray(8 * SLOT_WORDS)).cast("q"))
