"""Laws of ranks as threads: what they share as threads, and processes do not, does not show."""

import subprocess
import sys

READ_STATES = """
import gc, time
import torch
from fourfold.testing import threads

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)  # another thread runs

def body(comm):
    for _ in range(5000):
        Cycle()
        torch.get_rng_state()

gc.set_threshold(50)
threads.run(2, body)
assert gc.isenabled()
"""


def test_ranks_may_read_the_state_of_the_generator_while_others_do():
    """Without the collector paused, both wait for each other, with Python's own lock held: so in another process."""
    subprocess.run([sys.executable, "-c", READ_STATES], check=True, timeout=60)
