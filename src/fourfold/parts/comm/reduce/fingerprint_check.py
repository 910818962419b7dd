"""Fingerprint check: the ranks of a process group compare their calls in the all-reduce that sums the loss.

fingerprint  a call's hash, as a float64; see `collective_fingerprint`
Law: all calls begin with an all-reduce of LOSS scalars of one length, so ranks in different calls meet in it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.collectives import Group, all_gather_rows
from fourfold.parts.comm.reduce import collective_fingerprint
from fourfold.parts.comm.reduce.divergence_report import divergence_error
from fourfold.parts.comm.reduce.scalar_room import NUM_LOSS_SCALARS


class FingerprintCheck:
    """Appends one element per member to the scalars; each member fills its own, so the sum holds all fingerprints."""

    def __init__(self, group: Group, members: Sequence[int], index: int, device: torch.device):
        self._group, self._members, self._index, self._device = group, members, index, device

    def append_fingerprint(self, values: Tensor, call: str) -> Tensor:
        """float64 [NUM_LOSS_SCALARS + members]; more values would overwrite the fingerprints."""
        assert len(values) <= NUM_LOSS_SCALARS
        tensor = torch.zeros(NUM_LOSS_SCALARS + len(self._members), dtype=torch.float64, device=self._device)
        tensor[: len(values)] = values
        tensor[NUM_LOSS_SCALARS + self._index] = collective_fingerprint.fingerprint(call)
        return tensor

    def check(self, sums: Sequence[float], call: str) -> None:
        """Raise DivergenceError, on every member, unless all fingerprints are the same. Then gathers the calls."""
        if len(set(sums[NUM_LOSS_SCALARS:])) == 1:
            return
        text = torch.frombuffer(bytearray(collective_fingerprint.encode_call(call)), dtype=torch.uint8).to(self._device)
        texts = [
            collective_fingerprint.decode_call(bytes(row.tolist()))
            for row in all_gather_rows(self._group, text, size=len(self._members))
        ]
        raise divergence_error(dict(zip(self._members, texts, strict=True)))
