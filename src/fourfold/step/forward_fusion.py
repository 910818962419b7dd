"""Deferred: updates that wait for the next use of what they change.

waiting  a bucket whose gradient of the last step is summed, and whose weights are still those of that step
due      a bucket that is about to be used: it is updated now, and all before it in the order too
unseen   a bucket that was used and had not been told of
Law: whoever uses a weight finds it new. Ranks update in one order, whatever the order in which each uses its buckets.

One order, because ranks of a host share weights: each waits, before it uses a bucket, for the others' shares of it. A
rank that has updated all up to what it waits for never keeps another one waiting for more than its own forward.

Source: Jiang, Gu, Liu, Zhu, Pan, "Optimizer Fusion" (2021): forward fusion.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from fourfold.parts.comm.transports import Transport
from fourfold.parts.data.param_access import ParamAccess, outside_transforms
from fourfold.parts.data.sharded_params import ShardedParams
from fourfold.words.errors import Problem, TrainingError


class DeferredUpdates:
    """The updates of one step, until the forward of the next one, or until somebody wants the weights."""

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        transport: Transport,
        update: Callable[[int], None],
        *,
        sharded_params: ShardedParams | None = None,
    ) -> None:
        """`parameters` are by bucket; `update(bucket)` updates a bucket, or this rank's share of it.

        Where weights are gathered before use, it is their gathers that are told of: they have an order of their own.
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
        """Whether there are updates to be done."""
        return len(self._order) > 0

    def defer(self, order: Sequence[int]) -> None:
        """All buckets are waiting from now on. They are updated in this order, which is the same on every rank."""
        self._order = list(order)
        self._position = {bucket: place for place, bucket in enumerate(order)}
        self._num_updated, self._num_ready = 0, 0
        self._set_listening(True)

    def begin_step(self) -> None:
        """Begin a step: where no update waits, a use that was not reported is harmless."""
        self._was_accessed = [True] * len(self._parameters)

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Within, uses are due; at the end nothing is waiting any more."""
        self._was_accessed = [not self.has_pending or self._param_access is None] * len(self._parameters)
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False
        self.flush()

    def flush(self) -> None:
        """Update what is waiting. Where weights are shared, returns when all ranks have."""
        if not self.has_pending:
            return
        self._update_up_to(len(self._order) - 1)
        self._order = ()
        self._set_listening(False)
        self._transport.end_step()

    def check_missed_accesses(self, first_reached: Callable[[int], str | None]) -> None:
        """Raise TrainingError where a bucket was not told of in `forward`, and `reached` by its backward.

        `reached(bucket)` names a parameter of the bucket that has a gradient, or none.
        """
        unseen = [
            name for bucket, told in enumerate(self._was_accessed) if not told and (name := first_reached(bucket))
        ]
        if unseen:
            got = f"a use of the weights of {unseen[0]} that torch told nobody of, with their old values"
            need = "no torch.func transform of a parameter itself, and operations registered with torch.library"
            raise TrainingError(Problem(got, need, 'update = "after"'))

    def _before_access(self, bucket: int) -> None:
        self._was_accessed[bucket] = True
        place = self._position[bucket]
        if place < self._num_ready:
            return
        if not self._in_forward:
            got = "a weight used between steps, while its update waits for the next forward"
            raise TrainingError(Problem(got, "the update first", "step.flush() on every rank"))
        with outside_transforms(self._device_type):
            self._update_up_to(place)
            self._transport.wait_weights(bucket)
        self._num_ready = place + 1

    def _set_listening(self, listening: bool) -> None:
        if self._param_access is not None:
            self._param_access.is_enabled = listening

    def _before_unshard(self, bucket: int) -> None:
        if self.has_pending:
            with outside_transforms(self._device_type):
                self._update_up_to(self._position[bucket])

    def _update_up_to(self, place: int) -> None:
        while self._num_updated <= place:
            self._num_updated += 1
            self._update(self._order[self._num_updated - 1])
