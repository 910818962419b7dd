"""Wait watch: a thread that says on the progress line what the ranks of this host wait for, while no step ends.

Law: it shows what ranks know (`environment/known_waits.py`), and only once a wait has lasted a while.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from fourfold.environment.known_waits import waiting_for
from fourfold.parts.torch_dispatch import compilations_noted
from fourfold.trainer.heartbeat import Heartbeat
from fourfold.trainer.progress import format_duration
from fourfold.trainer.run_logger import RunLogger

POLL_SECONDS = 1.0
SHOWN_SECONDS = 3.0  # shorter waits are no news


@contextlib.contextmanager
def waits_shown(heartbeat: Heartbeat, logger: RunLogger) -> Iterator[None]:
    """Within: the logger is told of waits, on the rank that shows the progress."""
    if not logger.shows_progress:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            if text := wait_text(heartbeat, time.monotonic()):
                logger.show_wait(text)

    thread = threading.Thread(target=watch, name="fourfold waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def compilations_known() -> Iterator[None]:
    """Within: what `torch.compile` takes, in whichever step, is a known wait."""
    waits = contextlib.ExitStack()

    def begin() -> None:
        waits.enter_context(waiting_for("torch.compile"))

    with compilations_noted(begin, waits.close):
        yield


def wait_text(heartbeat: Heartbeat, now: float) -> str:
    """What is waited for, by which rank of this host and how long; "" while steps end, or no rank knows."""
    if now - heartbeat.phase_start < SHOWN_SECONDS:
        return ""
    waits = {index: wait for index, wait in heartbeat.waits().items() if now - wait.since >= SHOWN_SECONDS}
    if not waits:
        return ""
    index, wait = min(waits.items(), key=lambda each: each[1].since)
    who = f"rank {index} waits" if heartbeat.num_ranks > 1 else "waits"
    return f"{who} {format_duration(now - wait.since)} for {wait.what}"
