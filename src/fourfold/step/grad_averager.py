"""Gradient averager: averages the gradients of one model over all ranks; reductions begin while backward runs.

round          one backward that reduces, on all ranks
slot           the part of a bucket's buffer that holds one parameter's gradient; after a round `.grad` is a view of it
memory format  dtype, device and strides
Law: after a round, every `.grad` is the mean over the ranks, or None where no rank has a gradient.
Law: a gradient has the memory format of its parameter, so that a fused update reads both in the same order.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.axes.data.work.gradients import GradBuckets, LaunchSink, launch_complete
from fourfold.comm.reduce.protocol import DataTransport
from fourfold.comm.reduce.scalars import WorldChannel
from fourfold.step.optimizer_steps import ReducedGrad
from fourfold.torch_kit.grad_hooks import GradHooks
from fourfold.words.errors import Problem, TrainingError

# ---- memory formats -------------------------------------------------------------------------------------------------


MAX_NAMES = 3  # names in a message
_MemoryFormat = tuple[object, ...]


def shape_and_strides(tensor: Tensor) -> list[int] | str:
    """The shape; of a trained one with its strides if it is not contiguous: ranks add gradients in memory order."""
    like = torch.empty_like(tensor, device="meta")
    if not tensor.requires_grad or like.is_contiguous():
        return list(like.shape)
    strides = [stride for size, stride in zip(like.shape, like.stride(), strict=True) if size > 1]
    return f"{list(like.shape)}, strides {strides}"


class MemoryFormats:
    """The memory formats that parameters had when their slots were made."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._initial = [(name, parameter, _memory_format(parameter)) for name, parameter in parameters.items()]
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        self._in_memory_order = self._initial if is_fused else []

    def check(self, *, in_memory_order: bool = False) -> None:
        """Raise TrainingError naming the parameters whose memory format has changed.

        `in_memory_order`: only if updates go through memory in order, as fused ones do.
        """
        changed = [
            f"{name} ({_describe_change(before, _memory_format(parameter))})"
            for name, parameter, before in (self._in_memory_order if in_memory_order else self._initial)
            if _memory_format(parameter) != before
        ]
        if changed:
            more = f" and {len(changed) - MAX_NAMES} more" if len(changed) > MAX_NAMES else ""
            got = (
                f"parameters that were converted after DistributedOptimizer was built: {', '.join(changed[:MAX_NAMES])}"
            )
            need = "the dtype, device and memory format that gradients are reduced in"
            raise TrainingError(Problem(got + more, need, "model.to(…) before DistributedOptimizer(…)"))


def _memory_format(parameter: Tensor) -> _MemoryFormat:
    return parameter.dtype, parameter.device, parameter.stride()


def _describe_change(before: _MemoryFormat, now: _MemoryFormat) -> str:
    """For example `torch.float32 to torch.float64`."""
    old, new = next((old, new) for old, new in zip(before, now, strict=True) if old != new)
    return f"strides {list(old)} to {list(new)}" if isinstance(old, tuple) else f"{old} to {new}"  # type: ignore[call-overload]


# ---- gradient averager ----------------------------------------------------------------------------------------------


class GradAverager:
    """The buckets of a model, the hooks that fill them, and the transport that reduces them."""

    def __init__(
        self,
        world: WorldChannel,
        transport: DataTransport,
        gradients: GradBuckets,
        reduced_grads: Sequence[ReducedGrad],
        num_ranks_with_grad: Callable[[], Sequence[float]],
        memory_formats: MemoryFormats,
    ) -> None:
        """`reduced_grads`: by bucket and slot. `num_ranks_with_grad`: of each, in the round that ends."""
        self.world, self._transport, self._reducer = world, transport, transport.grads
        self._gradients, self._memory_formats = gradients, memory_formats
        self._num_ranks_with_grad = num_ranks_with_grad
        # Sums are divided later.
        launch_next = functools.partial(gradients.launch_next, 1.0, may_wait=False)
        self._hooks, self._sink = GradHooks(gradients.parameters), LaunchSink(gradients, launch_next)
        self.begin_next_round()
        self.listen()
        self.num_buckets = len(transport.grads.grad_buffers)
        self.reduced_grads = reduced_grads
        self.parameters = [each.parameter for each in reduced_grads]

    def listen(self) -> None:
        """Store and reduce gradients from now on."""
        self._hooks.sink = self._sink

    def ignore(self) -> None:
        """Leave gradients where autograd puts them from now on."""
        self._hooks.sink = None

    @property
    def transport_name(self) -> str:
        return self._transport.description

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
        """After a backward: reduce what earlier ones have left, too.

        Raises TrainingError for missing gradients, and for those that something else has written since.
        """
        self._gradients.check_taken()
        self._gradients.store_leftover_grads()
        self._gradients.check_all_reached(range(self.num_buckets))
        self.launch_all()

    def launch_all(self) -> None:
        """Launch all remaining buckets; slots without a gradient are zero."""
        self._gradients.countdown.complete(range(self.num_buckets))
        launch_complete(self._gradients, 1.0)

    def average(self, divisor: int) -> Sequence[float]:
        """Fill the slots with the sums over all ranks, divided by `divisor`. Collective; waits for the reductions.

        Returns how many ranks have a gradient of each of `self.parameters`; 1 for each with `unused = "error"`.
        """
        num_ranks_with_grad = self._num_ranks_with_grad()
        for bucket in range(self.num_buckets):
            self._reducer.wait_reduce(bucket, 1.0)
        self._reducer.scale_grads(1.0 / divisor)
        for bucket in range(self.num_buckets):
            self._reducer.all_gather_grads(bucket)
        return num_ranks_with_grad

    def assign_grads(self, num_ranks_with_grad: Sequence[float]) -> None:
        """Make each `.grad` a view of its slot; None where no rank has a gradient."""
        self._memory_formats.check(in_memory_order=True)
        try:
            for parameter, view, count in zip(self.parameters, self.views, num_ranks_with_grad, strict=True):
                parameter.grad = view if count else None
        except RuntimeError:  # torch refuses a `.grad` of another dtype or device
            self._memory_formats.check()
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
