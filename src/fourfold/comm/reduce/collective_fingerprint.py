"""Collective fingerprints: ranks say which collective call they are in, and compare.

call         one collective call of a program: its name and step, such as "evaluate() after step 6"; a step's call also
             carries the optimizer's options on a second line (see `optim.option_tracker`)
board        where the ranks of a host write their calls, a ring buffer in shared memory
fingerprint  48 bits of a call's hash, which a float64 holds exactly
Law: no weight changes and nothing is returned before all ranks are known to be in the same call.
Law: all calls begin with an all-reduce of LOSS scalars of one length, so ranks in different calls meet in it.
"""

import hashlib
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.comm.collectives import Group, all_gather_rows
from fourfold.comm.reduce.divergence_report import divergence_error
from fourfold.comm.reduce.protocol import NUM_LOSS_SCALARS
from fourfold.words.errors import DivergenceError

# ---- collective fingerprints ---------------------------------------------------------------------------------------


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


# ---- calls of a process group --------------------------------------------------------------------------------------


class FingerprintCheck:
    """Appends one element per member to the scalars; each member fills its own, so the sum holds all fingerprints."""

    def __init__(self, group: Group, members: Sequence[int], index: int, device: torch.device):
        self._group, self._members, self._index, self._device = group, members, index, device

    def append_fingerprint(self, values: Tensor, call: str) -> Tensor:
        """float64 [NUM_LOSS_SCALARS + members]; more values would overwrite the fingerprints."""
        assert len(values) <= NUM_LOSS_SCALARS
        tensor = torch.zeros(NUM_LOSS_SCALARS + len(self._members), dtype=torch.float64, device=self._device)
        tensor[: len(values)] = values
        tensor[NUM_LOSS_SCALARS + self._index] = fingerprint(call)
        return tensor

    def check(self, sums: Sequence[float], call: str) -> None:
        """Raise DivergenceError, on every member, unless all fingerprints are the same. Then gathers the calls."""
        if len(set(sums[NUM_LOSS_SCALARS:])) == 1:
            return
        text = torch.frombuffer(bytearray(encode_call(call)), dtype=torch.uint8).to(self._device)
        texts = [
            decode_call(bytes(row.tolist())) for row in all_gather_rows(self._group, text, size=len(self._members))
        ]
        raise divergence_error(dict(zip(self._members, texts, strict=True)))
