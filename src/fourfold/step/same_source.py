"""Same source: ranks that feed from sources of their own are refused.

A feed gives each data rank its share of one source. Of a rank's own part it would take that share again: samples would
be left out, and the others trained in an order that no single process has.
Law: where ranks' sources differ in length, or in the sample that is looked at, all ranks raise before a weight moves.

Not found: sources that differ in other samples only, and those whose samples are others each time they are read.
"""

from collections.abc import Sequence

from fourfold.feed.source_fingerprint import Fingerprint, is_same_sample
from fourfold.words.errors import Problem, TaskError

SAME_SOURCE = "the same source on every rank: each takes its share of it"


def check_same_source(probes: Sequence[Fingerprint | None]) -> None:
    """Raise TaskError where ranks have other samples under one number. `probes`: by rank; None where one has none."""
    known = [(rank, probe) for rank, probe in enumerate(probes) if probe is not None]
    for rank, probe in known[1:]:
        first, theirs = known[0]
        if not is_same_sample(theirs, probe):
            got = f"another source on rank {rank} than on rank {first}: the middle sample differs"
            attempt = "the whole source, not a rank's own part of it; samples made at random with a fixed seed"
            raise TaskError(Problem(got, SAME_SOURCE, attempt), where="the source")


def check_same_length(lengths: Sequence[int], name: str) -> None:
    """Raise TaskError where ranks have sources of other lengths."""
    if len(set(lengths)) > 1:
        told = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
        raise TaskError(Problem(f"{name} of {told} samples", SAME_SOURCE, "the whole source"), where="the source")
