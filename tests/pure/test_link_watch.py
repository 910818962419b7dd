"""Laws of links between hosts: who names a slow or cut one, when, and when a run ends."""

import json
import re
import socket
import time
import types
from collections.abc import Iterator

import pytest

from fourfold.comm.peer_beats import BEAT_SECONDS, NUM_ANSWERS, Peer, PeerBeats
from fourfold.trainer import link_watch as watch_module
from fourfold.trainer.heartbeat import RECORD_WORDS, Heartbeat
from fourfold.trainer.link_watch import LinkWatch
from fourfold.trainer.progress import format_seconds


def loopback() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    return made


@pytest.fixture
def pair() -> Iterator[tuple[PeerBeats, PeerBeats]]:
    """The beats of two hosts, a and b."""
    ends = [loopback() for _ in range(2)]
    peers = [Peer(rank, host, ends[rank].getsockname()) for rank, host in enumerate("ab")]
    made = [
        PeerBeats(f"rank {own} (host {'ab'[own]})", own, {1 - own: peers[1 - own]}, "token", end)
        for own, end in enumerate(ends)
    ]
    yield made[0], made[1]
    for each in ends:
        each.close()


def stepping(at: float, *, step_seconds: float = 0.1) -> Heartbeat:
    """The heartbeat of a rank that has finished a step at this moment."""
    heartbeat = Heartbeat(memoryview(bytearray(8 * RECORD_WORDS)).cast("q"))
    heartbeat.beat(7)
    heartbeat.phase_start = at
    heartbeat._step_seconds.clear()
    heartbeat._step_seconds.append(step_seconds)
    return heartbeat


def answering(peer: Peer, seconds: float, *, fastest: float = 0.001, at: float, is_waiting: bool = True) -> None:
    peer.heard_at, peer.is_waiting, peer.fastest_seconds = at, is_waiting, fastest
    peer.answers += [seconds] * NUM_ANSWERS


def test_a_beat_is_answered_and_says_whether_its_sender_waits(pair) -> None:
    first, second = pair
    assert first.peers[1].heard_at is None
    first.beat(is_waiting=True)
    second.listen(0.05)
    first.listen(0.05)
    assert second.peers[0].is_waiting
    assert 0 < first.peers[1].fastest_seconds == first.peers[1].answers[-1] < 1
    for _ in range(NUM_ANSWERS):  # lost ones
        first.beat(is_waiting=True)
    assert first.peers[1].answer_seconds == BEAT_SECONDS
    assert first.peers[1].heard_at is not None
    first.peers[1].answers.clear()  # as when a cut link is whole again
    second.listen(0.05)
    first.listen(0.05)  # the answer to the last of these beats: it says nothing of the link as it is now
    assert not first.peers[1].answers
    second.close()
    first.listen(0.05)
    assert first.peers[1].has_left


def test_a_thread_that_was_held_up_does_not_call_its_peers_silent(pair, monkeypatch) -> None:
    first, _ = pair
    first.peers[1].heard_at = time.monotonic()
    held_up_until = time.monotonic() + 60

    def recvfrom(num_bytes: int) -> tuple[bytes, tuple[str, int]]:
        monkeypatch.setattr("time.monotonic", lambda: held_up_until)
        raise TimeoutError

    monkeypatch.setattr(first, "_socket", types.SimpleNamespace(settimeout=lambda _: None, recvfrom=recvfrom))
    watch = LinkWatch(first, stepping(0.0), pytest.fail, 20.0)
    assert watch.look(first.listen(0.05)) == ""  # beats may have come since it began to wait


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[" * 200, b"7", b"[]", b'{"a": 1}', b'[1, "beat", 1, 1, true]', b'["token"]']
    + [json.dumps(["token", "beat", index, 1, True]).encode() for index in (7, None, "1", [1])]
    + [json.dumps([token, "beat", 1, 1, True]).encode() for token in ("nekot", "\ud800", "é", 7, ["token"])]
    + [json.dumps(["forged", "bye", 1, 1, True]).encode()],
)
def test_what_no_rank_of_the_job_has_sent_changes_nothing(pair, content: bytes) -> None:
    first, _ = pair
    first._take(content, ("127.0.0.1", 9))
    assert (first.peers[1].heard_at, first.peers[1].has_left) == (None, False)


