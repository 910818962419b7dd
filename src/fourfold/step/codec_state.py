"""Codec state: what the codecs of all ranks remember, saved and loaded by parameter.

rows  of one tensor of a codec's state: one for each rank that saved it, in rank order
Law: on as many ranks training continues bit for bit; on another number the sum of the residuals stays the same.

How a saved tensor becomes this rank's is the codec's own decision (`Codec.reshard`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fourfold.parts.codec.protocol import Codec, SavedRows
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.tensor_reader import TensorReader

CodecTensors = Mapping[str, Mapping[str, Tensor]]


class CodecState:
    """What this rank's codecs remember, and the other ranks' rows of it when it is saved."""

    def __init__(self, codecs: Sequence[Codec], communicator: Communicator) -> None:
        self._communicator = communicator
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """By parameter and key, flat: this rank's tensors themselves, no copies."""
        self._codec_of: dict[str, Codec] = {}
        for codec in codecs:
            state = codec.state_tensors()
            self.tensors |= state
            self._codec_of |= dict.fromkeys(state, codec)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """By parameter and key: the rows of all ranks. Collective."""
        return {
            name: {key: self._gather_rows(value) for key, value in state.items()}
            for name, state in self.tensors.items()
        }

    def _gather_rows(self, row: Tensor) -> Tensor:
        rows = torch.zeros(self._communicator.size, row.numel(), dtype=row.dtype, device=self._communicator.device)
        rows[self._communicator.rank] = row
        self._communicator.all_reduce(rows)
        return rows

    @torch.no_grad()
    def load_parameter(self, name: str, saved: Mapping[str, Sequence[TensorReader]]) -> None:
        """Continue from the rows that were saved of one parameter, by key; some or all may be missing."""
        for key, tensor in self.tensors[name].items():
            rows = SavedRows(saved.get(key, ()), self._communicator.rank, self._communicator.size)
            self._codec_of[name].reshard(key, rows, tensor)
