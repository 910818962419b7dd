"""Collective fingerprints: ranks say which collective call they are in, and compare.

call         one collective call of a program: its name and step, such as "evaluate() after step 6"; a step's call also
             carries the optimizer's options on a second line (see `parts.optim.option_tracker`)
board        where the ranks of a host write their calls, a ring buffer in shared memory
fingerprint  48 bits of a call's hash, which a float64 holds exactly
Law: no weight changes and nothing is returned before all ranks are known to be in the same call.
"""

import hashlib
import mmap
from collections.abc import Callable, Sequence

from fourfold.parts.comm.reduce.divergence_report import divergence_error
from fourfold.words.errors import DivergenceError

CALL_BYTES = 512
BOARD_DEPTH = 64  # how many calls a rank may run ahead and still be compared: some calls do not wait
BOARD_BYTES = CALL_BYTES * BOARD_DEPTH


class CallBoard:
    """The calls of a host's ranks. `starts`: the byte where each rank's part begins; `ranks`: their global ranks."""

    def __init__(self, mapping: mmap.mmap, starts: Sequence[int], ranks: Sequence[int]) -> None:
        self._mapping, self._starts, self._ranks = mapping, tuple(starts), tuple(ranks)

    def write(self, index: int, number: int, call: str) -> None:
        """Write call `number` of the rank with this index on the host. The caller raises the rank's flag afterwards."""
        start = self._offset(index, number)
        self._mapping[start : start + CALL_BYTES] = encode_call(call)

    def check(self, index: int, get_counts: Callable[[], Sequence[int]]) -> None:
        """Raise DivergenceError if a rank has begun another call than rank `index`.

        `get_counts` returns how many calls each rank has begun. A rank may be many calls ahead, as some calls do not
        wait; it has compared this one itself.
        """
        counts = get_counts()
        number = counts[index]
        calls = [self._read(peer, number) for peer in range(len(counts))]
        for peer, call in enumerate(calls):
            # A rank that has begun the last call of the ring buffer may be overwriting what was just read.
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
        start = self._offset(index, number)
        return self._mapping[start : start + CALL_BYTES]

    def _offset(self, index: int, number: int) -> int:
        return self._starts[index] + number % BOARD_DEPTH * CALL_BYTES


def encode_call(call: str) -> bytes:
    """The first CALL_BYTES bytes of the call, padded with zeros."""
    return call.encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0")


def decode_call(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def fingerprint(call: str) -> float:
    return float(int.from_bytes(hashlib.blake2b(call.encode(), digest_size=6).digest(), "little"))
