"""Parameter access: a report before each torch operation that reads a parameter's elements.

access    a torch operation with the parameter among its arguments, also inside a list; also its data, views and address
metadata  what can be read of a parameter without its elements: shape, dtype, gradient
class     a subclass of Parameter, one per bucket: torch calls its `__torch_function__` instead of the operation
sink      takes the reports, of one bucket each
Law: the report comes before every access, once per operation and bucket, never for metadata; no result has a class
of ours.

Module hooks would miss a weight that is used outside its module, as in `F.linear(x, embedding.weight)`. What torch does
not pass to the class is not seen: a parameter that is itself an argument of a `torch.func` transform, except within
`with_transforms`, or of an extension not registered with `torch.library`; code compiled by TorchScript; and
recomputation inside `torch.autograd.grad(…, parameters)`.

Source: torch's protocol for subclasses, "Extending torch Python API" in its docs.

Law: `func(*args, **restore_arguments(func, args, kwargs))` is the call that the user made.

Source: the calls of `handle_torch_function` in torch 2.13; a test compares them with this list.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GetSetDescriptorType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.torch_kit.torch_private import (
    DisableTorchFunctionSubclass,
    are_transforms_active,
    reporting_transforms,
    suspend_transforms,
)
from fourfold.words.errors import Problem, TaskError

NO_SAVED_TENSOR_HOOKS = "support saved tensor hooks"  # in an error message of torch.func

# Attributes that are the elements or a view of them. All other attributes are metadata.
_VIEW_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_METADATA_METHODS = (
    "size dim ndimension numel nelement element_size stride storage_offset get_device is_contiguous is_floating_point "
    "is_complex is_signed is_inference is_pinned is_shared dim_order requires_grad_ retain_grad "
    "register_hook register_post_accumulate_grad_hook __len__ __hash__"
)


def _metadata_functions() -> frozenset[Any]:
    functions: set[Any] = {torch.numel, torch.is_floating_point, torch.is_complex, torch.autograd.grad}
    functions.update(getattr(Tensor, name) for name in _METADATA_METHODS.split())
    for base in Tensor.__mro__:
        for name, attribute in vars(base).items():
            if isinstance(attribute, GetSetDescriptorType):
                functions.update((attribute.__set__, attribute.__delete__))
                if name not in _VIEW_ATTRIBUTES:
                    functions.add(attribute.__get__)
    return frozenset(functions)


METADATA_FUNCTIONS = _metadata_functions()


class AccessSink(Protocol):
    """Takes the reports of accesses, each inside the transforms and autocast of its operation: `outside_transforms`.

    It may work with the parameters itself; that counts as no access. What it raises is raised from the operation.
    """

    def before_access(self, bucket: int) -> None: ...


class ParamAccess:
    """Reports each torch operation that is about to read a parameter of a bucket to `sink`, unless that is None.

    Parameters hold only a weak reference to it.
    """

    def __init__(self, parameters_by_bucket: Sequence[Sequence[nn.Parameter]]) -> None:
        self.sink: AccessSink | None = None
        self.operation_index = 0
        """Counts operations: one that reads several buckets needs them all at once, and has several reports."""
        self.bucket_of: dict[type, int] = {}
        for bucket, parameters in enumerate(parameters_by_bucket):
            param_class = _make_param_class(weakref.ref(self))
            self.bucket_of[param_class] = bucket
            for parameter in parameters:
                parameter.__class__ = param_class
        # Weak: if a parameter holds a reference to the step, neither would ever be freed.
        weak_parameters = [weakref.ref(parameter) for parameters in parameters_by_bucket for parameter in parameters]
        self._finalizer = weakref.finalize(self, _make_plain, weak_parameters)
        self._finalizer.atexit = False

    def report(self, param_classes: Iterable[type]) -> None:
        """An operation is about to read parameters of these classes, among others."""
        if self.sink is not None:
            self.operation_index += 1
            for each in param_classes:
                if each in self.bucket_of:
                    self.sink.before_access(self.bucket_of[each])

    @staticmethod
    def with_transforms() -> contextlib.AbstractContextManager[None]:
        """Within, parameters that are themselves arguments of transforms of `torch.func` are reported too."""
        return reporting_transforms(_report_argument)

    def close(self) -> None:
        """Make the parameters plain again: no more reports."""
        self._finalizer()


def _report_argument(argument: Any) -> None:
    owner = getattr(type(argument), "access_owner", None)
    access = None if owner is None else owner()
    if access is not None:
        with DisableTorchFunctionSubclass():
            access.report([type(argument)])


def _make_plain(parameters: Iterable[weakref.ref[nn.Parameter]]) -> None:
    for weak_parameter in parameters:
        parameter = weak_parameter()
        if parameter is not None:
            parameter.__class__ = nn.Parameter


def _make_param_class(owner: "weakref.ref[ParamAccess]") -> type[nn.Parameter]:
    """A class for the parameters of one bucket: torch says which classes are among an operation's arguments."""

    class Parameter(nn.Parameter):
        access_owner = owner

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            access = owner()
            if func in DROPPED_ARGUMENTS:
                kwargs = restore_arguments(func, tuple(args), kwargs or {})
            ours = access.bucket_of if access is not None else {cls: 0}
            with DisableTorchFunctionSubclass():
                if access is not None and func not in METADATA_FUNCTIONS:
                    access.report(types)
                if all(map(ours.__contains__, types)):
                    return func(*args, **kwargs) if kwargs else func(*args)
            others = tuple(each for each in types if each not in ours and each is not Tensor)
            return _dispatch(func, others, args, kwargs or {})

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            if id(self) not in memo:
                memo[id(self)] = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
            return memo[id(self)]

        def __repr__(self, *, tensor_contents: object = None) -> str:
            return repr(nn.Parameter(self.data, self.requires_grad))

    return Parameter


