"""Machine: how many processes and threads suit this host, and how they allocate.

processes  one per GPU, else one per core up to four
loopback   the device by which a host talks to itself: other machines do not reach what listens there
Law: a rank never gets more threads than its share of the cores; what the user's environment says goes first.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from fourfold.environment import malloc
from fourfold.environment.world import World, num_cores
from fourfold.words.errors import Problem, SettingError

MAX_DEFAULT_PROCESSES = 4  # by default and without GPUs: more small processes rarely help, and never by surprise
MAX_DIGITS = 9
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def num_gpus() -> int:
    """Number of GPUs torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def default_num_processes() -> int:
    """One process per GPU, else min(cores, 4)."""
    return num_gpus() or min(num_cores(), MAX_DEFAULT_PROCESSES)


def thread_variables(num_processes: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to the environment so that `num_processes` share the cores; nothing the user has set."""
    threads = str(max(1, num_cores() // num_processes))
    return {name: threads for name in THREAD_VARIABLES if name not in environ}


def malloc_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to the environment for large tensors on CPUs: see `words.heap`. With GPUs nothing."""
    return {} if num_gpus() else malloc.malloc_variables(environ)


def loopback_variables(
    environ: Mapping[str, str] = os.environ, flags: Path = Path("/sys/class/net/lo/flags")
) -> dict[str, str]:
    """What to add to the environment so that gloo, inside one host, listens at the loopback device only.

    Nothing where the user has chosen a device, or the loopback device is not up.
    """
    name = "GLOO_SOCKET_IFNAME"
    try:
        is_up = int(flags.read_text(), 16) & 1
    except (OSError, ValueError):  # no Linux
        is_up = False
    return {name: "lo"} if is_up and name not in environ else {}


def check_num_processes(text: str | None, world: World | None) -> int | None:
    """How many processes there must be, from -n and from a launcher; None where neither says.

    Raises SettingError where -n is no number, or a launcher has started another.
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
