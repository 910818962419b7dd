"""Calls: which collective call each rank is in, told beside what the call sums.

call   one collective call of a program: its name and its step, such as "evaluate() after step 6"
board  where the ranks of a host write their calls, by turns, so that a rank that is ahead overwrites nothing
tag    48 bits of a call's hash; as a float64 it is exact
Law: no weight is changed and nothing is returned before all ranks are known to be in the same call.
"""

import hashlib
import mmap
from collections.abc import Callable, Mapping, Sequence

from fourfold.words.errors import DivergenceError, Problem

CALL_BYTES = 128
TURNS = 64  # how many calls a rank may be ahead of another and still be compared: some calls wait for nobody
BOARD_BYTES = CALL_BYTES * TURNS


class Board:
    """The calls of a host's ranks, in shared memory; `ranks` are their global ranks, `starts` their first bytes."""

    def __init__(self, mapping: mmap.mmap, starts: Sequence[int], ranks: Sequence[int]) -> None:
        self._mapping, self._starts, self._ranks = mapping, tuple(starts), tuple(ranks)

    def write(self, index: int, number: int, call: str) -> None:
        """The call of this number of the rank of this local index. Its flag is raised afterwards."""
        place = self._place(index, number)
        self._mapping[place : place + CALL_BYTES] = encode(call)

    def compare(self, index: int, counted: Callable[[], Sequence[int]]) -> None:
        """Raise DivergenceError where a rank has begun another call than this one; `counted` are calls begun by rank.

        A rank may be many calls ahead, where these do not wait for others. It has compared this one itself.
        """
        counts = counted()
        number = counts[index]
        calls = [self._read(peer, number) for peer in range(len(counts))]
        for peer, call in enumerate(calls):
            # Whoever has begun the last turn may by now be writing over what has just been read.
            if counts[peer] >= number and counted()[peer] < number + TURNS - 1 and call != calls[index]:
                raise self._diverged(number, counts)

    def _diverged(self, number: int, counts: Sequence[int]) -> DivergenceError:
        calls = {}
        for peer, count in enumerate(counts):
            call = decode(self._read(peer, min(number, count))) if count else "nothing"
            calls[self._ranks[peer]] = call if count >= number else f"{call} and has come no further"
        return diverged(calls)

    def _read(self, index: int, number: int) -> bytes:
        place = self._place(index, number)
        return self._mapping[place : place + CALL_BYTES]

    def _place(self, index: int, number: int) -> int:
        return self._starts[index] + number % TURNS * CALL_BYTES


def encode(call: str) -> bytes:
    """CALL_BYTES bytes."""
    return call.encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0")


def decode(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def tag(call: str) -> float:
    return float(int.from_bytes(hashlib.blake2b(call.encode(), digest_size=6).digest(), "little"))


def diverged(calls: Mapping[int, str]) -> DivergenceError:
    """The error that says which ranks are in which call."""
    by_call: dict[str, list[int]] = {}
    for rank, call in calls.items():
        by_call.setdefault(call, []).append(rank)
    # The fewest first: they are most likely the ones that went astray.
    rows = sorted(by_call.items(), key=lambda row: (len(row[1]), row[1]))
    got = "; ".join(f"{_some(ranks)} at {call}" for call, ranks in rows)
    attempt = "no step, evaluation or exchange that one rank alone does or leaves out"
    return DivergenceError(Problem(got, "every rank in the same call", attempt), where="the calls of the ranks")


def _some(ranks: Sequence[int]) -> str:
    """`rank 1 is`, `ranks 0, 2 and 3 are`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"