def _dispatch(func: Any, others: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operation as if our parameters were plain: the other tensor classes among its arguments decide."""
    for other in others:
        result = other.__torch_function__(func, others, args, kwargs)
        if result is not NotImplemented:
            return result
    if others:
        return NotImplemented
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


untracked_access = DisableTorchFunctionSubclass
"""Within, operations on parameters are plain: no reports."""


@contextlib.contextmanager
def outside_transforms(device_type: str) -> Iterator[None]:
    """Within, no gradient is recorded, and no `torch.func` transform or autocast is active."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if are_transforms_active():
            stack.enter_context(suspend_transforms())
        yield


@contextlib.contextmanager
def explain_transform_errors() -> Iterator[None]:
    """Within, the error of a transform that does not support our saved tensor hooks becomes a TaskError."""
    try:
        yield
    except RuntimeError as error:
        if NO_SAVED_TENSOR_HOOKS not in str(error):
            raise
        got = "torch.func.grad, vjp, jacrev or hessian in the model, with zero = 3 between hosts or process groups"
        need = "autograd to save shards instead of whole weights, which these transforms do not support"
        attempt = "torch.autograd.grad(…, create_graph=True), or zero = 2"
        raise TaskError(Problem(got, need, attempt)) from error


# ---- Dropped arguments: some torch functions do not pass all their arguments to function modes and tensor classes ---

DROPPED_ARGUMENTS: dict[Callable[..., Any], tuple[str, ...]] = {
    F.l1_loss: ("weight",),
    torch.chain_matmul: ("out",),
    Tensor.dim_order: ("ambiguity_check",),
}


def restore_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call that a function mode or a tensor class has got, as the caller gave them."""
    names = DROPPED_ARGUMENTS.get(func)
    if names is None:
        return kwargs
    code = func.__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return kwargs
    positional = code.co_varnames[: min(len(args), code.co_argcount)]
    given = {*kwargs, *positional}
    return kwargs | {name: frame.f_locals[name] for name in names if name in frame.f_locals and name not in given}
