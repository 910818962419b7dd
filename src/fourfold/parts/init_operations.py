"""Initialization operations: what an operation draws, writes and returns, as its schema declares it.

Law: what is recorded gives the same values whenever it is run again. An operation of which that is not known raises
NotDeferrable with its name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.torch_dispatch import alias_names, schema_arguments, schema_returns

aten = torch.ops.aten
FACTORIES = {
    aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default, aten.full.default,
    aten.rand.default, aten.rand.generator, aten.randn.default, aten.randn.generator,
}  # fmt: skip
OVERWRITING = {
    aten.normal_.default, aten.uniform_.default, aten.random_.default, aten.exponential_.default,
    aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default, aten.bernoulli_.float,
    aten.zero_.default, aten.fill_.Scalar, aten.copy_.default,
}  # fmt: skip
# These leave the values of their result open.
UNSET = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default}
# These use the shape of a tensor and none of its values.
SHAPE_ONLY = {
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default,
}  # fmt: skip
# These change the memory of a tensor, not its values: in every overload.
REPLACING_STORAGE = {aten.set_, aten.resize_, aten.resize_as_}
# These write running statistics, and their schemas do not say so.
UNDECLARED_WRITES = {aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}
KNOWN_NAMESPACES = {"aten", "prims"}


class NotDeferrable(Exception):
    """What a model does while it is made cannot be recorded; the message says what."""


def check_recordable(function: Any) -> None:
    """Raise NotDeferrable for an operation of weights of which the schema does not tell the whole effect."""
    if function.namespace not in KNOWN_NAMESPACES:
        # It may draw, send or write without a word: torch's own operations have tags for that.
        raise NotDeferrable(f"{function}, an operation that is not torch's, of a weight")
    if function.overloadpacket in REPLACING_STORAGE | UNDECLARED_WRITES:
        raise NotDeferrable(f"{function} of a weight")


def split_generator(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor | None]:
    """The arguments without a generator, and the state from which the operation will draw; None: it draws nothing."""
    given = _by_name(function, args, kwargs)
    generator = given.pop("generator", None) or torch.default_generator
    state = generator.get_state() if torch.Tag.nondeterministic_seeded in function.tags else None
    names = [argument.name for argument in schema_arguments(function)[: len(args)]]
    positional = names.index("generator") if "generator" in names else len(args)  # `rrelu_with_noise` takes it so
    return tuple(args[:positional]), {name: given[name] for name in given if name not in names[:positional]}, state


def _by_name(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in schema_arguments(function)]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def written_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that an operation writes: tensors and lists of tensors, by name."""
    given = _by_name(function, args, kwargs)
    is_write = {each.name for each in schema_arguments(function) if each.alias_info and each.alias_info.is_write}
    return {name: value for name, value in given.items() if name in is_write and value is not None}


def returned(function: Any, result: Any, written: Mapping[str, Any], replace: Callable[[Any], Any]) -> Any:
    """What an operation returns: the arguments that it wrote where its schema says so, all else replaced."""
    returns = schema_returns(function)
    if not returns:
        return None
    names = {alias_names(each): each.name for each in schema_arguments(function) if each.name in written}
    values = result if len(returns) > 1 else (result,)
    kept = tuple(
        written[names[alias_names(each)]] if alias_names(each) in names else replace(value)
        for each, value in zip(returns, values, strict=True)
    )
    return kept if len(returns) > 1 else kept[0]


def fills(tensor: Tensor) -> bool:
    """Whether each element of a tensor's storage is one of its elements."""
    reached = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != reached:
            return False
        reached *= size
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def overload_with_generator(function: Any) -> Any:
    """The operation that draws the same numbers from a generator that it is given. Raises NotDeferrable."""
    needed = sorted(_signature(function))
    for name in function.overloadpacket.overloads():
        overload = getattr(function.overloadpacket, name)
        others = [each for each in _signature(overload) if each[0] != "generator"]
        if any(each.name == "generator" for each in schema_arguments(overload)) and sorted(others) == needed:
            return overload
    raise NotDeferrable(f"{function} of a weight, which draws and takes no generator")


def _signature(function: Any) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in schema_arguments(function) if each.name != "generator"]


def run_from(state: Tensor | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation, with a generator in this state if it draws."""
    if state is None:
        return function(*args, **kwargs)
    generator = torch.Generator()
    generator.set_state(state)
    return overload_with_generator(function)(*args, **kwargs, generator=generator)
