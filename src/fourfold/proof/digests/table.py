"""Digests: what ranks hash and compare. One table says which of them must have the same, or must not, and when.

kind    what is hashed: the model, the plan, a batch, the weights …
item    a name and a text, such as ("microbatches", "4"): what a kind that is compared in text consists of
groups  the ranks that have the same of something
Law: ranks compare digests first, all of them in the same collective. If digests show that a row of the table is broken,
every rank raises the same error, which names the groups and what differs between them.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from fourfold.comm.communicator import Communicator
from fourfold.words.errors import DivergenceError, FourfoldError, PlanError, Problem, SettingError, TaskError
from fourfold.words.rank_groups import format_groups

Item = tuple[str, str]

DIGEST_BITS = 62  # fits an int64, which every transport carries
MAX_SHOWN = 5  # items that differ
NOTHING = "nothing"


class Row(NamedTuple):
    """The error of what is not as it must be: `where`, `need` and `attempt` are its words."""

    error: type[FourfoldError]
    where: str
    need: str
    attempt: str = ""


_EVERY_RANK, _THE_RANKS = "the same on every rank", "the ranks"

TABLE: Mapping[str, Row] = {
    # All ranks agree, at the build, before anything else is sent.
    "call": Row(PlanError, _THE_RANKS, "the same call on every rank"),
    "versions": Row(PlanError, _THE_RANKS, _EVERY_RANK, "one environment for all ranks"),
    "plan": Row(PlanError, _THE_RANKS, _EVERY_RANK, "one plan for all ranks"),
    "options": Row(PlanError, _THE_RANKS, _EVERY_RANK, "the same arguments"),
    "model": Row(PlanError, "the models of the ranks", _EVERY_RANK, "a model made in the same way on every rank"),
    "loss": Row(PlanError, "the losses of the ranks", _EVERY_RANK, "one loss"),
    "optimizer": Row(
        PlanError, "the optimizers of the ranks", _EVERY_RANK, "an optimizer made in the same way on every rank"
    ),
    # Data ranks agree, at the first batch of a feed or of a validation.
    "source": Row(
        TaskError,
        "the source",
        "the same source on every rank: the feed gives each rank its part",
        "the whole source, not a rank's own part of it; random samples with a fixed seed",
    ),
    # Ranks that work on the same samples agree, at every batch.
    "batch": Row(
        TaskError,
        "the batch",
        "the same batch on each of these ranks: they work on the same samples",
        "ff.Feed(dataset, plan, batch_size=…), or ff.shard(loader, plan)",
    ),
    # Data ranks differ, at every batch until two have differed.
    "samples": Row(
        TaskError,
        "the batches",
        "different samples on each data rank",
        'ff.Feed(dataset, batch_size=…), ff.shard(loader), or same_batches="allow"',
    ),
    # Ranks that hold the same weights or buffers agree, after the first step, every `drift_check` steps, at the end.
    "weights": Row(
        DivergenceError,
        "the weights",
        "the same bits on every rank that holds a weight",
        "the same seeds, hooks and edits on every rank; weights changed by hand inside step.edit()",
    ),
    # All ranks agree, in `Checkpoints.save()`.
    "saved values": Row(
        SettingError, "save()", _EVERY_RANK, "step.all_gather_json(value), which gives all ranks' values"
    ),
}


def digest(value: Any) -> int:
    """DIGEST_BITS bits of a JSON value, the same in every process."""
    return digest_bytes(json.dumps(value).encode())


def digest_bytes(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> (64 - DIGEST_BITS)


def check_same_items(ranks: Communicator, kinds: Mapping[str, Iterable[Item]]) -> None:
    """Raise the error of the first kind whose items differ between the ranks, on every rank. Collective.

    All kinds are compared in one exchange of a length that no value changes; items are sent only if digests differ.
    """
    items = {kind: list(each) for kind, each in kinds.items()}
    digests = ranks.all_gather_json([f"{digest(each):016x}" for each in items.values()])
    for index, (kind, own) in enumerate(items.items()):
        if len({row[index] for row in digests}) > 1:
            by_rank = dict(zip(ranks.ranks, ranks.all_gather_json(own), strict=True))
            row = TABLE[kind]
            raise row.error([Problem(got, row.need, row.attempt) for got in _differences(by_rank)], where=row.where)


def _differences(by_rank: Mapping[int, Sequence[Sequence[str]]]) -> list[str]:
    """What differs, in words: the items of other values, or if their names differ too, the first that differs."""
    places = itertools.zip_longest(*by_rank.values(), fillvalue=("", NOTHING))
    differing = [dict(zip(by_rank, place, strict=True)) for place in places if len(set(map(tuple, place))) > 1]
    has_same_names = all(len({name for name, _ in place.values()}) == 1 for place in differing)
    shown = differing[: MAX_SHOWN if has_same_names else 1]
    texts = [
        format_groups({rank: f"{name} = {value}" if name else value for rank, (name, value) in place.items()})
        for place in shown
    ]
    if has_same_names and len(differing) > len(shown):
        texts[-1] += f"; and {len(differing) - len(shown)} more differ"
    return texts
