"""Stacks: what the innermost frames of a rank's main thread say about it."""

import itertools
import os
from collections.abc import Iterable

MAX_FRAMES = 6  # innermost frames that are shown and judged
COMM_PATH = os.path.join("fourfold", "parts", "comm") + os.sep


def waits_for_peers(frames: Iterable[str]) -> bool:
    """Whether a rank waits for other ranks: a frame lies in fourfold.parts.comm.

    `frames`: texts that name each frame's file, innermost first; only the first MAX_FRAMES are judged.
    """
    return any(COMM_PATH in frame for frame in itertools.islice(frames, MAX_FRAMES))
