"""Worlds shared by all spawned tests: one of each size a session; the reason to skip tests marked `hosts`."""

import functools
import gc
import itertools
import operator
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fourfold.testing import network_namespaces
from fourfold.testing.process_world import SpawnedWorld

# Machines are shared: how long an example takes, or takes to draw, says nothing. The same examples in every run: a
# submission is not to fail by one that it has not changed. HYPOTHESIS_PROFILE=search looks for new ones, and for more.
ALWAYS: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("fourfold", derandomize=True, max_examples=30, **ALWAYS)
hypothesis.settings.register_profile("search", **ALWAYS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fourfold"))

ROOT = Path(__file__).parent.parent
# Tests compare messages as they are before they are wrapped; `tests/pure/test_text.py` wraps some itself.
os.environ["COLUMNS"] = "1000"
# Hundreds of processes are started: without this each would compile all files of Fourfold again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], SpawnedWorld]]:
    """`world(4).run("tests.spawned.rank_functions:name", …)`"""
    worlds: dict[int, SpawnedWorld] = {}

    def world_of_size(size: int) -> SpawnedWorld:
        return worlds.setdefault(size, SpawnedWorld(size, root=ROOT))

    yield world_of_size
    for each in worlds.values():
        each.kill()


@pytest.fixture(autouse=True)
def _check_signal_handlers() -> Iterator[None]:
    """Each test begins with Python's own handlers and leaves them: a signal that one sends is not to end the tests.

    A shell without job control starts what it leaves in the background with SIGINT ignored.
    """
    default = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in default.items()}
    yield
    left = [number.name for number, handler in default.items() if signal.getsignal(number) is not handler]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not left, f"a handler was left behind of {', '.join(left)}"


@pytest.fixture(autouse=True)
def _reset_torch() -> Iterator[None]:
    """Each test begins with one thread of torch, and ends with a compiler that compiles.

    A test of small tensors gains nothing from a second thread, and loses much where two tests run at once. Threads
    that tell the compiler not to compile for a while may leave it so.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.set_stance("default")


def is_wanted(item: pytest.Item) -> bool:
    """Whether a case is run: of a test marked `covering`, a few that have every value of every `parametrize`.

    Of two, the value of the shorter follows from that of the longer; of more, those of all but the two longest do,
    so that each pair of values is in some case.
    """
    if item.get_closest_marker("covering") is None:
        return True
    factors = [_length_and_index(mark, item) for mark in item.iter_markers("parametrize")]
    (_, first), (length, second), *others = sorted(factors, key=lambda factor: -factor[0])
    if not others:
        return second == first % length
    return all(index == (first + number * second) % size for number, (size, index) in enumerate(others, start=1))


def _length_and_index(mark: pytest.Mark, item: pytest.Item) -> tuple[int, int]:
    """How many values a `parametrize` has, and which of them is the item's."""
    names, values = mark.args[0], list(mark.args[1])
    params = item.callspec.params  # type: ignore[attr-defined]
    if isinstance(names, str):
        return len(values), next(i for i, value in enumerate(values) if value is params[names])
    own = [params[name] for name in names]
    return len(values), next(i for i, row in enumerate(values) if all(map(operator.is_, row, own)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of pytest's processes begins with spawned tests, and goes on to simulated ones, which the others may take.

    At the end of the list they would wait for one another. Those that share worlds run in one process.
    """
    items[:] = filter(is_wanted, items)
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_workers == 1:
        return
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name == "spawned":
            modules.setdefault(item.path, []).append(item)
    first: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    others = itertools.cycle(range(num_workers - 1))
    for path in sorted(modules, key=lambda path: -path.stat().st_size):
        uses_world = any("world" in getattr(item, "fixturenames", ()) for item in modules[path])
        first[-1 if uses_world else next(others)] += modules[path]
    rest = iter([item for item in items if item.path not in modules])
    share = -(-len(items) // num_workers)  # pytest-xdist gives each process as many, in this order
    items[:] = [item for part in first for item in (*part, *itertools.islice(rest, max(0, share - len(part))))]


def pytest_unconfigure() -> None:
    """Collect garbage once. Pytest does so five times at the end, each through all that this process has imported."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hosts") and (reason := _hosts_skip_reason()):
        pytest.skip(reason)


_hosts_skip_reason = functools.cache(network_namespaces.unavailable_reason)
