"""Tensor groups: which collectives join the ranks of the tensor axis: shared memory, or messages over gloo or NCCL.

Law: the ranks of a group choose the same, from what all of them have said of themselves.
"""

from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.shared_regions import open_regions
from fourfold.comm.tensor.process_group import TensorGroupOverProcessGroup
from fourfold.comm.tensor.protocol import SingleRankTensorGroup, TensorGroup
from fourfold.comm.tensor.shared_memory import TensorGroupOverSharedMemory
from fourfold.comm.transports import check_transport_device, no_shared_memory


def make_tensor_group(comm: Communicator, purpose: str, meter: CommMeter, *, choice: str = "auto") -> TensorGroup:
    """The group of all ranks of `comm`, which lie along the tensor axis. Collective.

    `choice` is the plan's transport. Raises PlanError if the plan asks for a transport that cannot be had.
    """
    check_transport_device(choice, comm.device.type)
    if comm.size == 1:
        return SingleRankTensorGroup(meter, comm.device)
    if comm.device.type == "cpu" and choice in ("auto", "shared"):
        regions, reason = open_regions(comm, [range(comm.size)], meter)
        if regions is not None:
            return TensorGroupOverSharedMemory(regions)
        if choice == "shared":
            raise no_shared_memory(reason)
    return TensorGroupOverProcessGroup(comm, purpose, meter)
