"""In a rank of our launcher, env:// uses the job's store file, but only for the job's own process group."""

import importlib
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold.environment.rendezvous import STORE_VARIABLE, store_file
from fourfold.launcher import env_store

WORLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7"}


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's handler of env://, wrapped by ours."""
    for name, value in {**WORLD, STORE_VARIABLE: f"{tmp_path}/store-ab", "TORCHELASTIC_RUN_ID": "ab"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    module = SimpleNamespace(_rendezvous_handlers={"env": lambda url, **_: iter([("theirs", 0, 0)])})
    env_store.register_handler(module)
    return lambda url: next(module._rendezvous_handlers["env"](url))


@pytest.mark.parametrize("url", ["env://", "env://?rank=1&world_size=2", "env://?world_size=2"])
def test_the_process_group_of_the_job_uses_its_store_file(handle: Any, url: str, tmp_path: Path) -> None:
    store, rank, size = handle(url)
    assert (rank, size) == (1, 2)
    store.set("a", "b")
    assert (tmp_path / "store-ab-3").read_bytes().count(b"b") > 0
    assert (tmp_path / "store-ab-3").stat().st_uid == os.getuid()


def test_other_process_groups_use_torchs_own_handler(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert handle("env://?rank=0&world_size=2")[0] == "theirs"
    assert handle("env://?rank=1&world_size=4")[0] == "theirs"
    for name, value in (("MASTER_PORT", "8"), ("MASTER_ADDR", "elsewhere"), ("RANK", "0")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert handle("env://")[0] == "theirs"


def test_torch_takes_the_handler_that_is_registered(
    handle: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # torch's own table: `init_process_group` reads it, and `register_rendezvous_handler` refuses a name that is in it.
    module: Any = importlib.import_module(env_store.RENDEZVOUS_MODULE)
    monkeypatch.setattr(module, "_rendezvous_handlers", dict(module._rendezvous_handlers))
    monkeypatch.setenv("MASTER_PORT", "0")  # torch's own handler takes any free port
    env_store.register_handler(module)
    _, *place = next(module.rendezvous("env://", 1, 2))
    assert place == [1, 2]
    assert (tmp_path / "store-ab-3").exists()
    store, *place = next(module.rendezvous("env://", 0, 1, timeout=timedelta(seconds=20)))
    assert place == [0, 1]
    assert isinstance(store, module.TCPStore)


def test_a_group_does_not_read_keys_of_an_earlier_one(handle: Any) -> None:
    first, _, _ = handle("env://")
    first.set("address", "old")
    second, _, _ = handle("env://")
    assert not second.check(["address"])


def test_a_launcher_started_by_a_rank_does_not_use_the_jobs_store_file() -> None:
    ours = {STORE_VARIABLE: "/tmp/x/store-ab", "TORCHELASTIC_RUN_ID": "ab", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert store_file(ours) == "/tmp/x/store-ab-1"
    assert store_file({**ours, "TORCHELASTIC_RUN_ID": "none"}) is None
    assert store_file({**ours, "TORCHELASTIC_RUN_ID": ""}) is None
    assert store_file({"TORCHELASTIC_RUN_ID": "ab"}) is None
