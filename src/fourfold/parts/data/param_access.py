"""Uses: told of a parameter just before an operation takes it, whoever calls the operation.

use   an operation of torch with the parameter among its arguments, also in a list; its data, views and address too
look  what is asked of a parameter without its elements: its shape, its dtype, its gradient
kind  a class of parameters, one a bucket: torch hands every operation on them to the class first
Law: every use is told of before it happens, once an operation and bucket; no look is, and no result is of a kind.

Hooks of modules would miss a weight that is used outside its module, as in `F.linear(x, embedding.weight)`. What torch
does not hand to the class cannot be told of: a parameter that is itself an argument of a transform of `torch.func`, or
of an extension not registered with `torch.library`; code compiled by TorchScript; and what is computed once more
inside `torch.autograd.grad(…, parameters)`.

Source: torch's protocol for subclasses, "Extending torch Python API" in its docs.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.parts.dropped_arguments import DROPPED_ARGUMENTS, restore_arguments
from fourfold.parts.torch_private import DisableTorchFunctionSubclass, are_transforms_active, suspend_transforms
from fourfold.words.errors import Problem, TaskError

NO_SAVED_TENSOR_HOOKS = "support saved tensor hooks"  # what torch.func says

# Attributes that are the elements, or a view of them. All others only tell of them.
_VIEW_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_METADATA_METHODS = (
    "size dim ndimension numel nelement element_size stride storage_offset get_device is_contiguous is_floating_point "
    "is_complex is_signed is_inference is_pinned is_shared dim_order requires_grad_ retain_grad "
    "register_hook register_post_accumulate_grad_hook __len__ __hash__"
)


def _metadata_functions() -> frozenset[Any]:
    looks: set[Any] = {torch.numel, torch.is_floating_point, torch.is_complex, torch.autograd.grad}
    looks.update(getattr(Tensor, name) for name in _METADATA_METHODS.split())
    for base in Tensor.__mro__:
        for name, attribute in vars(base).items():
            if isinstance(attribute, GetSetDescriptorType):
                looks.update((attribute.__set__, attribute.__delete__))
                if name not in _VIEW_ATTRIBUTES:
                    looks.add(attribute.__get__)
    return frozenset(looks)


METADATA_FUNCTIONS = _metadata_functions()


class ParamAccess:
    """Tells of uses while it listens. Parameters know it weakly: it lives as long as somebody else holds it."""

    def __init__(
        self, parameters_by_bucket: Sequence[Sequence[nn.Parameter]], before_access: Callable[[int], None]
    ) -> None:
        """`before(bucket)` is called just before an operation takes a parameter of the bucket.

        It may itself work with the parameters: these are no uses. What it raises is raised where the parameter was
        to be used. It stands where the operation stands: see `outside`.
        """
        self.is_enabled = False
        self.operation_index = 0
        """The number of the operation that is told of: one that takes several buckets needs them all at once."""
        self.before_access = before_access
        self.bucket_of: dict[type, int] = {}
        for bucket, parameters in enumerate(parameters_by_bucket):
            kind = _make_param_class(weakref.ref(self))
            self.bucket_of[kind] = bucket
            for parameter in parameters:
                parameter.__class__ = kind
        # Weakly: a parameter may have come to hold the step, and then neither would ever go.
        mine = [weakref.ref(parameter) for parameters in parameters_by_bucket for parameter in parameters]
        self._finalizer = weakref.finalize(self, _make_plain, mine)
        self._finalizer.atexit = False

    def close(self) -> None:
        """The parameters are plain again: nothing is told any more."""
        self._finalizer()


def _make_plain(parameters: Iterable[weakref.ref[nn.Parameter]]) -> None:
    for each in parameters:
        parameter = each()
        if parameter is not None:
            parameter.__class__ = nn.Parameter


def _make_param_class(owner: "weakref.ref[ParamAccess]") -> type[nn.Parameter]:
    """A class of its own for the parameters of one bucket: torch says which classes an operation meets."""

    class Parameter(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            uses = owner()
            if func in DROPPED_ARGUMENTS:
                kwargs = restore_arguments(func, tuple(args), kwargs or {})
            known = uses.bucket_of if uses is not None else {cls: 0}
            with DisableTorchFunctionSubclass():
                if uses is not None and uses.is_enabled and func not in METADATA_FUNCTIONS:
                    uses.operation_index += 1
                    for kind in types:
                        if kind in known:
                            uses.before_access(known[kind])
                if all(map(known.__contains__, types)):
                    return func(*args, **kwargs) if kwargs else func(*args)
            others = tuple(kind for kind in types if kind not in known and kind is not Tensor)
            return _dispatch(func, others, args, kwargs or {})

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            if id(self) not in memo:
                memo[id(self)] = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
            return memo[id(self)]

        def __repr__(self, *, tensor_contents: object = None) -> str:
            return repr(nn.Parameter(self.data, self.requires_grad))

    return Parameter


def _dispatch(func: Any, others: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operation as it would be if its parameters were plain: tensors of another class decide about it."""
    for kind in others:
        result = kind.__torch_function__(func, others, args, kwargs)
        if result is not NotImplemented:
            return result
    if others:
        return NotImplemented
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


untracked_access = DisableTorchFunctionSubclass
"""Within: parameters are plain, and nobody is told."""


@contextlib.contextmanager
def outside_transforms(device_type: str) -> Iterator[None]:
    """Within: no gradient is recorded, no `torch.func` transform and no autocast is active, as between operations."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if are_transforms_active():
            stack.enter_context(suspend_transforms())
        yield


@contextlib.contextmanager
def explain_transform_errors() -> Iterator[None]:
    """Within: a transform that torch ends because of our hooks for saved tensors is a TaskError."""
    try:
        yield
    except RuntimeError as error:
        if NO_SAVED_TENSOR_HOOKS not in str(error):
            raise
        got = "torch.func.grad, vjp, jacrev or hessian in the model, with zero = 3 between hosts or process groups"
        need = "autograd to keep shards of weights instead of whole ones, which these transforms do not allow"
        attempt = "torch.autograd.grad(…, create_graph=True), or zero = 2"
        raise TaskError(Problem(got, need, attempt)) from error
