"""Remembered: what the codecs of all ranks know of earlier steps, taken out and put back by parameter.

remainder  what a rank has not sent yet; each rank has its own, and only their sum means something to the others
saved      a row for each rank that there was
Law: on as many ranks, training goes on bit for bit; on another number the sum of the remainders is the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.codec.registry import Codec
from fourfold.parts.comm.transports import Communicator

CodecTensors = Mapping[str, Mapping[str, Tensor]]


class CodecState:
    """What this rank's codecs remember, and what it may know of the others'."""

    def __init__(self, codecs: Sequence[Codec], communicator: Communicator) -> None:
        self._communicator = communicator
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """By parameter and key, flat: the living tensors of this rank."""
        for codec in codecs:
            self.tensors |= codec.state_tensors()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """By parameter and key: copies [ranks, elements] of what all ranks remember. Collective."""
        return {
            name: {key: self._gather_rows(value) for key, value in state.items()}
            for name, state in self.tensors.items()
        }

    def _gather_rows(self, mine: Tensor) -> Tensor:
        rows = torch.zeros(self._communicator.size, mine.numel(), dtype=mine.dtype, device=self._communicator.device)
        rows[self._communicator.rank] = mine
        self._communicator.all_reduce(rows)
        return rows

    @torch.no_grad()
    def load_parameter(self, name: str, saved: Mapping[str, Tensor]) -> None:
        """Have a parameter's codec remember what was saved of it: tensors [ranks, elements] by key, or nothing."""
        for key, value in self.tensors[name].items():
            rows: Any = saved.get(key)
            if key == "remainder":
                value.zero_() if rows is None else value.copy_(self._own_residual(rows))
            elif rows is not None and rows.shape == (self._communicator.size, value.numel()):
                value.copy_(rows[self._communicator.rank])
            elif key == "age":
                value.zero_()  # a threshold is found before it is used
            elif rows is not None and key == "warm" and rows.shape[1] == value.numel():
                value.copy_(rows[0])  # the same on every rank

    def _own_residual(self, rows: Tensor) -> Tensor:
        """This rank's part of the remainders of other ranks."""
        return (
            rows[self._communicator.rank]
            if len(rows) == self._communicator.size
            else rows.sum(0) / self._communicator.size
        )
