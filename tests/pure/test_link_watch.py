"""Laws of links between hosts: who names a slow or cut one, when, and when a run ends."""

import json
import socket
from collections.abc import Iterator

import pytest

from fourfold.parts.comm.peer_beats import Peer, PeerBeats
from fourfold.trainer import link_watch
from fourfold.trainer.heartbeat import RECORD_WORDS, Heartbeat
from fourfold.trainer.link_watch import LinkWatch


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
    heartbeat._phase_start = at
    heartbeat._step_seconds.clear()
    heartbeat._step_seconds.append(step_seconds)
    return heartbeat


def test_a_beat_is_answered_and_says_whether_its_sender_waits(pair) -> None:
    first, second = pair
    assert first.peers[1].heard_at is None
    first.beat(is_waiting=True)
    second.listen(0.05)
    first.listen(0.05)
    assert second.peers[0].is_waiting
    assert 0 < first.peers[1].answer_seconds < 10
    assert first.peers[1].heard_at is not None
    second.close()
    first.listen(0.05)
    assert first.peers[1].has_left


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[" * 200, b"7", b"[]", b'{"a": 1}', b'[1, "beat", 1, 1, true]', b'["token"]']
    + [json.dumps(["token", "beat", index, 1, True]).encode() for index in (7, None, "1", [1])]
    + [json.dumps(["forged", "bye", 1, 1, True]).encode()],
)
def test_what_no_rank_of_the_job_has_sent_changes_nothing(pair, content: bytes) -> None:
    first, _ = pair
    first._take(content, ("127.0.0.1", 9))
    assert (first.peers[1].heard_at, first.peers[1].has_left) == (None, False)


def test_silence_is_told_once_by_one_of_the_two_and_ends_both_after_the_limit(pair) -> None:
    said: list[str] = []
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
        next(iter(each.peers.values())).heard_at = 106.0
    assert [watch.look(106.5) for watch in watches] == ["", ""]
    assert said == [told, f"{names} hear each other again, after 6 s"]
    assert watches[0].look(126.5) == f"{names} have heard nothing of each other for 20 s (peer_timeout)"
    assert watches[1].look(126.5).startswith("rank 1 (host b) and rank 0 (host a) have heard nothing")
    pair[0].peers[1].has_left = True
    assert watches[0].look(900.0) == ""


@pytest.mark.parametrize(
    ("now", "step_seconds", "waits", "peer_waits", "expected"),
    [
        (104.0, 0.1, True, True, True),
        (102.0, 0.1, True, True, False),  # not yet three beats
        (104.0, 2.0, True, True, False),  # steps take long here
        (104.0, 0.1, False, True, False),  # this rank computes
        (104.0, 0.1, True, False, False),  # the peer does
    ],
)
def test_a_link_is_slow_if_both_its_ends_wait_much_longer_than_steps_take(
    pair, monkeypatch, now: float, step_seconds: float, waits: bool, peer_waits: bool, expected: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(link_watch, "main_thread_waits", lambda: waits)
    peer = pair[0].peers[1]
    peer.heard_at, peer.is_waiting, peer.answer_seconds = now - 0.5, peer_waits, 0.25
    watch = LinkWatch(pair[0], stepping(100.0, step_seconds=step_seconds), said.append, None)
    assert (watch.look(now), watch.look(now)) == ("", "")
    text = "rank 0 (host a) and rank 1 (host b): a slow link: both have waited for 4 s in a step, which took 100 ms; an"
    assert [each.startswith(text) for each in said] == [True] * expected


def test_the_link_that_answers_much_slower_than_others_is_the_slow_one(pair, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(link_watch, "main_thread_waits", lambda: True)
    first = pair[0]
    first.peers |= {index: Peer(index, "cd"[index - 2], ("127.0.0.1", 9)) for index in (2, 3)}
    for peer in first.peers.values():
        peer.heard_at, peer.is_waiting, peer.answer_seconds = 103.9, True, 0.01
    heartbeat = stepping(100.0)
    LinkWatch(first, heartbeat, said.append, None).look(104.0)
    assert not said  # the slow link is one of other hosts
    first.peers[2].answer_seconds = 0.2
    LinkWatch(first, heartbeat, said.append, None).look(104.0)
    assert said[0].startswith("rank 0 (host a) and rank 2 (host c): a slow link")


def test_a_thread_of_its_own_sees_whether_the_main_thread_waits() -> None:
    assert not link_watch.main_thread_waits()
