"""Env store: a script's own `init_process_group` uses the job's store file too, instead of a port.

env://  torch.distributed's default rendezvous: a TCPStore on a port, without authentication
Law: only the world that this launcher started uses the file. A script that gives another rank, size or address gets
torch's own rendezvous.

This module does not import torch: a script may first set variables that torch reads at its import.
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
    """Make torch's rendezvous use the job's store file, now or from the moment the script imports it."""
    if store_file(os.environ) is None:
        return
    if RENDEZVOUS_MODULE in sys.modules:  # in a rank that is a fork of its launcher
        register_handler(sys.modules[RENDEZVOUS_MODULE])
    else:
        sys.meta_path.insert(0, _ImportHook())


class _ImportHook(MetaPathFinder):
    """Finds torch's rendezvous module as Python does, and registers our handler when it has been loaded."""

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
    """Handle env:// by the job's store file, and by torch's own handler where the script asks for another world."""
    torch_handler = module._rendezvous_handlers["env"]
    world = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", *ADDRESS_VARIABLES)}

    def env_rendezvous(url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[tuple[Any, int, int]]:
        query = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        requested = {"RANK": query.get("rank", "-1"), "WORLD_SIZE": query.get("world_size", "-1")}
        requested = {name: os.environ.get(name) if value == "-1" else value for name, value in requested.items()}
        requested |= {name: os.environ.get(name) for name in ADDRESS_VARIABLES}
        if requested != world:
            yield from torch_handler(url, **({} if timeout is None else {"timeout": timeout}), **options)
            return
        from fourfold.comm.file_store import GROUP_TIMEOUT_SECONDS, open_file_store

        path, (rank, size) = store_file(os.environ), (int(world["RANK"]), int(world["WORLD_SIZE"]))
        assert path is not None
        yield open_file_store(path, size, GROUP_TIMEOUT_SECONDS), rank, size
        raise RuntimeError("the ranks of a job meet once per attempt, and not with another number of ranks")

    module._rendezvous_handlers["env"] = env_rendezvous
