"""File lock: whether a process of this machine has locked a file, found out without locking it.

Law: asking takes no lock: the process that is about to take it is not refused.
"""

from pathlib import Path

PROC_LOCKS = Path("/proc/locks")


def is_locked(path: Path) -> bool | None:
    """Whether a process has locked the file with `flock`; None if the system does not say. Raises OSError.

    Locks of other machines, on a shared file system, are not seen.
    """
    inode = str(path.stat().st_ino)
    try:
        lines = PROC_LOCKS.read_text().splitlines()
    except OSError:
        return None
    # "1: FLOCK  ADVISORY  WRITE 703 08:01:1234 0 EOF". The device is not compared: on btrfs and overlays it is not the
    # file's. A line with an arrow is a process that waits for the lock.
    fields = (line.split() for line in lines)
    return any(
        len(each) > 5 and each[1] == "FLOCK" and each[3] == "WRITE" and each[5].rpartition(":")[2] == inode
        for each in fields
    )
