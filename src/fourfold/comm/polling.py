"""Waiting for a value in shared memory that another process writes.

Law: a wait ends when the value has come, else when its `check` raises: a peer has died, or the time limit has passed.

A wait first spins, because most values come within microseconds; then yields the core; then sleeps, so that a rank
that waits long leaves its core to the others.
"""

import os
import time
from collections.abc import Callable

from fourfold.comm.meter import CommMeter
from fourfold.words.errors import FourfoldError

NUM_SPINS = 200
YIELD_SECONDS = 0.002
POLL_SECONDS = 0.0002
LIVENESS_CHECK_SECONDS = 0.05


def wait_until(is_reached: Callable[[], bool], check: Callable[[float], None], meter: CommMeter) -> None:
    """Wait until `is_reached()`. A wait for which spinning is enough is not counted.

    `check(seconds waited so far)` is called every LIVENESS_CHECK_SECONDS and raises if the wait is in vain.
    """
    for _ in range(NUM_SPINS):
        if is_reached():
            return
    begin = last_check = time.perf_counter()
    with meter.timed():
        while not is_reached():
            now = time.perf_counter()
            if now - begin < YIELD_SECONDS:
                os.sched_yield()
                continue
            time.sleep(POLL_SECONDS)
            if now - last_check > LIVENESS_CHECK_SECONDS:
                last_check = now
                try:
                    check(now - begin)
                except FourfoldError:
                    if not is_reached():  # else the peer has written the value, and then ended
                        raise
