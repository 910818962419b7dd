"""Stack texts: where a process is."""

import os

MAX_FRAMES = 6  # frames that are shown
COMM_PATH = os.path.join("fourfold", "parts", "comm") + os.sep
