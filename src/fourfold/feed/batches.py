"""Batches of a feed: pairs and dicts that know which samples they hold.

Law: a batch is the pair or dict that the source's samples make, in type and contents.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.feed.source_fingerprint import Fingerprint
from fourfold.plan.damaged_samples import DamagedRecord
from fourfold.plan.sample_order import BatchRange


class Batch(tuple):
    """A pair (inputs, targets) with the numbers of its samples, which errors name.

    probe: the fingerprint of the feed's source, on a data rank's first batch if there are several data ranks
    (`feed/source_fingerprint.py`).
    data_seconds: how long the loop over the feed waited for it. bytes_read: what was read for it, if the source counts.
    damaged: the samples that are missing from it.
    """

    samples: BatchRange
    probe: Fingerprint | None = None
    data_seconds: float | None = None
    bytes_read: int | None = None
    damaged: Sequence[DamagedRecord] = ()

    @classmethod
    def wrap(cls, values: Any, samples: BatchRange, damaged: Sequence[DamagedRecord] = ()) -> Any:
        """The pair or dict with the numbers of its samples; other values are returned as they are."""
        if isinstance(values, Mapping):
            batch = DictBatch(values)
        elif type(values) in (tuple, list) and len(values) == 2:
            batch = cls(values)
        else:
            return values
        batch.samples, batch.damaged = samples, damaged
        return batch


class DictBatch(dict[str, Any]):
    """A dict of inputs with the numbers of its samples; see `Batch`."""

    samples: BatchRange
    probe: Fingerprint | None = None
    data_seconds: float | None = None
    bytes_read: int | None = None
    damaged: Sequence[DamagedRecord] = ()
