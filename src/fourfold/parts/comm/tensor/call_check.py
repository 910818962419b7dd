"""Call check: the ranks of a tensor group tell each other which call they are in, before they do what it does.

call    in words, such as "step 2"; a second line may have the optimizer's options
digest  a number that goes with it, of a batch for example
Law: the collective that compares is the same for all calls. So ranks in different calls meet in it, over shared memory
and over messages, and raise DivergenceError, all of them.
"""

import zlib

import torch

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.divergence_report import divergence_error
from fourfold.parts.comm.tensor.protocol import TensorGroup

NO_DIGEST = 0


def compare_calls(group: TensorGroup, ranks: Communicator, call: str, digest: int = NO_DIGEST) -> list[int]:
    """The digests of all ranks. Collective. Raises DivergenceError if they are in different calls.

    ranks  those of the group
    """
    own = torch.tensor([[zlib.crc32(call.encode()), digest]], device=ranks.device)
    calls, digests = group.all_gather(own, 0).T.tolist()
    if len(set(calls)) > 1:
        raise divergence_error(dict(zip(ranks.ranks, ranks.all_gather_json(call), strict=True)))
    return digests
