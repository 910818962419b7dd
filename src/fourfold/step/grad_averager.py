"""Gradient averager: averages the gradients of one model over all ranks; reductions begin while backward runs.

round  one backward that reduces, on all ranks
slot   the part of a bucket's buffer that holds one parameter's gradient; after a round `.grad` is a view of it
Law: after a round, every `.grad` is the mean over the ranks, or None where no rank has a gradient.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.parts.comm import transports
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.reduce.transport_spec import spec_of_request
from fourfold.parts.comm.topology import gather_topology
from fourfold.parts.data.flat_params import param_specs
from fourfold.parts.data.grad_buckets import GradBuckets
from fourfold.parts.data.grad_hooks import GradHooks
from fourfold.parts.data.gradients import MeanSink, launch_all
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.plan.update_spec import UpdateSpec
from fourfold.step.memory_formats import MemoryFormats
from fourfold.step.unreduced_grads import ReducedGrad
from fourfold.words.program import USED_PARAMS


class GradAverager:
    """The buckets of a model, the hooks that fill them, and the transport that reduces them."""

    def __init__(
        self,
        trainable: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        plan: Plan,
        world: Communicator,
    ) -> None:
        """`world` lies on the plan's mesh. Collective."""
        blueprint = lower(plan, param_specs(trainable, {}), gather_topology(world), UpdateSpec())
        group = blueprint.group_of(world.rank)
        buckets, spec = group.buckets, spec_of_request(group.request)
        self._allows_unused = plan.unused == "allow"
        meter = CommMeter()
        self.world = transports.make_world_channel(world, plan.transport, meter)
        transport = transports.make_data_transport(
            world.along("dp", "sp"), spec, meter=meter, calls=self.world.calls, choice=plan.transport
        )
        self._transport, self._reducer, self.transport_name = transport, transport.grads, transport.description
        self._gradients = GradBuckets(dict(trainable), buckets, self._reducer, meter, allow_unused=self._allows_unused)
        self._hooks, self._sink = GradHooks(self._gradients.slots.parameters), MeanSink(self._gradients)
        self.begin_next_round()
        self.set_listening(True)
        self.num_buckets = len(buckets)
        buffers = self._reducer.grad_buffers
        self.reduced_grads = [
            ReducedGrad(slot.name, trainable[slot.name], buffers[bucket.index])
            for bucket in buckets
            for slot in bucket.slots
        ]
        self.parameters = [each.parameter for each in self.reduced_grads]
        self._memory_formats = MemoryFormats(trainable, optimizer)

    def set_listening(self, listening: bool) -> None:
        """Whether gradients are stored and reduced; else they stay where autograd puts them."""
        self._hooks.sink = self._sink if listening else None

    @property
    def num_ranks(self) -> int:
        """How many ranks the gradients are summed over."""
        return self._reducer.size

    @property
    def views(self) -> Sequence[Tensor]:
        """The slots of `self.parameters`."""
        return self._gradients.slots.views

    def begin_round(self) -> None:
        """Before the first gradient of a round: what the user still holds of the last one is not overwritten."""
        self._gradients.slots.copy_referenced_views()

    def finish_backward(self) -> None:
        """After a backward: reduce what earlier ones have left, too. Raises TrainingError for missing gradients."""
        self._gradients.store_leftover_grads()
        self._gradients.check_all_reached()
        self.launch_all()

    def launch_all(self) -> None:
        """Launch all remaining buckets; slots without a gradient are zero."""
        launch_all(self._gradients, 1.0)

    def average(self, divisor: int) -> list[float]:
        """Fill the slots with the sums over all ranks, divided by `divisor`. Collective; waits for the reductions.

        Returns how many ranks have a gradient of each of `self.parameters`; 1 for each with `unused = "refuse"`.
        """
        num_ranks_with_grad = self._count_ranks_with_grad()
        for bucket in range(self.num_buckets):
            self._reducer.wait_reduce(bucket, 1.0)
        self._reducer.scale_grads(1.0 / divisor)
        for bucket in range(self.num_buckets):
            self._reducer.all_gather_grads(bucket)
        return num_ranks_with_grad

    def _count_ranks_with_grad(self) -> list[float]:
        if not self._allows_unused:
            return [1.0] * len(self.parameters)
        reached = torch.tensor(self._gradients.countdown.reached, dtype=torch.float64)
        self._transport.scalars.all_reduce_async(USED_PARAMS, reached)
        return self._transport.scalars.wait(USED_PARAMS)

    def assign_grads(self, num_ranks_with_grad: Sequence[float]) -> None:
        """Make each `.grad` a view of its slot; None where no rank has a gradient."""
        if self._memory_formats.uses_memory_order:
            self._memory_formats.check_unchanged()
        try:
            for parameter, view, count in zip(self.parameters, self.views, num_ranks_with_grad, strict=True):
                parameter.grad = view if count else None
        except RuntimeError:  # torch refuses a `.grad` of another dtype or device
            self._memory_formats.check_unchanged()
            raise

    def end_round(self) -> None:
        """Wait until no other rank reads this rank's slots any more. Collective."""
        self._reducer.end_step()
        # Autograd may add to `.grad` in place and the optimizer may change it: no other rank may still read it then.
        for bucket in range(self.num_buckets):
            self._reducer.acquire_buffer(bucket, 1.0)

    def begin_next_round(self) -> None:
        """Be ready for the next backward, however the last one ended."""
        self._gradients.begin_step()
        # Each backward that reduces is a round of its own, so it is also the round's last.
        self._gradients.countdown.is_last_backward = True
