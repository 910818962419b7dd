"""Measurement: memory and processor time as the kernel counts them, the machine and tables as text.

PSS  proportional set size: a page shared by n processes counts 1/n in each, so a sum over ranks counts it once
Law: nothing here runs inside the process that it measures.
"""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fourfold.words.terminal_text import align_columns

MB = 1_000_000


@dataclass
class PeakMemory:
    """The largest sum over processes so far; `own_bytes` leaves out files, such as libraries."""

    pss_bytes: int = 0
    own_bytes: int = 0
    samples: int = 0

    def sample(self, pids: Sequence[int]) -> None:
        totals = [_read_smaps_rollup(pid) for pid in pids]
        self.pss_bytes = max(self.pss_bytes, sum(total["Pss"] for total in totals))
        self.own_bytes = max(self.own_bytes, sum(total["Pss_Anon"] + total["Pss_Shmem"] for total in totals))
        self.samples += 1


def _read_smaps_rollup(pid: int) -> dict[str, int]:
    """Sizes in bytes of /proc/PID/smaps_rollup by name."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(size.split()[0]) * 1024 for name, size in (line.split(":") for line in lines)}


def machine_cpu_seconds() -> float:
    """Processor seconds that this machine has spent, including time that its host has stolen."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def describe_machine() -> str:
    """Cores, processor, memory, versions, date, load: a figure means little without them."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = [
        f"{os.cpu_count()} cores",
        names[0] if names else platform.processor() or platform.machine(),
        f"{memory_bytes / 2**30:.0f} GiB",
        f"torch {version('torch')}",
        f"Python {platform.python_version()}",
        time.strftime("%Y-%m-%d %H:%M"),
        "load " + " ".join(f"{load:.2f}" for load in os.getloadavg()),
    ]
    return " · ".join(facts)


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows under a first row of titles, aligned: the first column to the left, the others to the right."""
    return "\n".join(f"  {line}" for line in align_columns(rows, "<" + ">" * (len(rows[0]) - 1)))
