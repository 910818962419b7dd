"""Same source: training is refused if ranks feed from different data sources.

A feed gives each data rank its part of one source. If a rank's source were only that rank's part of the data, the feed
would take a part of the part: samples would be left out, and the others trained in an order that no single process has.

Law: if the ranks' sources differ in length, or in the one sample that is compared, all ranks raise before any weight
changes.

Not found: sources that differ only in other samples, and sources whose samples change with each read.
"""

from collections.abc import Sequence

from fourfold.feed.source_fingerprint import Fingerprint, is_same_sample
from fourfold.words.errors import Problem, TaskError

SAME_SOURCE = "the same source on every rank: the feed gives each rank its part"


def check_same_source(probes: Sequence[Fingerprint | None]) -> None:
    """Raise TaskError if ranks have different samples at one index. `probes`: by rank; None where a rank has none."""
    known = [(rank, probe) for rank, probe in enumerate(probes) if probe is not None]
    for rank, probe in known[1:]:
        first_rank, first_probe = known[0]
        if not is_same_sample(first_probe, probe):
            got = f"another source on rank {rank} than on rank {first_rank}: one and the same sample differs"
            attempt = "the whole source, not a rank's own part of it; random samples with a fixed seed"
            raise TaskError(Problem(got, SAME_SOURCE, attempt), where="the source")


def check_same_length(lengths: Sequence[int], name: str) -> None:
    """Raise TaskError if the ranks' sources differ in length."""
    if len(set(lengths)) > 1:
        shown = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
        raise TaskError(Problem(f"{name} of {shown} samples", SAME_SOURCE, "the whole source"), where="the source")
