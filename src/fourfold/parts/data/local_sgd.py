"""Local steps, done: weights drift away from an anchor, each rank's by itself, and come back together.

anchor   the weights that all ranks had alike when they last met
share    of a rank: its part of the loss elements that all ranks have learned from since; shares sum to 1
advance  the mean of all ranks' weights by their shares, less the anchor: what the outer optimizer goes along
Law: after a meeting all ranks have the same weights; with outer_lr 1 and no momentum these are the mean.

Sources: Stich, "Local SGD Converges Fast and Communicates Little" (2018); Lin et al., "Don't Use Large Mini-Batches,
Use Local SGD" (2018); Douillard et al., "DiLoCo" (2023), Alg. 1, with Nesterov's momentum as torch.optim.SGD has it.
Shares: McMahan et al., "Communication-Efficient Learning of Deep Networks" (2017), Alg. 1.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.comm.reduce.local_sgd import LocalSGDTransport
from fourfold.plan.data.buckets import Bucket


class OuterOptimizer(NamedTuple):
    """The outer optimizer: SGD with Nesterov's momentum."""

    lr: float = 1.0
    momentum: float = 0.0

    @property
    def is_mean(self) -> bool:
        """Whether weights become the mean of all ranks', however each of these has come about."""
        return self == OuterOptimizer()


class LocalSGD:
    """What one rank keeps between two meetings. `weights` are flats, one a bucket."""

    def __init__(
        self, weights: Sequence[Tensor], buckets: Sequence[Bucket], transport: LocalSGDTransport, outer: OuterOptimizer
    ) -> None:
        self._weights, self._buckets, self._transport, self._outer = weights, buckets, transport, outer
        self._reference_weights = [memory.allocate_private(len(flat), flat.dtype, flat.device) for flat in weights]
        kept = weights if outer.momentum else []
        self._momenta = [memory.allocate_private(len(flat), flat.dtype, flat.device) for flat in kept]
        self.finish_sync()

    def finish_sync(self) -> None:
        """The weights are the same on all ranks now: as they are at the next step's begin, they are the anchor."""
        self._is_synced = True
        self._local_count = self._global_count = 0.0

    @torch.no_grad()
    def begin_step(self) -> None:
        """A step begins. What was written into the weights since ranks have met is in the anchor too."""
        if not self._is_synced:
            return
        self._is_synced = False
        for anchor, weight in zip(self._reference_weights, self._weights, strict=True):
            anchor.copy_(weight)

    @torch.no_grad()
    def update_reference(self, values: Mapping[str, Tensor]) -> None:
        """All ranks have been given the same new weights, by name: they are in the anchor from now on."""
        for bucket, anchor in zip(self._buckets, self._reference_weights, strict=True):
            for slot in bucket.slots:
                if slot.name in values:
                    anchor[slot.start : slot.stop] = values[slot.name].reshape(-1)

    def add_loss_counts(self, local_count: float, global_count: float) -> None:
        """A step has updated this rank's weights with `own` loss elements, and those of all ranks with `of`."""
        self._local_count, self._global_count = self._local_count + local_count, self._global_count + global_count

    @torch.no_grad()
    def push(self, bucket: int) -> None:
        """Say how far this rank has come. Does not wait."""
        # Where no rank has learned anything, only edits can have moved them.
        share = self._local_count / self._global_count if self._global_count else 1.0 / self._transport.size
        slot = self._transport.grad_buffers[bucket]
        torch.sub(self._weights[bucket], self._reference_weights[bucket], out=slot).mul_(share)
        self._transport.all_reduce_async(bucket)

    @torch.no_grad()
    def pull(self, bucket: int) -> None:
        """Go one outer step from the anchor; waits for all ranks."""
        weight, anchor = self._weights[bucket], self._reference_weights[bucket]
        for start, stop, advance in self._transport.wait_all_reduce(bucket):
            if self._outer.momentum:
                momentum = self._momenta[bucket][start:stop]
                momentum.mul_(self._outer.momentum).add_(advance)
                anchor[start:stop].add_(momentum, alpha=self._outer.lr * self._outer.momentum)
            anchor[start:stop].add_(advance, alpha=self._outer.lr)
        weight.copy_(anchor)

    @property
    def momenta(self) -> dict[str, Tensor]:
        """The outer optimizer's momentum by parameter, flat, the same on all ranks after a meeting; may be empty."""
        pairs = zip(self._buckets, self._momenta, strict=False)
        return {slot.name: flat[slot.start : slot.stop] for bucket, flat in pairs for slot in bucket.slots}

    @torch.no_grad()
    def load_state(self, momenta: Mapping[str, Tensor]) -> None:
        """Put back what `momenta` gave, zeros where nothing is given; and begin from the weights as they are."""
        for name, flat in self.momenta.items():
            if name in momenta:
                flat.copy_(momenta[name].reshape(-1))
            else:
                flat.zero_()
        self.finish_sync()
