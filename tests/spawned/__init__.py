"""Spawned tests: real processes, launchers and hosts.

SOURCE  the folder from which this process imports fourfold, for the processes that it starts. Where fourfold is
        installed, it is compiled there: from a checkout, each process would compile it again.
"""

from pathlib import Path

import fourfold

SOURCE = Path(fourfold.__file__).parents[1]
