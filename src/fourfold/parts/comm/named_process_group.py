"""Named process group: one that only its members make, who meet in the world's store under a name of their choice.

Law: members wait for each other only, whatever groups other ranks have or make.

torch's `new_group` is collective among all ranks of the world, or with `use_local_synchronization` names a group by the
number of groups that a process has: this differs between ranks, and then members wait for each other forever. The
private names are those that `new_group` itself calls; `tests/simulated/test_process_group_private.py` says what they
must do.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

c10d: Any = distributed_c10d


def make_process_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A process group of these global ranks, with the world's backend and store. Collective among them.

    `name` must be the same on every member, and new in this world.
    """
    world = dist.group.WORLD
    assert world is not None
    config, store = c10d._world.pg_map[world]
    backend, members = c10d.Backend(config), sorted(ranks)
    # With a bound device NCCL would split the world's communicator, and that is collective among all ranks.
    bound_device, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(world.rank()),
            members,
            backend,
            store,
            name,
            timeout=c10d._get_default_timeout(backend),
        )
    finally:
        world.bound_device_id = bound_device
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group
