"""Simulated tests: ranks are threads of one process, of which one at a time holds Python's lock."""

import gc
import importlib
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _stay_on_one_core() -> Iterator[None]:
    """On several cores the threads of a test take half as long again: each time, the lock wakes another core.

    Each of pytest's processes has a core of its own.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture(autouse=True, scope="session")
def _freeze_imported_objects() -> None:
    """Torch alone makes half a million objects, through which every full garbage collection would go.

    Half of them are of torch._dynamo, which the first step of an optimizer of torch imports: here that of an oracle.
    """
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe the task, which saves a third of a short training: for tests of what other parts of a step do.

    The law of training makes the dry run with every value of every field.
    """
    for check in ("axes.data.attach.check.ForwardCheck", "axes.tensor.attach.check.TensorCheck"):
        monkeypatch.setattr(f"fourfold.{check}.is_needed", lambda _, *, training: False)
