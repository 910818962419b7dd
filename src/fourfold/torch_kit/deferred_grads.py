"""Deferred gradients: a backward in two halves; the first one computes what the stage before waits for.

first half   the gradients of inputs, and of what is cheap: biases, norms, embeddings
product      of a linear layer's inputs and the gradients of its outputs: the gradient of its weight
second half  the products; then all gradients of the microbatch are accumulated, as one backward would have done
Law: both halves together leave in `.grad` what one backward leaves there, and call hooks and buckets in the same way.

A weight's product is deferred if the weight is a leaf without hooks of the user, no autocast is active, and no
checkpoint is: its second forward runs without function modes, so it must save what torch's own operations save. All
other gradients of weights are made in the first half.
Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2401.10241), §2.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fourfold.torch_kit.grad_hooks import GradHooks, GradSink, has_user_hooks
from fourfold.torch_kit.mixed_precision import autocast_device
from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.recompute import is_in_checkpoint

_thread = threading.local()


class _Product(NamedTuple):
    """R rows: of a weight [N, F] the output's gradient [R, N] and the input [R, F]; of one [F, N] the reverse."""

    param_index: int
    left: Tensor
    right: Tensor


@dataclass
class PendingGrads:
    """What a first half leaves to the second one.

    products  of weights, in the order in which backward came to them
    others    by parameter: gradients that the first half has made
    """

    products: list[_Product] = field(default_factory=list)
    others: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes of the outputs' gradients; the inputs are activations that the forward has kept anyway."""
        return sum(product.left.nbytes for product in self.products)


class WholeBackward:
    """How the backwards of a stage are divided: not at all."""

    def in_forward(self) -> contextlib.AbstractContextManager[None]:
        """A forward, whose backward may be divided."""
        return contextlib.nullcontext()

    def first_half(self, hooks: GradHooks) -> contextlib.AbstractContextManager[PendingGrads]:
        """A backward that leaves gradients pending. `hooks`: of the parameters."""
        raise AssertionError("a backward in halves, in a stage whose forwards do not prepare them")

    def second_half(self, pending: PendingGrads, sink: GradSink) -> None:
        """Accumulate what is pending; the sink takes each gradient."""
        raise AssertionError("a backward in halves, in a stage whose forwards do not prepare them")


class DeferredGrads(WholeBackward):
    """Backwards in two halves."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """`parameters`: in the order in which gradient hooks number them."""
        self._parameters = parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._pending: PendingGrads | None = None

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        before = getattr(_thread, "deferred", None)
        _thread.deferred = self
        try:
            with _LinearMode(self):
                yield
        finally:
            _thread.deferred = before

    @contextlib.contextmanager
    def first_half(self, hooks: GradHooks) -> Iterator[PendingGrads]:
        """The gradients of earlier microbatches are put aside: those of this one come later."""
        with untracked_access():
            earlier = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
        self._pending = pending = PendingGrads()
        try:
            with hooks.calling(_Collector(self._parameters, pending)):
                yield pending
        finally:
            self._pending = None
            with untracked_access():
                for parameter, gradient in zip(self._parameters, earlier, strict=True):
                    parameter.grad = gradient

    @torch.no_grad()
    def second_half(self, pending: PendingGrads, sink: GradSink) -> None:
        by_param: dict[int, list[_Product]] = {}
        for product in pending.products:
            by_param.setdefault(product.param_index, []).append(product)
        pending.products.clear()  # each is freed as soon as it has been computed
        with untracked_access():
            for index in [*(each for each in pending.others if each not in by_param), *by_param]:
                if index in pending.others:
                    _accumulate(self._parameters[index], pending.others.pop(index))
                for product in by_param.pop(index, []):
                    _accumulate_product(self._parameters[index], product)
                sink.on_grad(index)

    def index_of(self, weight: Tensor, input: Tensor) -> int | None:
        """The number of a weight whose product can be deferred; None: it cannot be."""
        index = self._index_of.get(id(weight))
        if index is None or not weight.requires_grad:
            return None
        if torch.is_autocast_enabled(autocast_device(input)) or torch.compiler.is_compiling() or has_user_hooks(weight):
            return None
        if is_in_checkpoint():
            return None
        return index

    def is_deferring(self) -> bool:
        """Whether the backward that runs now is a first half: a user's own backward is whole."""
        return self._pending is not None

    def add(self, param_index: int, left: Tensor, right: Tensor) -> None:
        """Leave a product to the second half."""
        assert self._pending is not None
        # Without its graph, which would hold what the stage has received, and the gradient of it.
        self._pending.products.append(_Product(param_index, left, right.detach()))


