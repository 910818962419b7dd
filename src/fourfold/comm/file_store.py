"""File store: a torch.distributed store in a file, for the ranks of one host. Its folder admits only this user.

Law: of packages, this file imports torch only. Scripts of `fourfold run` that make a process group need it, and to
import all of `comm` would cost 0.2 to 0.5 s on a busy machine.
"""

from collections import Counter
from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

# torch's own limit for process groups. Our launcher watches its ranks, so they need no shorter one.
GROUP_TIMEOUT_SECONDS = 1800.0

_num_openings: Counter[str] = Counter()


def open_file_store(path: str, size: int, timeout_seconds: float) -> Store:
    """Open the store at `path`. torch removes the file when the last of `size` ranks has released it.

    `timeout_seconds`: how long a rank waits for a key that another rank writes.
    Keys have the number of the opening as prefix, so a process group never reads the keys of an earlier one.
    """
    _num_openings[path] += 1
    store = PrefixStore(str(_num_openings[path]), FileStore(path, size))
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store
