"""torch's private names: each one that Fourfold uses, behind a small function with a public name.

A release of torch may change a private name without a word. Then this file is the place to fix, and its test says
which function is broken.
Law: no other module names `torch._…` or a private attribute of one of torch's objects. The exceptions stand in
`tests/pure/test_architecture.py`, each with its reason.
Names that a hot path calls are bound, not wrapped: they cost what torch's own cost.
"""

import contextlib
import inspect
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch._utils import ExceptionWrapper
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.data._utils.collate import collate, default_collate_fn_map

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "ExceptionWrapper",
    "TorchDispatchMode",
    "collate",
    "default_collate_fn_map",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

Node = Any  # a node of autograd's graph: a `grad_fn`

# ---- autograd: the backward that runs now -----------------------------------------------------------------------

NO_BACKWARD_ID = -1
current_backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread runs; NO_BACKWARD_ID outside of one."""


def is_in_backward() -> bool:
    """Whether this thread runs a backward: a forward made here is a checkpoint's second one."""
    return current_backward_id() != NO_BACKWARD_ID


is_graph_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
"""In a backward: whether its graph is kept for another one."""


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that runs now ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def run_backward_under_modes(roots: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """`torch.autograd.backward`, with the torch function modes that are active kept active."""
    torch.autograd.graph._engine_run_backward(
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


# ---- autograd: tensors ------------------------------------------------------------------------------------------

version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How often a tensor was written in place, as torch counts it."""
is_view: Callable[[Tensor], bool] = Tensor._is_view
preserve_versions = torch.autograd.grad_mode._unsafe_preserve_version_counter
"""`with preserve_versions(tensors)`: writes into these tensors are not counted."""


def writable_result(tensor: Tensor) -> Tensor:
    """The same memory, for the forward of an autograd function to return. What it returns as a view may not be written
    in place by a model, such as by `nn.ReLU(inplace=True)`."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)


def tensor_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """The hooks that `tensor.register_hook` has registered."""
    return list((tensor._backward_hooks or {}).values())


def is_multi_grad_hook(hook: Callable[..., Any]) -> bool:
    """Whether `torch.autograd.graph.register_multi_grad_hook` has registered a hook. It runs in a backward only."""
    return getattr(hook, "__globals__", None) is vars(torch.autograd.graph)


def full_backward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that `module.register_full_backward_hook` has registered."""
    return list(module._backward_hooks.values()) if module._is_full_backward_hook else []


def called_backward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The full backward hooks that torch sets up around a call: those, and before them the ones of all modules."""
    return list(type(module)._get_backward_hooks(module)[0])


BACKWARD_HOOKS_OF_CALL = "_get_backward_hooks"
"""The method that a call asks for its full hooks and its other ones; it may be an attribute of the module."""


def post_accumulate_hooks(parameter: Tensor) -> OrderedDict[int, Callable[[Tensor], None]] | None:
    """The hooks of `register_post_accumulate_grad_hook` by handle id; None before the first one."""
    return parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def set_post_accumulate_hooks(parameter: Tensor, hooks: OrderedDict[int, Callable[[Tensor], None]]) -> None:
    """Replace the dict in which torch keeps those hooks."""
    parameter._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


def storage_key(tensor: Tensor) -> int:
    """A number that all tensors on one storage share; a fake tensor has one too."""
    return tensor.untyped_storage()._cdata


# ---- autograd: what nodes of the graph have saved ---------------------------------------------------------------

REDUCTION_MEAN = 1  # what `saved_reduction` gives for reduction="mean"
saved_reduction: Callable[[Node], int] = operator.attrgetter("_saved_reduction")
saved_class_weights: Callable[[Node], Tensor | None] = operator.attrgetter("_saved_weight")
saved_total_weight: Callable[[Node], Tensor] = operator.attrgetter("_saved_total_weight")
saved_input: Callable[[Node], Tensor] = operator.attrgetter("_saved_self")
saved_input_numel: Callable[[Node], int] = operator.attrgetter("_saved_self_sym_numel")


# ---- function modes, tensor subclasses and transforms of torch.func ---------------------------------------------

are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func`, such as vmap or grad, is active in this thread."""


is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass
"""Whether a tensor's class wraps other tensors, as DTensor does: it has no memory of its own."""


def has_memory(x: Tensor) -> bool:
    """Whether a tensor has memory of its own, or is on the meta device.

    Those of transforms of `torch.func` have none, nor zeros of forward mode, nor wrappers such as DTensor, nor
    `tensor_without_memory`, nor tensors without elements.
    """
    if x.layout is not torch.strided or functorch.is_functorch_wrapped_tensor(x) or x._is_zerotensor():
        return False
    return x.is_meta or torch._C._data_address(x) != 0  # type: ignore[attr-defined]


def suspend_transforms() -> AbstractContextManager[Any]:
    """Within, no transform of `torch.func` is active."""
    # Imported when it is needed: some releases of torch do not import it with torch itself, and it imports much.
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


_transform_lock, _transform_reports = threading.Lock(), list[Callable[[Any], None]]()


@contextlib.contextmanager
def reporting_transforms(report: Callable[[Any], None]) -> Iterator[None]:
    """Within, `report` gets each argument of a transform of `torch.func` before the transform wraps it.

    Of all threads, which must give the same function: torch looks up in its modules what wraps arguments.
    """
    from torch._functorch import eager_transforms, vmap

    names = (
        (vmap, "_add_batch_dim"),
        (eager_transforms, "_wrap_for_grad"),
        (eager_transforms, "_wrap_functional_tensor"),
    )
    with _transform_lock:
        _transform_reports.append(report)
        if len(_transform_reports) == 1:
            for module, name in names:
                setattr(module, name, _Reporting(getattr(module, name), report))
    try:
        yield
    finally:
        with _transform_lock:
            _transform_reports.remove(report)
            if not _transform_reports:
                for module, name in names:
                    setattr(module, name, getattr(module, name).function)


class _Reporting(NamedTuple):
    """A function that reports its first argument before it is called."""

    function: Callable[..., Any]
    report: Callable[[Any], None]

    def __call__(self, argument: Any, *others: Any) -> Any:
        self.report(argument)
        return self.function(argument, *others)


def tensor_without_memory(cls: type[Tensor], shape: Sequence[int], **kept: Any) -> Any:
    """A tensor of a class without memory: reading its address raises RuntimeError. `kept`: dtype, device, strides."""
    tensor = Tensor._make_wrapper_subclass(cls, tuple(shape), **kept)  # type: ignore[attr-defined]
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def is_operator(function: Any) -> bool:
    """Whether a function is one of `torch.ops`, with or without its overload."""
    return isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def written_arguments(operator_: Any) -> list[tuple[int, str]]:
    """The arguments that an operator of `torch.ops` is declared to write, by position and name.

    Of an operator without its overload: those of all overloads but the `out` ones.
    """
    is_overload = isinstance(operator_, torch._ops.OpOverload)
    overloads = [operator_] if is_overload else [getattr(operator_, name) for name in operator_.overloads()]
    return list(
        dict.fromkeys(
            (position, argument.name)
            for overload in overloads
            if is_overload or "out" not in overload._overloadname
            for position, argument in enumerate(overload._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    )


GROUPED_MM_OPS = frozenset(
    getattr(module, name) for module, name in ((torch, "_grouped_mm"), (F, "grouped_mm")) if hasattr(module, name)
)
"""Products of many matrices at once; not every release of torch has both names."""

# ---- modules ----------------------------------------------------------------------------------------------------

BatchNormBase = nn.modules.batchnorm._BatchNorm
"""The class that all batch normalizations inherit from, SyncBatchNorm too."""
base_batch_norm_forward: Callable[..., Tensor] = BatchNormBase.forward
"""The forward that torch's batch normalizations have in common; SyncBatchNorm has one of its own, for GPUs only."""
DropoutBase = nn.modules.dropout._DropoutNd
"""The class that all of torch's dropouts inherit from."""

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
"""A module's own parameters by name, not those of its children."""
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
own_children: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks of `register_forward_pre_hook`, in the order in which they run."""
    return list(module._forward_pre_hooks.values())


def swapped_state(module: nn.Module, state: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Within, a module has these parameters and buffers, by name; tied ones follow."""
    # Unlike `torch.func.functional_call`, it spans a backward: a checkpoint's second forward sees the same weights.
    return _reparametrize_module(module, dict(state), tie_weights=True)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled, as a whole or in place: function modes see nothing of what its forward calls."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or isinstance(module, torch.jit.ScriptModule) or uncompiled(module) is not module


def uncompiled(module: Any) -> Any:
    """The module that `torch.compile` has wrapped; any other is returned as it is."""
    return getattr(module, "_orig_mod", module)


def is_compiled_function(function: Any) -> bool:
    """Whether `torch.compile` has made this function."""
    return hasattr(function, "_torchdynamo_orig_callable")


# ---- optimizers -------------------------------------------------------------------------------------------------

StepHook = Callable[[Optimizer, Any, Any], Any]


def step_pre_hooks(optimizer: Optimizer) -> list[StepHook]:
    """The hooks before a step, in torch's order: first those of all optimizers."""
    return [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]


def step_post_hooks(optimizer: Optimizer) -> list[StepHook]:
    """The hooks after a step, in torch's order: last those of all optimizers."""
    return [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]


def state_dict_hooks(optimizer: Optimizer) -> list[Any]:
    """The hooks of `state_dict` and `load_state_dict`."""
    return [
        *optimizer._optimizer_state_dict_pre_hooks.values(),
        *optimizer._optimizer_state_dict_post_hooks.values(),
        *optimizer._optimizer_load_state_dict_pre_hooks.values(),
        *optimizer._optimizer_load_state_dict_post_hooks.values(),
    ]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether an optimizer has step hooks of its own; torch also keeps some for all optimizers."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def has_any_hook(optimizer: Optimizer) -> bool:
    """Whether any hook would run around a step or a state dict of this optimizer. Called in every step."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or optimizer._optimizer_state_dict_pre_hooks
        or optimizer._optimizer_state_dict_post_hooks
        or optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
    )


def takes_step_hooks(optimizer: Optimizer) -> bool:
    """Whether step hooks can be registered: not where `Optimizer.__init__` was never called."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def mark_step_called(optimizer: Optimizer) -> None:
    """Tell torch's schedulers that a step has been made: they warn about an optimizer that has not made one."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_without_wrappers(optimizer: Optimizer) -> None:
    """One step of the optimizer's class, without hooks and torch._dynamo. The caller has switched autograd off."""
    inspect.unwrap(type(optimizer).step)(optimizer)


def avoid_dynamo_import() -> None:
    """Keep torch from importing torch._dynamo when an optimizer is made: 1.25 s in every process."""
    plain = inspect.unwrap(Optimizer.add_param_group)
    if not hasattr(plain, "__dynamo_disable"):
        setattr(plain, "__dynamo_disable", plain)


# ---- kernels of attention ---------------------------------------------------------------------------------------


def _contiguous_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernels require a stride of 1 in the last dim of q, k, v and the output. On CPUs they do not check it."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def cpu_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Flash attention on a CPU: output [B, H, L, K] and logsumexp [B, H, L], which is 0 in fully masked rows."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_contiguous_rows(q, k, v), 0.0, is_causal, attn_mask=mask, scale=scale
    )


def cpu_flash_attention_backward(
    grad_out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `inputs` (q, k, v)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, *_contiguous_rows(*inputs, out), lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def cuda_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Flash attention on a GPU: output and logsumexp. As many heads in k and v as in q."""
    rows = _contiguous_rows(q, k, v)
    found = torch.ops.aten._scaled_dot_product_flash_attention(*rows, 0.0, is_causal, False, scale=scale)
    return found[0], found[1]


def cuda_flash_attention_backward(
    grad_out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `inputs` (q, k, v). The kernel reads `lse` as contiguous, whatever its strides are."""
    (q, k, v, out), lse = _contiguous_rows(*inputs, out), lse.contiguous()
    # The state of dropout's generator, of which this call makes no use.
    seed, offset = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros((), dtype=torch.uint64)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, is_causal, seed, offset, scale=scale
    )


# ---- process groups ---------------------------------------------------------------------------------------------


def all_process_groups(distributed: Any) -> Iterable[Any]:
    """Every process group of this process. `distributed` is `torch.distributed`, which this file does not import."""
    return list(distributed.distributed_c10d._world.pg_map)


# ---- data loaders -----------------------------------------------------------------------------------------------


def worker_processes(batches: Iterator[Any]) -> list[Any]:
    """The processes that read for an iterator of a DataLoader; none if it reads itself."""
    return getattr(batches, "_workers", [])
