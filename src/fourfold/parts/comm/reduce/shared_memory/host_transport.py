"""Host transport: the four parts of a transport over one mapping of a host's memory.

Law: one mapping has one set of flags; its parts use different ones.
"""

import mmap

from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.reduce.inter_host import InterHostReducer, InterHostScalars
from fourfold.parts.comm.reduce.protocol import DataTransport, GradReducer, WorldChannel
from fourfold.parts.comm.reduce.shared_memory.call_check import CallCheck, HostCalls
from fourfold.parts.comm.reduce.shared_memory.flag_waits import (
    TIME_LIMIT_SECONDS,
    FlagWaits,
    MappedHost,
)
from fourfold.parts.comm.reduce.shared_memory.flags import HostFlags, HostRanks
from fourfold.parts.comm.reduce.shared_memory.host_buffers import HostBuffers
from fourfold.parts.comm.reduce.shared_memory.layout import SharedMemoryLayout
from fourfold.parts.comm.reduce.shared_memory.reduction import EagerReducer, LazyReducer
from fourfold.parts.comm.reduce.shared_memory.scalars import HostScalars
from fourfold.parts.comm.reduce.shared_memory.weights import HostWeights
from fourfold.parts.comm.reduce.single_rank import LocalScalars
from fourfold.plan.data.zero import RESTING_LAYOUTS, RestingLayouts
from fourfold.words.layout import PARTIAL, SPLIT


def make_host_transport(
    host: MappedHost,
    *,
    rest: RestingLayouts = RESTING_LAYOUTS[0],
    between_hosts: InterHostReducer | None = None,
    scalars_between_hosts: InterHostScalars | None = None,
    is_prereduced: bool = False,
) -> DataTransport:
    """The transport of the ranks of a host, and of the same ranks on other hosts."""
    num_hosts, host_index = (1, 0) if between_hosts is None else (between_hosts.size, between_hosts.index)
    buffers = HostBuffers(host, num_hosts=num_hosts, host_index=host_index)
    grads: GradReducer
    sums_elsewhere = between_hosts is not None and not is_prereduced
    if rest.state == SPLIT and rest.gradient == PARTIAL and not sums_elsewhere:
        grads = LazyReducer(host, buffers, between_hosts)
    else:
        grads = EagerReducer(host, buffers, between_hosts, rest=rest, is_prereduced=is_prereduced)
    description = "shared memory" + (" + gloo between hosts" if between_hosts else "")
    weights = HostWeights(host, buffers.own_slices, between_hosts)
    scalars = HostScalars(host, scalars_between_hosts) if host.layout.num_scalars else LocalScalars(0)
    return DataTransport(grads, weights, scalars, description)


def make_host_world(
    mapping: mmap.mmap,
    layout: SharedMemoryLayout,
    ranks: HostRanks,
    meter: CommMeter,
    between_hosts: InterHostScalars | None = None,
    *,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> WorldChannel:
    """The channel of a world whose ranks share memory on every host."""
    flags = HostFlags(mapping, layout.region_bytes, index=ranks.index, size=ranks.size)
    check = CallCheck(mapping, layout, ranks, flags)
    waits = FlagWaits(flags, ranks, check, meter, time_limit_seconds=time_limit_seconds)
    scalars = HostScalars(MappedHost(mapping, layout, ranks, flags, waits), between_hosts, check)
    return WorldChannel(scalars, HostCalls(check, flags, waits, between_hosts))
