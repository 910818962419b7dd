"""Rank start: how the launcher starts a rank.

spawn   a new Python process, which imports torch itself; always possible
fork    a copy of the launcher, which has imported torch: a rank takes milliseconds to start instead of seconds
Law: a rank that is forked sees the environment, arguments, path, streams and signals that a spawned one would see.

A `RankStarter` has the signature of torch's `get_subprocess_handler`, which is the one that spawns.
"""

import contextlib
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from fourfold.environment.processes import set_process_name
from fourfold.launcher.forked_process import fork

RankStarter = Callable[..., Any]
WORKER_MODULE = "fourfold.launcher.worker"
spawn_rank: RankStarter = get_subprocess_handler


def fork_rank(args: Sequence[str], env: Mapping[str, str], local_rank_id: int, **_: Any) -> "_ForkedRank":
    """Fork a rank. args: `("-m", WORKER_MODULE, *its arguments)`; env: variables to add to this process's own."""
    return _ForkedRank(args, env, local_rank_id)


class _ForkedRank:
    """What torch's agent keeps of a rank: its process, and how to end it."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], local_rank_id: int) -> None:
        option, module, *arguments = args
        assert (option, module) == ("-m", WORKER_MODULE)
        importlib.import_module(WORKER_MODULE)  # here, and not once in each rank
        self.local_rank_id = local_rank_id
        # torch's agent signals the group that each rank leads.
        self.proc = fork(lambda: _become_rank(arguments, env), new_session=True)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal, by default SIGTERM, to the rank and the processes that it has started."""
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def _become_rank(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    from fourfold.launcher.worker import main

    os.environ.update(env)
    set_process_name(f"fourfold-{env['RANK']}")
    logging.disable(logging.NOTSET)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as for `python -m`
    main(arguments)


@contextlib.contextmanager
def ranks_started_by(start_rank: RankStarter) -> Iterator[None]:
    """Within: torch's agent starts its processes in this way.

    At the end those that still run are killed: a signal between two starts leaves ranks that the agent does not know.
    """
    started = list[Any]()

    def start(*args: Any, **options: Any) -> Any:
        started.append(start_rank(*args, **options))
        return started[-1]

    before = api.get_subprocess_handler  # pyright: ignore[reportPrivateImportUsage]
    api.get_subprocess_handler = start  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    finally:
        api.get_subprocess_handler = before  # pyright: ignore[reportPrivateImportUsage]
        for rank in started:
            rank.proc.kill()
            rank.proc.wait()
