"""Call check: the ranks of a tensor group, or of the stages of one model, tell each other which call they are in.

call    in words, such as "step 2"; a second line may have the optimizer's options
digest  a number that goes with it, of a batch for example
Law: the collective that compares is the same for all calls. So ranks in different calls meet in it, over shared memory
and over messages, and raise DivergenceError, all of them.
"""

import zlib

import torch
from torch import Tensor

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.divergence_report import divergence_error
from fourfold.parts.comm.row_exchange import RowExchange
from fourfold.parts.comm.tensor.protocol import TensorGroup

NO_DIGEST = 0

CALL_ROW = 2  # elements: of the call and of the batch


def compare_calls(group: TensorGroup, ranks: Communicator, call: str, digest: int = NO_DIGEST) -> list[int]:
    """The digests of all ranks. Collective. Raises DivergenceError if they are in different calls.

    ranks  those of the group
    """
    return _compare_rows(group.all_gather(_row(ranks, call, digest)[None], 0), ranks, call)


def compare_calls_of_stages(rows: RowExchange, ranks: Communicator, call: str, digest: int) -> list[int]:
    """The same of the ranks that have the stages of one model. `rows`: their exchange."""
    return _compare_rows(torch.stack(list(rows.all_gather(_row(ranks, call, digest)))), ranks, call)


def _row(ranks: Communicator, call: str, digest: int) -> Tensor:
    """int64 [CALL_ROW]"""
    return torch.tensor([zlib.crc32(call.encode()), digest], device=ranks.device)


def _compare_rows(rows: Tensor, ranks: Communicator, call: str) -> list[int]:
    """The digests in the rows [rank, 2]. Raises DivergenceError, for which ranks in different calls tell these."""
    calls, digests = rows.T.tolist()
    if len(set(calls)) > 1:
        raise divergence_error(dict(zip(ranks.ranks, ranks.all_gather_json(call), strict=True)))
    return digests
