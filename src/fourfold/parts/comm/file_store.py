"""File store: where the ranks of one host meet, in a file that only this user may open.

It stands alone, and imports torch only: every script of `fourfold run` that makes a process group comes here, and need
not import all of `parts.comm` (0.2 to 0.5 s on a busy machine).
"""

from collections import Counter
from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

GROUP_TIMEOUT_SECONDS = (
    1800.0  # for the ranks of our own launcher, which watches them: as torch has it for process groups
)

_num_openings: Counter[str] = Counter()


def open_file_store(path: str, size: int, timeout_seconds: float) -> Store:
    """The store in a file, which torch removes when the last of `size` ranks has let go of it.

    seconds: how long a rank waits there for what another one is to write.
    Each opening of a process sees its own keys: what an earlier process group has left is not read by the next.
    """
    _num_openings[path] += 1
    store = PrefixStore(str(_num_openings[path]), FileStore(path, size))
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store