def test_silence_is_told_once_by_one_of_the_two_and_ends_both_after_the_limit(pair, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(watch_module, "main_thread_waits", lambda: True)
    watches = [LinkWatch(each, stepping(100.0), said.append, 20.0) for each in pair]
    assert [watch.look(500.0) for watch in watches] == ["", ""]  # a peer that was never heard is not missed
    for each in pair:
        next(iter(each.peers.values())).heard_at = 100.0
    for now in (102.9, 103.1, 105.0):
        assert [watch.look(now) for watch in watches] == ["", ""]
    names = "rank 0 (host a) and rank 1 (host b)"
    told = f"{names} have heard nothing of each other for 3 s; the run ends after 20 s (peer_timeout)"
    assert said == [told]
    for each in pair:
        answering(next(iter(each.peers.values())), BEAT_SECONDS, at=106.0)  # lost beats, and the first that came
    assert [watch.look(106.5) for watch in watches] == ["", ""]
    assert said == [told, f"{names} hear each other again, after 6 s"]
    assert watches[0].look(126.5) == f"{names} have heard nothing of each other for 20 s (peer_timeout)"
    assert watches[1].look(126.5).startswith("rank 1 (host b) and rank 0 (host a) have heard nothing")
    pair[0].peers[1].has_left = True
    assert watches[0].look(900.0) == ""


@pytest.mark.parametrize(
    ("now", "step_seconds", "waits", "peer_waits", "answer_seconds", "fastest", "expected"),
    [
        (104.0, 0.1, True, True, 0.25, 0.001, True),
        (102.0, 0.1, True, True, 0.25, 0.001, False),  # not yet three beats
        (104.0, 2.0, True, True, 0.25, 0.001, False),  # steps take long here
        (104.0, 0.1, False, True, 0.25, 0.001, False),  # this rank computes
        (104.0, 0.1, True, False, 0.25, 0.001, False),  # the peer does
        (104.0, 0.1, True, True, 0.04, 0.001, False),  # both wait for another rank of theirs
        (104.0, 0.1, True, True, 0.25, 0.1, False),  # a long way: the link was never faster
    ],
)
def test_a_link_is_slow_if_its_answers_are_while_both_its_ends_wait_much_longer_than_steps_take(
    pair,
    monkeypatch,
    now: float,
    step_seconds: float,
    waits: bool,
    peer_waits: bool,
    answer_seconds: float,
    fastest: float,
    expected: bool,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(watch_module, "main_thread_waits", lambda: waits)
    answering(pair[0].peers[1], answer_seconds, fastest=fastest, at=now - 0.5, is_waiting=peer_waits)
    watch = LinkWatch(pair[0], stepping(100.0, step_seconds=step_seconds), said.append, None)
    assert (watch.look(now), watch.look(now)) == ("", "")
    text = "rank 0 (host a) and rank 1 (host b): a slow link: both have waited for 4 s in a step, which took 100 ms; an"
    assert [each.startswith(text) for each in said] == [True] * expected


@pytest.mark.parametrize(
    ("is_paused", "place"), [(False, "the start and the first step"), (True, "an evaluation or a checkpoint")]
)
def test_a_link_that_is_slow_outside_of_the_steps_is_named_too(pair, monkeypatch, is_paused: bool, place: str) -> None:
    said: list[str] = []
    monkeypatch.setattr(watch_module, "main_thread_waits", lambda: True)
    heartbeat = stepping(100.0) if is_paused else Heartbeat(memoryview(bytearray(8 * RECORD_WORDS)).cast("q"))
    with heartbeat.pause():
        heartbeat.phase_start = 100.0
        answering(pair[0].peers[1], 0.25, at=103.5)
        watch = LinkWatch(pair[0], heartbeat, said.append, None)
        assert [watch.look(now) for now in (102.9, 104.0, 105.0)] == [""] * 3
    names = "rank 0 (host a) and rank 1 (host b)"
    assert said == [f"{names}: a slow link: both wait, 4 s into {place}; an answer takes 250 ms"]


@pytest.mark.parametrize(("slow_seconds", "answer", "waits", "expected"), [
    (1.8, 0.25, True, True),
    (0.05, 0.25, True, True),  # many short steps
    (1.8, 0.25, False, False),  # this rank computes
    (1.8, 0.002, True, False),  # the link is as quick as ever
    (0.02, 0.25, True, False),  # steps take hardly longer
])  # fmt: skip
def test_steps_that_all_take_longer_show_a_slow_link_which_is_named_when_it_begins_and_when_it_ends(
    pair, monkeypatch, slow_seconds: float, answer: float, waits: bool, expected: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(watch_module, "main_thread_waits", lambda: waits)
    usual, peer = slow_seconds / 8 if slow_seconds != 0.02 else 0.01, pair[0].peers[1]
    heartbeat = stepping(100.0, step_seconds=usual)
    watch, now = LinkWatch(pair[0], heartbeat, said.append, None), 100.0

    def run(seconds: float, step_seconds: float, answer_seconds: float) -> None:
        nonlocal now
        answering(peer, answer_seconds, at=now)
        end, next_step = now + seconds, now + step_seconds
        while now < end:
            now += 0.1
            peer.heard_at = now
            while next_step <= now:
                monkeypatch.setattr("time.monotonic", lambda at=next_step: at)
                heartbeat.beat(heartbeat.step + 1)
                next_step += step_seconds
            assert watch.look(now) == ""

    run(10, usual, 0.001)
    run(25, slow_seconds, answer)
    assert len(said) == expected
    run(10, usual, 0.001)
    run(10, usual, 0.001)
    names = "rank 0 (host a) and rank 1 (host b)"
    slow = rf"a slow link: a step takes .*, mostly waiting, and took {re.escape(format_seconds(usual))}; an answer .*"
    patterns = [rf"{re.escape(names)}: {text}" for text in (slow, "no longer slow: a step takes .*")][: 2 * expected]
    assert [bool(re.fullmatch(*each)) for each in zip(patterns, said, strict=True)] == [True] * len(said)


def test_of_several_links_the_slowest_is_named_by_the_first_of_its_ends(pair, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(watch_module, "main_thread_waits", lambda: True)
    first, second = pair
    for beats in pair:
        beats.peers |= {index: Peer(index, "cd"[index - 2], ("127.0.0.1", 9)) for index in (2, 3)}
        for peer in beats.peers.values():
            answering(peer, 0.9 if peer.rank == 0 else 0.1 * peer.rank, at=103.9)
    LinkWatch(second, stepping(100.0), said.append, None).look(104.0)
    answering(second.peers[0], 0.001, at=103.9)
    LinkWatch(second, stepping(100.0), said.append, None).look(104.0)
    LinkWatch(first, stepping(100.0), said.append, None).look(104.0)
    assert [text.partition(":")[0] for text in said] == [
        "rank 1 (host b) and rank 3 (host d)",
        "rank 0 (host a) and rank 3 (host d)",
    ]


def test_a_thread_of_its_own_sees_whether_the_main_thread_waits() -> None:
    assert not watch_module.main_thread_waits()
