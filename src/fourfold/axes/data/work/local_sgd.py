"""Local SGD: each rank trains its own weights for some steps, then the weights of all ranks are averaged.

reference weights  the weights of all ranks after the last synchronization
sample weight      of a rank: its fraction of the loss elements that all ranks trained on since; they sum to 1
pseudo-gradient    the mean of the ranks' weights, by sample weight, minus the reference: what the outer optimizer uses
Law: after a synchronization all ranks have the same weights. With outer_lr 1 and no momentum they are the mean.

Sources: Stich, "Local SGD Converges Fast and Communicates Little" (2018); Lin et al., "Don't Use Large Mini-Batches,
Use Local SGD" (2018); Douillard et al., "DiLoCo" (2023), Alg. 1, with Nesterov's momentum as in torch.optim.SGD.
Sample weights: McMahan et al., "Communication-Efficient Learning of Deep Networks" (2017), Alg. 1.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.reduce.group import LocalSGDReducer
from fourfold.torch_kit import memory
from fourfold.torch_kit.tensor_reader import TensorReader


class OuterOptimizer(NamedTuple):
    """The outer optimizer: SGD with Nesterov's momentum."""

    lr: float = 1.0
    momentum: float = 0.0

    @property
    def edit_loss_reason(self) -> str:
        """None if a synchronization sets the weights to their mean over ranks, whatever the reference is."""
        reason = "the outer step would not see what is written between two averages of the weights"
        return "" if self == OuterOptimizer() else reason


class LocalSGD:
    """One rank's state between two synchronizations. `weights` are flats, one per bucket."""

    def __init__(
        self, weights: Sequence[Tensor], buckets: Sequence[Bucket], reducer: LocalSGDReducer, outer: OuterOptimizer
    ) -> None:
        self._weights, self._buckets, self._reducer, self._outer = weights, buckets, reducer, outer
        self._reference_weights = [memory.allocate_private(len(flat), flat.dtype, flat.device) for flat in weights]
        with_momentum = weights if outer.momentum else []
        self._momenta = [memory.allocate_private(len(flat), flat.dtype, flat.device) for flat in with_momentum]
        self.finish_sync()

    def finish_sync(self) -> None:
        """All ranks have the same weights now. As they are when the next step begins, they become the reference."""
        self._is_synced = True
        self._local_count = self._global_count = 0.0

    @torch.no_grad()
    def begin_step(self) -> None:
        """Begin a step; in the first since a synchronization, copy the weights, with their edits, to the reference."""
        if not self._is_synced:
            return
        self._is_synced = False
        for reference, weight in zip(self._reference_weights, self._weights, strict=True):
            reference.copy_(weight)

    @torch.no_grad()
    def update_reference(self, values: Mapping[str, Tensor]) -> None:
        """Copy new weights, the same on all ranks, into the reference."""
        for bucket, reference in zip(self._buckets, self._reference_weights, strict=True):
            for slot in bucket.slots:
                if slot.name in values:
                    reference[slot.start : slot.stop] = values[slot.name].reshape(-1)

    def add_loss_counts(self, local_count: float, global_count: float) -> None:
        """Count the loss elements that a step has trained this rank's weights on, and all ranks' weights."""
        self._local_count, self._global_count = self._local_count + local_count, self._global_count + global_count

    @torch.no_grad()
    def push(self, bucket: int) -> None:
        """Start to reduce this rank's part of the pseudo-gradient. Does not wait."""
        # If no rank has trained on anything, only edits can have changed weights.
        sample_weight = self._local_count / self._global_count if self._global_count else 1.0 / self._reducer.size
        buffer = self._reducer.grad_buffers[bucket]
        torch.sub(self._weights[bucket], self._reference_weights[bucket], out=buffer).mul_(sample_weight)
        self._reducer.all_reduce_async(bucket)

    @torch.no_grad()
    def pull(self, bucket: int) -> None:
        """Make one outer step from the reference weights. Waits for all ranks."""
        weight, reference = self._weights[bucket], self._reference_weights[bucket]
        for start, stop, pseudo_gradient in self._reducer.wait_all_reduce(bucket):
            if self._outer.momentum:
                momentum = self._momenta[bucket][start:stop]
                momentum.mul_(self._outer.momentum).add_(pseudo_gradient)
                reference[start:stop].add_(momentum, alpha=self._outer.lr * self._outer.momentum)
            reference[start:stop].add_(pseudo_gradient, alpha=self._outer.lr)
        weight.copy_(reference)

    @property
    def momenta(self) -> dict[str, Tensor]:
        """The outer optimizer's momentum by parameter, flat, equal on all ranks after `pull`; may be empty."""
        pairs = zip(self._buckets, self._momenta, strict=False)
        return {slot.name: flat[slot.start : slot.stop] for bucket, flat in pairs for slot in bucket.slots}

    @torch.no_grad()
    def load_state(self, momenta: Mapping[str, TensorReader]) -> None:
        """Load what `momenta` gave, 0 for what is missing, and continue from the current weights."""
        for name, flat in self.momenta.items():
            if name in momenta:
                flat.copy_(momenta[name].read(0, flat.numel()))
            else:
                flat.zero_()
        self.finish_sync()
