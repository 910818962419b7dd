"""Codec state: what the codecs of all ranks keep between steps, saved and loaded by parameter.

residual     what a rank has not sent yet (key "remainder"); each rank has its own, and only their sum has a meaning
saved state  one row for each rank of the run that saved it
Law: on as many ranks, training continues bit for bit; on another number the sum of the residuals is the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.codec.protocol import Codec
from fourfold.parts.comm.communicator import Communicator

CodecTensors = Mapping[str, Mapping[str, Tensor]]


class CodecState:
    """The state of this rank's codecs."""

    def __init__(self, codecs: Sequence[Codec], communicator: Communicator) -> None:
        self._communicator = communicator
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """By parameter and key, flat: this rank's own tensors, not copies."""
        for codec in codecs:
            self.tensors |= codec.state_tensors()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """By parameter and key: copies [ranks, elements] of the state of all ranks. Collective."""
        return {
            name: {key: self._gather_rows(value) for key, value in state.items()}
            for name, state in self.tensors.items()
        }

    def _gather_rows(self, value: Tensor) -> Tensor:
        rows = torch.zeros(self._communicator.size, value.numel(), dtype=value.dtype, device=self._communicator.device)
        rows[self._communicator.rank] = value
        self._communicator.all_reduce(rows)
        return rows

    @torch.no_grad()
    def load_parameter(self, name: str, saved: Mapping[str, Tensor]) -> None:
        """Restore the codec state of a parameter: `saved` has tensors [ranks, elements] by key; it may be empty."""
        for key, value in self.tensors[name].items():
            rows: Any = saved.get(key)
            if key == "remainder":
                value.zero_() if rows is None else value.copy_(self._own_residual(rows))
            elif rows is not None and rows.shape == (self._communicator.size, value.numel()):
                value.copy_(rows[self._communicator.rank])
            elif key == "age":
                value.zero_()  # age 0: the codec finds a new threshold before it uses one
            elif rows is not None and key == "warm" and rows.shape[1] == value.numel():
                value.copy_(rows[0])  # the same on every rank

    def _own_residual(self, rows: Tensor) -> Tensor:
        """This rank's residual: its own row, or an equal part of the sum if the number of ranks has changed."""
        return (
            rows[self._communicator.rank]
            if len(rows) == self._communicator.size
            else rows.sum(0) / self._communicator.size
        )
