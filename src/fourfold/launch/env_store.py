"""Env store: `init_process_group` of a script meets in the job's file too, not at a port.

env://  how torch.distributed finds the ranks where nothing else is said: a TCPStore, which asks nobody who he is
Law: only the world that this launcher has made meets in its file; a script that says another rank, size or address gets
torch's own rendezvous.

Torch is not imported for it: a script may set variables first that torch reads then.
"""

import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlparse

from fourfold.environment.rendezvous import store_file

RENDEZVOUS_MODULE = "torch.distributed.rendezvous"
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


def install() -> None:
    """Have torch's rendezvous know the job's file, as soon as the script imports it."""
    if store_file(os.environ) is not None:
        sys.meta_path.insert(0, _ImportHook())


class _ImportHook(MetaPathFinder):
    """Finds torch's module as Python does, and has it changed when it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != RENDEZVOUS_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            register_handler(module)

        loader.exec_module = load_and_register
        return spec


def register_handler(module: Any) -> None:
    """Put the job's file before torch's way to handle env://."""
    theirs = module._rendezvous_handlers["env"]
    world = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", *ADDRESS_VARIABLES)}

    def env_rendezvous(url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[tuple[Any, int, int]]:
        query = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        asked = {"RANK": query.get("rank", "-1"), "WORLD_SIZE": query.get("world_size", "-1")}
        asked = {name: os.environ.get(name) if value == "-1" else value for name, value in asked.items()}
        asked |= {name: os.environ.get(name) for name in ADDRESS_VARIABLES}
        if asked != world:
            yield from theirs(url, **({} if timeout is None else {"timeout": timeout}), **options)
            return
        from fourfold.parts.comm.file_store import GROUP_TIMEOUT_SECONDS, open_file_store

        path, (rank, size) = store_file(os.environ), (int(world["RANK"]), int(world["WORLD_SIZE"]))
        assert path is not None
        yield open_file_store(path, size, GROUP_TIMEOUT_SECONDS), rank, size
        raise RuntimeError("a job meets once in each attempt: its ranks cannot meet in another number")

    module._rendezvous_handlers["env"] = env_rendezvous
