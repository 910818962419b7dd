"""Init: how this process joins the ranks of its job and learns its rank.

device  what this rank trains on: the GPU with its local rank, or the CPU
Law: a process group that exists is used, and Fourfold never destroys it; else the launcher's environment says what to
join; else the process is alone.
"""

import contextlib
import os
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fourfold.comm import process_group_lifecycle, rendezvous_store
from fourfold.comm.communicator import Communicator
from fourfold.environment import launchers
from fourfold.environment.world import World, from_environment
from fourfold.words.errors import DISK_FULL, LaunchError, Problem


@dataclass(frozen=True)
class ProcessWorld(World):
    """This process among those of its job, with its device, and a barrier."""

    @property
    def device(self) -> torch.device:
        """What this rank trains on: `cuda:LOCAL_RANK` where there are GPUs, else the CPU.

        Where the process group is one of gloo, it is the CPU. Raises LaunchError if the host has too few GPUs.
        """
        return _select_device(self.local_rank)

    def barrier(self) -> None:
        """Return once every rank has called this. Collective; joins the ranks of the job if nothing has done so yet."""
        if self.size > 1:
            init_communicator().barrier()


def init_communicator() -> Communicator:
    """Use the process group that exists, else join the one that the launcher describes, else stay alone."""
    process_group_lifecycle.destroy_orphaned()
    existing = existing_world()
    world = existing or from_environment() or World()
    device = _select_device(world.local_rank)
    if existing is not None or world.size > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # whoever has made the process group may not have done it
        if existing is None:
            _init_process_group("nccl" if device.type == "cuda" else "gloo")
        process_group_lifecycle.release_groups_at_exit(include_world=existing is None)
    return Communicator(world, device).register()


def _init_process_group(backend: str) -> None:
    """Make the process group at the rendezvous that the launcher's environment gives. Raises LaunchError."""
    info = launchers.detect(os.environ)
    assert info is not None
    try:
        store = rendezvous_store.open_store(info, os.environ)
        if store is None:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.size)
    except (ValueError, dist.DistError) as error:
        got = str(error).splitlines()[0]
        if any(os.strerror(number) in got for number in DISK_FULL):
            problem = Problem(f"{tempfile.gettempdir()}: {got}", "room for what ranks tell each other", "TMPDIR=…")
        elif info.launcher is launchers.TORCHRUN:
            problem = Problem(got, "the variables of a launcher", "fourfold run -n N SCRIPT.py")
        else:
            attempt = "MASTER_ADDR and MASTER_PORT of your own"
            problem = Problem(got, f"rank 0 at {rendezvous_store.describe_address(info, os.environ)}", attempt)
        raise LaunchError(problem) from error


def existing_world() -> World | None:
    """The world of the process group that exists, or None. Has no effect."""
    return _world_of_group() if dist.is_available() and dist.is_initialized() else None


def world() -> ProcessWorld:
    """This process's `rank`, `size`, `local_rank`, `local_size`, `is_main` and `device`. Makes no process group.

    Taken from the process group if one exists, else from the environment of torchrun, `fourfold run`, mpirun, srun or
    Kubernetes; without any of them, one process alone. Raises LaunchError if a launcher's variables contradict each
    other.
    """
    found = existing_world() or from_environment() or World()
    return ProcessWorld(found.rank, found.size, found.local_rank, found.local_size)


def _world_of_group() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(LaunchError):  # contradicting variables: the user has made a group all the same
        launched = from_environment()
        if launched is not None and (launched.rank, launched.size) == (rank, size):
            return launched
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def _select_device(local_rank: int) -> torch.device:
    gloo = dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"
    if not torch.cuda.is_available() or gloo:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        got = f"local rank {local_rank} on a host with {count} GPUs"
        raise LaunchError(Problem(got, "a GPU for each process", f'-n {count}, or CUDA_VISIBLE_DEVICES="" for CPUs'))
    return torch.device("cuda", local_rank)
