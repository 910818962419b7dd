"""Gradient slots: the parts of the gradient buffers that hold one parameter's gradient each.

slot  a parameter's place in the gradient buffer of its bucket, [start, stop)
Law: a gradient is copied once, from where autograd allocates it, and that memory is freed at once.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.parts.data.grad_checks import check_dense
from fourfold.parts.memory_order import shaped
from fourfold.plan.data.buckets import Bucket


class GradSlots:
    """The slots of all parameters, numbered by bucket and slot."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], buffers: Sequence[Tensor]
    ) -> None:
        """`buffers` are the gradient buffers by bucket."""
        self.names = [slot.name for bucket in buckets for slot in bucket.slots]
        self.parameters = [parameters[name] for name in self.names]
        self._paddings = [buffers[bucket.index][bucket.slots[-1].stop :] for bucket in buckets]
        self._first_param = list(itertools.accumulate((len(bucket.slots) for bucket in buckets), initial=0))
        self._flats = [buffers[bucket.index][slot.start : slot.stop] for bucket in buckets for slot in bucket.slots]
        self.views = [shaped(flat, parameter) for flat, parameter in zip(self._flats, self.parameters, strict=True)]
        # Counted with the same expression as in `copy_referenced_views`, which adds references of its own.
        self._num_view_refs = [sys.getrefcount(self.views[index]) for index in range(len(self.views))]
        self.written = [False] * len(self.names)
        """By parameter: whether its slot holds a gradient of this round."""

    def begin_round(self) -> None:
        """Begin a round: no slot is written."""
        self.written = [False] * len(self.names)

    def store(self, param_index: int) -> None:
        """Copy a gradient into its slot, or add it to those of earlier microbatches."""
        parameter, view = self.parameters[param_index], self.views[param_index]
        gradient = parameter.grad
        assert gradient is not None
        check_dense(gradient, self.names[param_index])
        if self.written[param_index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self.written[param_index] = True
        # Free what autograd allocated before it makes the next gradient.
        parameter.grad = None

    def zero_padding(self, bucket: int) -> None:
        """Zero what lies behind the last slot: another bucket's gradient may be there, and a norm would count it."""
        self._paddings[bucket].zero_()

    def zero_unwritten(self, bucket: int) -> None:
        """Zero the slots of a bucket that hold no gradient."""
        for index in range(self._first_param[bucket], self._first_param[bucket + 1]):
            if not self.written[index]:
                self.views[index].zero_()

    @torch.no_grad()
    def copy_referenced_views(self) -> None:
        """Before slots are written: if the user still holds a view that was in `.grad`, turn it into a copy.

        torch's own gradients behave like that: where `.grad` was None they are new tensors. A view that the user has
        given other memory (`p.grad.data = …`, `model.float()`) is one already.
        """
        for index in range(len(self.views)):
            if self.views[index].data_ptr() != self._flats[index].data_ptr():
                self.views[index] = shaped(self._flats[index], self.parameters[index])
                continue
            if sys.getrefcount(self.views[index]) == self._num_view_refs[index]:
                continue
            view = self.views[index]
            if self.parameters[index].grad is not view:
                self.views[index] = view.view(view.shape)
                view.data = view.clone()

    def drop_grads(self) -> None:
        """Drop what is in `.grad`."""
        for parameter in self.parameters:
            parameter.grad = None
