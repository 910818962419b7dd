"""Calls: which collective call each rank is in, told beside what the call sums.

call   one collective call of a program: its name and its step, such as "evaluate() after step 6"; a step's call also
       carries the optimizer's options on a second line (see `parts.options`)
board  where the ranks of a host write their calls, by turns, so that a rank that is ahead overwrites nothing
tag    48 bits of a call's hash; as a float64 it is exact
Law: no weight is changed and nothing is returned before all ranks are known to be in the same call.
"""

import hashlib
import mmap
from collections.abc import Callable, Sequence

from fourfold.parts.comm.reduce.divergence_report import divergence_error
from fourfold.words.errors import DivergenceError

CALL_BYTES = 512
BOARD_DEPTH = 64  # how many calls a rank may be ahead of another and still be compared: some calls wait for nobody
BOARD_BYTES = CALL_BYTES * BOARD_DEPTH


class CallBoard:
    """The calls of a host's ranks, in shared memory; `ranks` are their global ranks, `starts` their first bytes."""

    def __init__(self, mapping: mmap.mmap, starts: Sequence[int], ranks: Sequence[int]) -> None:
        self._mapping, self._starts, self._ranks = mapping, tuple(starts), tuple(ranks)

    def write(self, index: int, number: int, call: str) -> None:
        """The call of this number of the rank of this local index. Its flag is raised afterwards."""
        place = self._offset(index, number)
        self._mapping[place : place + CALL_BYTES] = encode_call(call)

    def check(self, index: int, get_counts: Callable[[], Sequence[int]]) -> None:
        """Raise DivergenceError where a rank has begun another call than this one; `counted` are calls begun by rank.

        A rank may be many calls ahead, where these do not wait for others. It has compared this one itself.
        """
        counts = get_counts()
        number = counts[index]
        calls = [self._read(peer, number) for peer in range(len(counts))]
        for peer, call in enumerate(calls):
            # Whoever has begun the last turn may by now be writing over what has just been read.
            if counts[peer] >= number and get_counts()[peer] < number + BOARD_DEPTH - 1 and call != calls[index]:
                raise self._divergence_error(number, counts)

    def _divergence_error(self, number: int, counts: Sequence[int]) -> DivergenceError:
        calls = {
            self._ranks[peer]: decode_call(self._read(peer, min(number, count))) if count else "nothing"
            for peer, count in enumerate(counts)
        }
        return divergence_error(
            calls, behind=[self._ranks[peer] for peer, count in enumerate(counts) if count < number]
        )

    def _read(self, index: int, number: int) -> bytes:
        place = self._offset(index, number)
        return self._mapping[place : place + CALL_BYTES]

    def _offset(self, index: int, number: int) -> int:
        return self._starts[index] + number % BOARD_DEPTH * CALL_BYTES


def encode_call(call: str) -> bytes:
    """CALL_BYTES bytes."""
    return call.encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0")


def decode_call(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def fingerprint(call: str) -> float:
    return float(int.from_bytes(hashlib.blake2b(call.encode(), digest_size=6).digest(), "little"))