class _Collector:
    """Takes gradients out of `.grad`, for the second half."""

    def __init__(self, parameters: Sequence[nn.Parameter], pending: PendingGrads) -> None:
        self._parameters, self._pending = parameters, pending

    def on_grad(self, param_index: int) -> None:
        parameter = self._parameters[param_index]
        if parameter.grad is not None:
            self._pending.others[param_index] = parameter.grad
            parameter.grad = None


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _accumulate_product(parameter: nn.Parameter, product: _Product) -> None:
    left_NR, right_RF = product.left.flatten(0, -2).t(), product.right.flatten(0, -2)
    if parameter.grad is None:
        parameter.grad = left_NR @ right_RF
    else:
        parameter.grad.addmm_(left_NR, right_RF)


class WeightDeferral(NamedTuple):
    """Where the product of one weight waits."""

    deferred: DeferredGrads
    param_index: int

    def takes(self, grad: Tensor, input: Tensor) -> bool:
        """Leave the product of a weight [N, F] to the second half, if this backward is a first one."""
        if not self.deferred.is_deferring():
            return False
        self.deferred.add(self.param_index, grad, input)
        return True


def deferral_of(weight: Tensor, input: Tensor) -> WeightDeferral | None:
    """In a forward: where the product of this weight may wait; None: its backward computes it."""
    deferred: DeferredGrads | None = getattr(_thread, "deferred", None)
    index = None if deferred is None else deferred.index_of(weight, input)
    return None if deferred is None or index is None else WeightDeferral(deferred, index)


class _LinearMode(TorchFunctionMode):
    """Within, linear layers leave the products of their weights to a second half."""

    def __init__(self, deferred: DeferredGrads) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is F.linear and (found := self._linear(*args, **kwargs)) is not None:
            return found
        if func is torch.addmm and not kwargs and len(args) == 3 and (found := self._addmm(*args)) is not None:
            return found
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        index = self._deferred.index_of(weight, input) if input.ndim > 1 else None
        if index is None:
            return None
        return _Linear.apply(input, weight, bias, WeightDeferral(self._deferred, index))

    def _addmm(self, bias: Tensor, input: Tensor, weight: Tensor) -> Tensor | None:
        """Of transformers' Conv1D, whose weight is [in, out]."""
        index = self._deferred.index_of(weight, input)
        return None if index is None else _Addmm.apply(bias, input, weight, WeightDeferral(self._deferred, index))


class _Linear(torch.autograd.Function):
    """`F.linear`, whose weight [N, F] may get its gradient later."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, deferral: WeightDeferral) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.deferral = deferral
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        (input, weight), grad = ctx.saved_tensors, grads[0]
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_weight = None
        if needs_weight and not ctx.deferral.takes(grad, input):
            grad_weight = grad.flatten(0, -2).t() @ input.flatten(0, -2)
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return grad @ weight if needs_input else None, grad_weight, grad_bias, None


class _Addmm(torch.autograd.Function):
    """`torch.addmm` of a bias, an input [R, F] and a weight [F, N] that may get its gradient later."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, input: Tensor, weight: Tensor, deferral: WeightDeferral) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.deferral, ctx.bias_shape = deferral, bias.shape
        return torch.addmm(bias, input, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        (input, weight), grad = ctx.saved_tensors, grads[0]
        needs_bias, needs_input, needs_weight, _ = ctx.needs_input_grad
        grad_weight = None
        if needs_weight and not ctx.deferral.takes(input, grad):
            grad_weight = input.t() @ grad
        grad_bias = grad.sum_to_size(ctx.bias_shape) if needs_bias else None
        return grad_bias, grad @ weight.t() if needs_input else None, grad_weight, None
