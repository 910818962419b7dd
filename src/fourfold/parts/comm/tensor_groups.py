"""Tensor groups: which collectives join the ranks of the tensor axis: shared memory, or messages over gloo or NCCL.

Law: the ranks of a group choose the same, from what all of them have said of themselves.
"""

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.rings import make_ring
from fourfold.parts.comm.tensor.over_ring import TensorGroupOverRing
from fourfold.parts.comm.tensor.protocol import TensorGroup
from fourfold.parts.comm.tensor.single_rank import SingleRankTensorGroup


def make_tensor_group(comm: Communicator, purpose: str, meter: CommMeter, *, choice: str = "by-host") -> TensorGroup:
    """The group of all ranks of `comm`, which lie along the tensor axis. Collective.

    `choice` is the plan's transport. Raises PlanError if the plan asks for a transport that cannot be had.
    """
    if comm.size == 1:
        return SingleRankTensorGroup(meter)
    return TensorGroupOverRing(make_ring(comm, [range(comm.size)], purpose, meter, choice=choice))
