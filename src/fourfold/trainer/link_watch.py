"""Watch: threads beside a run that say which link between hosts is slow or cut, and what its ranks wait for.

silent   a peer of which nothing was heard for MISSED_BEATS beats
slow     a link whose answers take much longer than they did, while its two ends wait: in steps that last much longer
         than those before, or in the start, an evaluation or a checkpoint; until answers and steps are quick again
wait     what ranks know that they wait for (`environment/known_waits.py`): shown once it has lasted a while
Law: a link that is slow or cut for a while changes nothing but the time; only silence for `peer_timeout` ends a run.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from fourfold.comm.communicator import Communicator
from fourfold.comm.peer_beats import BEAT_SECONDS, Peer, PeerBeats, open_beats
from fourfold.environment.known_waits import waiting_for
from fourfold.environment.standard_streams import print_stderr
from fourfold.torch_kit.torch_dispatch import compilations_noted
from fourfold.trainer.heartbeat import MAX_FRAMES, Heartbeat, waits_for_peers
from fourfold.trainer.progress import format_duration, format_seconds
from fourfold.trainer.run_logger import RunLogger
from fourfold.words.errors import REQUEUE_EXIT_CODE

# ---- links -----------------------------------------------------------------------------------------------------------


MISSED_BEATS = 3
LISTEN_SECONDS = 0.1
SLOW_FACTOR, QUICK_FACTOR = 3, 2  # of a step's usual length
ANSWER_FACTOR = 5  # of the link's quickest answer
MIN_SLOW_SECONDS = 0.05  # for an answer: what a busy host may take


@contextlib.contextmanager
def links_watched(
    comm: Communicator, heartbeat: Heartbeat, logger: RunLogger, *, timeout_seconds: float | None
) -> Iterator[None]:
    """Within: slow and cut links are named, and the second kind ends this process after `timeout_seconds`. Collective.

    timeout_seconds: None: never
    """
    beats = open_beats(comm)
    if beats is None:
        yield
        return
    say = logger.log_message if comm.global_rank == 0 else _print_error
    watch = LinkWatch(beats, heartbeat, say, timeout_seconds)

    def run(ended: threading.Event) -> None:
        next_beat = 0.0
        while not ended.is_set():
            if time.monotonic() >= next_beat:
                beats.beat(is_waiting=main_thread_waits())
                next_beat = time.monotonic() + BEAT_SECONDS
            if lost := watch.look(beats.listen(LISTEN_SECONDS)):
                _exit(lost, heartbeat, logger)

    with contextlib.closing(beats), _thread(run, name="fourfold links"):
        yield


@contextlib.contextmanager
def _thread(run: Callable[[threading.Event], None], *, name: str) -> Iterator[None]:
    """Within: a thread runs; the event ends it."""
    ended = threading.Event()
    thread = threading.Thread(target=run, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Look(NamedTuple):
    """What was seen of this rank at one moment: its last step, the median length of its steps, whether it waits."""

    at: float
    step: int
    median: float
    waits: bool


class LinkWatch:
    """What is said of the links of this host."""

    def __init__(
        self, beats: PeerBeats, heartbeat: Heartbeat, say: Callable[[str], None], timeout_seconds: float | None
    ) -> None:
        self._beats, self._heartbeat, self._say, self._timeout = beats, heartbeat, say, timeout_seconds
        self._silent_since: dict[int, float] = {}
        self._looks = deque[_Look]()
        """Of the last six beats in which steps were done; of this moment otherwise."""
        self._slow: Peer | None = None
        """The peer at the other end of the link that was said to be slow, until it is quick again."""
        self._usual_seconds = 0.0
        """How long steps took before a link was slow; 0: unknown."""

    def look(self, now: float) -> str:
        """Say what is new. Returns why the run cannot go on; "" if it can."""
        for index, peer in self._beats.peers.items():
            if peer.heard_at is None or peer.has_left:
                continue
            if lost := self._look_at(index, peer, peer.heard_at, now):
                return lost
        if not self._silent_since:
            self._look_for_slow(now)
        return ""

    def _look_at(self, index: int, peer: Peer, heard_at: float, now: float) -> str:
        silence, names = now - heard_at, f"{self._beats.own} and {peer}"
        if self._timeout is not None and silence > self._timeout:
            return f"{names} have heard nothing of each other for {silence:.0f} s (peer_timeout)"
        is_silent, tells = silence > MISSED_BEATS * BEAT_SECONDS, self._beats.index < index  # one of the two tells
        if is_silent and index not in self._silent_since:
            self._silent_since[index] = heard_at
            if tells:
                limit = "" if self._timeout is None else f"; the run ends after {self._timeout:g} s (peer_timeout)"
                self._say(f"{names} have heard nothing of each other for {silence:.0f} s{limit}")
        elif not is_silent and index in self._silent_since:
            since = self._silent_since.pop(index)
            peer.answers.clear()  # those that were lost say nothing of the link as it is now
            if tells:
                self._say(f"{names} hear each other again, after {heard_at - since:.0f} s")
        return ""

    def _look_for_slow(self, now: float) -> None:
        heartbeat, window = self._heartbeat, MISSED_BEATS * BEAT_SECONDS
        if not heartbeat.is_stepping:
            self._looks.clear()
        self._looks.append(_Look(now, heartbeat.step, heartbeat.step_seconds, main_thread_waits()))
        while self._looks[0].at < now - 2 * window:
            self._looks.popleft()
        lasting = self._lasting_seconds(now - window)
        if self._slow is None:
            self._usual_seconds = self._looks[0].median or heartbeat.step_seconds
            text = self._slow_text(now, window, lasting)
            self._slow = self._slowest() if text else None
            if self._slow is not None:
                answer = format_seconds(self._slow.answer_seconds)
                self._say(f"{self._beats.own} and {self._slow}: a slow link: {text}; an answer takes {answer}")
            return
        has_quick_answers = max(self._slow.answers, default=BEAT_SECONDS) <= _limit(self._slow)
        if has_quick_answers and 0 < lasting <= QUICK_FACTOR * (self._usual_seconds or lasting):
            self._say(f"{self._beats.own} and {self._slow}: no longer slow: a step takes {format_seconds(lasting)}")
            self._slow = None

    def _lasting_seconds(self, begin: float) -> float:
        """The mean length of the steps that have ended since `begin`; 0 if none has, or there were pauses since."""
        before = [look.step for look in self._looks if look.at <= begin]
        return self._heartbeat.mean_seconds(self._looks[-1].step - before[-1]) if before else 0.0

    def _slow_text(self, now: float, window: float, lasting: float) -> str:
        """How long this rank waits, where that is much longer than usual; otherwise ""."""
        heartbeat, usual = self._heartbeat, self._usual_seconds
        waits = [look.waits for look in self._looks if look.at > now - window]
        age, had = now - heartbeat.phase_start, f"took {format_seconds(usual)}"
        if age > max(window, SLOW_FACTOR * usual) and waits[-1]:
            if heartbeat.is_stepping:
                return f"both have waited for {age:.0f} s in a step, which {had}"
            place = "the start and the first step" if heartbeat.step < 0 else "an evaluation or a checkpoint"
            return f"both wait, {age:.0f} s into {place}"
        if lasting > SLOW_FACTOR * usual and 2 * sum(waits) > len(waits):
            return f"a step takes {format_seconds(max(lasting, age))}, mostly waiting, and {had}"
        return ""

    def _slowest(self) -> Peer | None:
        """The peer that answers slowest, if that link is slow, this host tells of it, and the peer waits too."""
        peers = [(index, peer) for index, peer in self._beats.peers.items() if not peer.has_left]
        index, peer = max(peers, key=lambda each: each[1].answer_seconds, default=(-1, None))
        if peer is None or index < self._beats.index or not peer.is_waiting:
            return None
        return peer if peer.answer_seconds > _limit(peer) else None


def _limit(peer: Peer) -> float:
    """How long a quick answer may take."""
    return max(MIN_SLOW_SECONDS, ANSWER_FACTOR * peer.fastest_seconds)


def main_thread_waits() -> bool:
    """Whether the main thread of this process waits for other ranks."""
    frame, names = sys._current_frames().get(threading.main_thread().ident or 0), []
    while frame is not None and len(names) < MAX_FRAMES:
        names.append(frame.f_code.co_filename)
        frame = frame.f_back
    return waits_for_peers(names)


def _print_error(text: str) -> None:
    print_stderr(f"fourfold: {text}")


def _exit(text: str, heartbeat: Heartbeat, logger: RunLogger) -> NoReturn:
    """End this process: its main thread is inside a collective of torch, which nothing else ends."""
    try:
        logger.record_fault("lost rank", heartbeat.step, text)
        _print_error(f"PeerError: {text}; start the same command again")
    finally:
        os._exit(REQUEUE_EXIT_CODE)


# ---- known waits -----------------------------------------------------------------------------------------------------


POLL_SECONDS = 1.0
SHOWN_SECONDS = 3.0  # shorter waits are no news


@contextlib.contextmanager
def waits_shown(heartbeat: Heartbeat, logger: RunLogger) -> Iterator[None]:
    """Within: the logger is told of waits, on the rank that shows the progress."""
    if not logger.shows_progress:
        yield
        return

    def watch(ended: threading.Event) -> None:
        while not ended.wait(POLL_SECONDS):
            if text := wait_text(heartbeat, time.monotonic()):
                logger.show_wait(text)

    with _thread(watch, name="fourfold waits"):
        yield


@contextlib.contextmanager
def compilations_known() -> Iterator[None]:
    """Within: what `torch.compile` takes, in whichever step, is a known wait."""
    waits = contextlib.ExitStack()

    def begin() -> None:
        waits.enter_context(waiting_for("torch.compile"))

    with compilations_noted(begin, waits.close):
        yield


def wait_text(heartbeat: Heartbeat, now: float) -> str:
    """What is waited for, by which rank of this host and how long; "" while steps end, or no rank knows."""
    if now - heartbeat.phase_start < SHOWN_SECONDS:
        return ""
    waits = {index: wait for index, wait in heartbeat.waits().items() if now - wait.since >= SHOWN_SECONDS}
    if not waits:
        return ""
    index, wait = min(waits.items(), key=lambda each: each[1].since)
    who = f"rank {index} waits" if heartbeat.num_ranks > 1 else "waits"
    return f"{who} {format_duration(now - wait.since)} for {wait.what}"
