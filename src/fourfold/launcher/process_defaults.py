"""Process defaults: how many processes and threads suit this host, and how they allocate memory.

processes  one per GPU; without GPUs one per core, up to four
loopback   the network device by which a host talks to itself: other machines cannot reach what listens there
Law: the ranks together get no more threads than there are cores; the user's environment takes precedence.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fourfold.environment import malloc
from fourfold.environment.world import World, num_cores
from fourfold.words.errors import Problem, SettingError

MAX_DEFAULT_PROCESSES = 4  # without GPUs: more small processes rarely help, and should not come as a surprise
MAX_DIGITS = 9
# NVIDIA, also on its own boards and under WSL, and AMD
GPU_DEVICES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def may_have_gpus(devices: Path = Path("/dev")) -> bool:
    """Whether this host may have a GPU that torch can use. False only on Linux without a device of a GPU's driver."""
    return sys.platform != "linux" or any(next(devices.glob(pattern), None) for pattern in GPU_DEVICES)


def num_gpus() -> int:
    """Number of GPUs torch can use. Imports torch only where there may be any."""
    if not may_have_gpus():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def launch_variables(num_processes: int) -> dict[str, str]:
    """The variables that `num_processes` ranks of this host begin with; none that the user has set."""
    return {**thread_variables(num_processes), **malloc_variables(), **loopback_variables()}


def default_num_processes() -> int:
    """One process per GPU, else min(cores, 4)."""
    return num_gpus() or min(num_cores(), MAX_DEFAULT_PROCESSES)


def thread_variables(num_processes: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that make `num_processes` divide the cores among them; none that the user has set."""
    threads = str(max(1, num_cores() // num_processes))
    return {name: threads for name in THREAD_VARIABLES if name not in environ}


def malloc_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that make malloc suit large tensors on CPUs (`environment/malloc.py`); none with GPUs."""
    return {} if num_gpus() else malloc.malloc_variables(environ)


def loopback_variables(
    environ: Mapping[str, str] = os.environ, flags: Path = Path("/sys/class/net/lo/flags")
) -> dict[str, str]:
    """Variables that make gloo, inside one host, listen at the loopback device only.

    None if the user has chosen a device, or the loopback device is not up.
    """
    name = "GLOO_SOCKET_IFNAME"
    try:
        is_up = int(flags.read_text(), 16) & 1
    except (OSError, ValueError):  # not Linux
        is_up = False
    return {name: "lo"} if is_up and name not in environ else {}


def check_num_processes(text: str | None, world: World | None) -> int | None:
    """The number of processes that -n or a launcher fixes; None if neither does.

    Raises SettingError where -n is not a number, or differs from the number that a launcher has started.
    """
    if text is not None and not (text.isdecimal() and len(text) <= MAX_DIGITS and int(text)):
        raise SettingError(Problem(f"-n {text}", "a number of processes, at least 1", "-n 1"), where="the command line")
    number = None if text is None else int(text)
    if world is None:
        return number
    if number not in (None, world.size):
        got = f"-n {number}, but a launcher has started {world.size} processes"
        raise SettingError(Problem(got, "one number", "the same without -n"), where="the command line")
    return world.size
