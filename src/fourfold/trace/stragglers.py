"""Stragglers: ranks for which the others wait, step after step.

busy       seconds of a step that a rank spends on its own work, by phase; neither waiting for other ranks is part of
           it, nor the time in which others had the processors
straggler  a rank that is busy for more than STRAGGLER_FACTOR times the median of the others, and for at least
           MIN_EXCESS_SECONDS longer
others     the ranks that do the same work on other samples and tokens: those that differ on dp and cp only
segment    of the steps that are judged together; a straggler is one in each of them
Law: a rank is judged by its typical step, so neither a slow step nor a processor that others use makes a straggler.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high

from fourfold.words.mesh import Mesh

STRAGGLER_FACTOR = 1.5
MIN_EXCESS_SECONDS = 0.002  # smaller differences are noise of the system


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait.

    seconds        per step that it is busy; `others_seconds`: that the others are
    place          the phase of the step in which it loses most; `place_seconds`, `others_place_seconds`: spent there
    The field names are keys of the log on disk.
    """

    rank: int
    seconds: float
    others_seconds: float
    place: str
    place_seconds: float
    others_place_seconds: float

    def describe(self, host: str) -> str:
        """The warning for a user; `host` is the host of the rank."""
        there = f"{self.place} takes {_ms(self.place_seconds)}, on the others {_ms(self.others_place_seconds)}"
        busy = f"busy for {_ms(self.seconds)} a step, the others for {_ms(self.others_seconds)}"
        return f"rank {self.rank} on {host} is a straggler: {busy}; {there}"


def median_step_seconds(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Busy seconds of one rank's typical step: by phase, the median over the steps."""
    rows = list(steps)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: median(row.get(name, 0.0) for row in rows) for name in names}


def find_steady_stragglers(segments: Sequence[Sequence[Mapping[str, float]]], mesh: Mesh) -> list[Straggler]:
    """The stragglers of all segments, in rank order, as they are in the last one. `segments`: see `find_stragglers`."""
    *earlier, last = [find_stragglers(busy, mesh) for busy in segments]
    ranks = [{each.rank for each in found} for found in earlier]
    return [each for each in last if all(each.rank in found for found in ranks)]


def find_stragglers(busy: Sequence[Mapping[str, float]], mesh: Mesh) -> list[Straggler]:
    """The stragglers, in rank order. `busy`: by rank, the typical step as `median_step_seconds` gives it."""
    stragglers = []
    for rank, row in enumerate(busy):
        total = sum(row.values())
        others = [busy[other] for other in mesh.peers(rank, "dp", "cp") if other != rank]
        if not others:
            continue
        # The higher of two middle values: at most half of the ranks can be stragglers.
        usual = median_high(sum(other.values()) for other in others)
        if total <= STRAGGLER_FACTOR * usual or total - usual < MIN_EXCESS_SECONDS:
            continue
        others_row = {name: median(other.get(name, 0.0) for other in others) for name in row}
        phase = max(row, key=lambda name: row[name] - others_row[name])
        stragglers.append(Straggler(rank, total, usual, phase, row[phase], others_row[phase]))
    return stragglers


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
