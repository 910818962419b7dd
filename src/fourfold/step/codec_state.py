"""Codec state: what the codecs of all ranks remember, saved and loaded by parameter.

rows  of one tensor of a codec's state: one for each rank that saved it, in rank order
place of the tensor axis: the residuals of its ranks are parts of whole ones; what else codecs remember is its own
Law: on the same mesh training continues bit for bit; on another the sum of the residuals stays the same.

How a saved tensor becomes this rank's is the codec's own decision (`Codec.reshard`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.tensor.work.whole_tensors import WholeTensors
from fourfold.comm.codec.protocol import Codec, SavedRows
from fourfold.comm.codec.registry import make_codec
from fourfold.comm.codec.residual import RESIDUAL_KEY
from fourfold.comm.communicator import Communicator
from fourfold.plan.codec import CodecSpec
from fourfold.torch_kit.tensor_reader import TensorReader


class CodecState:
    """What this rank's codecs remember, and the other ranks' rows of it when it is saved."""

    def __init__(self, codecs: Sequence[Codec], communicator: Communicator, whole_tensors: WholeTensors) -> None:
        self._communicator, self._whole_tensors = communicator, whole_tensors
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
            name: self._whole_rows(name, {key: self._gather_rows(value) for key, value in state.items()})
            for name, state in self.tensors.items()
        }

    def _whole_rows(self, name: str, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of whole residuals, and those of all places under keys of their own. Collective."""
        result = {}
        if RESIDUAL_KEY in rows:
            whole = [self._whole_tensors.whole(name, row).reshape(-1) for row in rows[RESIDUAL_KEY]]
            result[RESIDUAL_KEY] = torch.stack(whole)
        own = {self.saved_key(key): value for key, value in rows.items() if key != RESIDUAL_KEY}
        ranks = self._whole_tensors.ranks
        sizes = {key: [list(value.shape), str(value.dtype).removeprefix("torch.")] for key, value in own.items()}
        for place, found in enumerate(ranks.all_gather_json(sizes)):
            for key, (shape, dtype) in found.items():
                empty = torch.empty(shape, dtype=getattr(torch, dtype), device=ranks.device)
                result[key] = own.get(key, empty)
                ranks.broadcast(result[key], place)
        return result

    def saved_key(self, key: str) -> str:
        """Under which key a tensor of this rank is saved: with its place, unless it is a part of a whole one."""
        ranks = self._whole_tensors.ranks
        return key if key == RESIDUAL_KEY or ranks.size == 1 else f"{key}@{ranks.rank}/{ranks.size}"

    def _gather_rows(self, row: Tensor) -> Tensor:
        rows = torch.zeros(self._communicator.size, row.numel(), dtype=row.dtype, device=self._communicator.device)
        rows[self._communicator.rank] = row
        self._communicator.all_reduce(rows)
        return rows

    @torch.no_grad()
    def load_parameter(self, name: str, saved: Mapping[str, Sequence[TensorReader]]) -> None:
        """Continue from the rows that were saved of one parameter, by key; some or all may be missing."""
        for key, tensor in self.tensors[name].items():
            rows = SavedRows(saved.get(self.saved_key(key), ()), self._communicator.rank, self._communicator.size)
            self._codec_of[name].reshard(key, rows, tensor)


def make_codecs(
    spec: CodecSpec | None, buckets: Sequence[Bucket], parameters: Sequence[Sequence[nn.Parameter]]
) -> list[Codec]:
    """One codec for each bucket of gradients; none without a codec in the plan. `parameters`: by bucket and slot."""
    if spec is None:
        return []
    return [
        make_codec(spec, bucket, [tuple(p.shape) for p in params], device=params[0].device)
        for bucket, params in zip(buckets, parameters, strict=True)
    ]
