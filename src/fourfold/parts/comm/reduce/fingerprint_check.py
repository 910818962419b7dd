"""TODO."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.collectives import Group, all_gather_rows
from fourfold.parts.comm.reduce import collective_fingerprint
from fourfold.parts.comm.reduce.divergence_report import divergence_error

NUM_LOSS_SCALARS = 8


class FingerprintCheck:
    """A group's tags: each member adds its own in a place of its own, so that the sum holds all of them.

    All calls sum LOSS scalars of one length first: whichever two calls meet, they meet there.
    """

    def __init__(self, group: Group, members: Sequence[int], index: int, device: torch.device):
        self._group, self._members, self._index, self._device = group, members, index, device

    def append_fingerprint(self, values: Tensor, call: str) -> Tensor:
        """float64 [NUM_LOSS_SCALARS + members]; at most NUM_LOSS_SCALARS values, or they would overwrite the tags."""
        assert len(values) <= NUM_LOSS_SCALARS
        tensor = torch.zeros(NUM_LOSS_SCALARS + len(self._members), dtype=torch.float64, device=self._device)
        tensor[: len(values)] = values
        tensor[NUM_LOSS_SCALARS + self._index] = collective_fingerprint.fingerprint(call)
        return tensor

    def check(self, sums: Sequence[float], call: str) -> None:
        """Raise DivergenceError, on all members alike, unless all tags are the same."""
        if len(set(sums[NUM_LOSS_SCALARS:])) == 1:
            return
        mine = torch.frombuffer(bytearray(collective_fingerprint.encode_call(call)), dtype=torch.uint8).to(self._device)
        texts = [
            collective_fingerprint.decode_call(bytes(row.tolist()))
            for row in all_gather_rows(self._group, mine, size=len(self._members))
        ]
        raise divergence_error(dict(zip(self._members, texts, strict=True)))
