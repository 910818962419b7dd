"""Batches of a feed: pairs and dicts that know which samples they hold, and how they get to the device that trains.

start   in the thread that reads ahead: begin to bring a batch to the device
finish  in the thread that trains: what the step gets
Law: a batch is the pair or dict that the source's samples make, in type and contents; on the device it has the values
that were read, and the device never waits for a copy that could have been made before.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.feed.sample_rng import Fingerprint
from fourfold.feed.source import map_leaves, pin_batch
from fourfold.orders.sample_order import BatchRange
from fourfold.plan.damaged_samples import DamagedRecord

# ---- what they hold --------------------------------------------------------------------------------------------------


class Batch(tuple):
    """A pair (inputs, targets) with the numbers of its samples, which errors name.

    probe: the fingerprint of the feed's source, on a data rank's first batch if there are several data ranks
    (`feed/sample_rng.py`).
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


# ---- how they get to the device --------------------------------------------------------------------------------------


class DeviceBatches(Protocol):
    """How batches get to a device."""

    def start(self, batch: Any) -> Any: ...

    def finish(self, started: Any) -> Any: ...


class HostBatches:
    """Batches stay in the host's memory, as they were read."""

    def start(self, batch: Any) -> Any:
        return batch

    def finish(self, started: Any) -> Any:
        return started


HOST_BATCHES = HostBatches()


class PinnedBatches:
    """Batches in pinned host memory, from which the step copies while the GPU computes."""

    def start(self, batch: Any) -> Any:
        return _with_leaves(batch, pin_batch(_plain(batch)))

    def finish(self, started: Any) -> Any:
        return started


class _Copying(NamedTuple):
    """A batch whose copy was begun. `pinned`: what it is copied from, kept until it is done."""

    batch: Any
    values: Any
    pinned: Any
    event: Any


class CopiedBatches:
    """Batches on the GPU, copied from pinned memory by a stream of their own while steps before them compute.

    So many batches are on the GPU as are read ahead (`feed/reading.py`). `cuda`: torch.cuda.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)

    def start(self, batch: Any) -> _Copying:
        """Begin to copy a batch."""
        pinned = pin_batch(_plain(batch))
        with self._cuda.stream(self._stream):
            values = map_leaves(pinned, self._copy)
            event = self._stream.record_event()
        return _Copying(batch, values, pinned, event)

    def finish(self, started: _Copying) -> Any:
        """The batch on the GPU; the work that is launched from now on waits for its copy."""
        current = self._cuda.current_stream(self._device)
        current.wait_event(started.event)
        # The memory was allocated on the copy stream: it is not to be given away before the step is done with it.
        map_leaves(started.values, lambda leaf: _record(leaf, current))
        return _with_leaves(started.batch, started.values)

    def _copy(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


def device_batches(device: torch.device, *, compares: bool) -> DeviceBatches:
    """How batches get to a device. `compares`: whether a step first compares them between ranks, on the host."""
    if device.type != "cuda":
        return HOST_BATCHES
    return PinnedBatches() if compares else CopiedBatches(device)


def _record(leaf: Any, stream: Any) -> None:
    if isinstance(leaf, Tensor):
        leaf.record_stream(stream)


def _plain(batch: Any) -> Any:
    """The values of a batch without what it knows of its samples."""
    return dict(batch) if isinstance(batch, dict) else tuple(batch) if isinstance(batch, tuple) else batch


def _with_leaves(batch: Any, values: Any) -> Any:
    """A batch of other values, with what the first one knows of its samples."""
    if not hasattr(batch, "__dict__"):
        return values
    result = type(batch)(values)
    vars(result).update(vars(batch))
    return result
