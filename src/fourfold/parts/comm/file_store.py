"""File store: a torch.distributed store in a file that only this user may open, for the ranks of one host.

It stands alone, and imports torch only: every script of `fourfold run` that makes a process group needs it, and need
not import all of `parts.comm` (0.2 to 0.5 s on a busy machine).
"""

from collections import Counter
from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

# For the ranks of our own launcher, which watches them; torch's own limit for process groups.
GROUP_TIMEOUT_SECONDS = 1800.0

_num_openings: Counter[str] = Counter()


def open_file_store(path: str, size: int, timeout_seconds: float) -> Store:
    """The store in a file, which torch removes when the last of `size` ranks has released it.

    `timeout_seconds`: how long a rank waits for a key that another rank writes.
    Each opening by a process has keys of its own, so a process group never reads those of an earlier one.
    """
    _num_openings[path] += 1
    store = PrefixStore(str(_num_openings[path]), FileStore(path, size))
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store
