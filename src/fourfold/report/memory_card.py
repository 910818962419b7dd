"""Memory card: what every rank holds, as the plan predicts it and as it was measured.

Law: what was predicted and what was measured stand next to each other in one unit; what is unknown is a dash.
"""

from collections.abc import Sequence

import msgspec

from fourfold.report.html_table import UNKNOWN, render_row, render_table, render_text
from fourfold.words.units import format_bytes


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank; see `trainer/memory_log.py`."""

    kept_bytes: float
    peak_bytes: float | None = None
    before_bytes: float | None = None
    device_bytes: float | None = None


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement of all ranks after a step. `predicted`: bytes of a rank by kind, None if it is not known."""

    step: int
    ranks: Sequence[RankMemory]
    predicted: dict[str, float] | None = None

    @property
    def largest_peak_bytes(self) -> float | None:
        """The peak of the rank that needs most: on its GPU, or else in the host's memory."""
        on_device = [rank.device_bytes for rank in self.ranks if rank.device_bytes is not None]
        resident = [rank.peak_bytes for rank in self.ranks if rank.peak_bytes is not None]
        return max(on_device or resident, default=None)


def memory_card(memory: MemoryRecord | None) -> str:
    """The card with a row per rank; "" if a run of an older version has not measured its memory."""
    if memory is None:
        return ""
    has_device = any(rank.device_bytes is not None for rank in memory.ranks)
    columns = ["", "predicted", "kept", *(["peak on the GPU"] if has_device else []), "peak", "before the model"]
    predicted = sum(memory.predicted.values()) if memory.predicted is not None else None
    rows = []
    for number, rank in enumerate(memory.ranks):
        measured = [rank.kept_bytes, *([rank.device_bytes] if has_device else []), rank.peak_bytes, rank.before_bytes]
        rows.append(render_row([f"rank {number}", *map(_format, [predicted, *measured])]))
    kinds = " + ".join(f"{name} {format_bytes(num)}" for name, num in (memory.predicted or {}).items())
    notes = [
        f"Measured after step {memory.step:,}.",
        f"Predicted from the plan: {kinds}." if kinds else "",
        "Kept: the same as allocated, plus communication and checkpoint buffers; shared memory counts for the rank "
        "that allocated it. Peak: the largest resident set of the process, including libraries and activations.",
    ]
    note = f'<p class="note">{render_text(" ".join(filter(None, notes)))}</p>'
    return f"<h2>Memory of each rank</h2>{render_table(columns, rows, style='memory')}{note}"


def _format(num_bytes: float | None) -> str:
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)
