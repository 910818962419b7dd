"""Forward fusion: updates that wait until the next forward uses the weights.

pending  a bucket whose gradients of the last step are reduced, and whose weights are not updated yet
due      a bucket that is about to be used: it is updated now, together with all buckets before it in the order
missed   a bucket that forward used without a report of the access
Law: every use of a weight sees the updated weight. All ranks update in the same order, whatever the order in which
each of them uses its buckets.

The order is the same because ranks of a host share weights: before a rank uses a bucket, it waits for the shards of it
that the other ranks update. A rank that updates all buckets up to the one it waits for never keeps another rank waiting
for longer than its own forward.

Source: Jiang, Gu, Liu, Zhu, Pan, "Optimizer Fusion" (2021): forward fusion.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from fourfold.parts.comm.reduce.protocol import DataTransport
from fourfold.parts.data.param_access import ParamAccess, outside_transforms
from fourfold.parts.data.sharded_params import ShardedParams
from fourfold.words.errors import Problem, TrainingError


class DeferredUpdates:
    """The updates of one step, run in the forward of the next step, or when `flush` is called."""

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        transport: DataTransport,
        update: Callable[[int], None],
        *,
        sharded_params: ShardedParams | None = None,
    ) -> None:
        """`parameters` are by bucket; `update(bucket)` updates a bucket, or this rank's shard of it.

        With sharded parameters, the unshards are reported instead of the accesses.
        """
        self._parameters, self._transport, self._update = parameters, transport, update
        self._param_access = None
        if sharded_params is None:
            self._param_access = ParamAccess(parameters, self._before_access)
        else:
            sharded_params.before_unshard = self._before_unshard
        self._device_type = parameters[0][0].device.type
        self._order: Sequence[int] = ()
        self._position: dict[int, int] = {}
        self._num_updated, self._num_ready = 0, 0
        self._in_forward, self._was_accessed = False, [True] * len(parameters)

    @property
    def has_pending(self) -> bool:
        """Whether updates are pending."""
        return len(self._order) > 0

    def defer(self, order: Sequence[int]) -> None:
        """Make the updates of all buckets pending, to run in this order, which is the same on every rank."""
        self._order = list(order)
        self._position = {bucket: position for position, bucket in enumerate(order)}
        self._num_updated, self._num_ready = 0, 0
        self._set_listening(True)

    def begin_step(self) -> None:
        """Begin a step. While no update is pending, an access without a report is harmless."""
        self._was_accessed = [True] * len(self._parameters)

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Inside, an access runs the updates that are due; at the end no update is pending."""
        self._was_accessed = [not self.has_pending or self._param_access is None] * len(self._parameters)
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False
        self.flush()

    def flush(self) -> None:
        """Run the pending updates. With weights shared on a host, returns when all its ranks have."""
        if not self.has_pending:
            return
        self._update_up_to(len(self._order) - 1)
        self._order = ()
        self._set_listening(False)
        self._transport.end_step()

    def check_missed_accesses(self, first_reached: Callable[[int], str | None]) -> None:
        """Raise TrainingError if backward has reached a bucket and forward reported no access to it.

        `first_reached(bucket)` names a parameter of the bucket that has a gradient, or is None.
        """
        missed = [
            name
            for bucket, was_accessed in enumerate(self._was_accessed)
            if not was_accessed and (name := first_reached(bucket))
        ]
        if missed:
            got = f"a use of {missed[0]} that torch did not report: forward used the weights before their update"
            need = "no torch.func transform of a parameter itself, and operations registered with torch.library"
            raise TrainingError(Problem(got, need, 'update = "after"'))

    def _before_access(self, bucket: int) -> None:
        self._was_accessed[bucket] = True
        position = self._position[bucket]
        if position < self._num_ready:
            return
        if not self._in_forward:
            got = "a weight used between steps, while its update waits for the next forward"
            raise TrainingError(Problem(got, "the update first", "step.flush() on every rank"))
        with outside_transforms(self._device_type):
            self._update_up_to(position)
            self._transport.weights.wait(bucket)
        self._num_ready = position + 1

    def _set_listening(self, listening: bool) -> None:
        if self._param_access is not None:
            self._param_access.is_enabled = listening

    def _before_unshard(self, bucket: int) -> None:
        if self.has_pending:
            with outside_transforms(self._device_type):
                self._update_up_to(self._position[bucket])

    def _update_up_to(self, position: int) -> None:
        while self._num_updated <= position:
            self._num_updated += 1
            self._update(self._order[self._num_updated - 1])
