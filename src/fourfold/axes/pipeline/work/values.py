"""Values: what modules return and keep, and how the messages between stages describe it.

leaf      a tensor, or anything else that is no container: a number, None, an object
form      the containers around leaves: dicts, lists, tuples, dataclasses
described what the metadata of a message say of a leaf: the shape of a tensor, a number or a text itself, or the type
          of an object
Law: the metadata are exact in each microbatch. The values of tensors travel only to stages that
need them (`gates.py`).

`replaced` gives dicts of modules other values for a while.
"""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.work.stand_in import Source, UnknownValue, stand_in
from fourfold.comm.collectives import DTYPES
from fourfold.torch_kit.tensor_tree import is_plain

Described = tuple[Any, ...]
ArgumentStates = Sequence[tuple[Any, list[Any]]]
Known = Mapping[Source, Sequence[Described]]
TENSOR, PLAIN, OBJECT = "t", "p", "o"
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})


class Form(NamedTuple):
    """The containers of a value. `text` is equal for two values of one form; `build` fills it with leaves."""

    text: str
    build: Callable[[Iterator[Any]], Any]


def argument_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentStates:
    """What a call is given that it may write into, each with what it holds now."""
    given = [each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, tuple) else [value])]
    return [(each, held) for each in given if (held := _held(each))]


def are_written(states: ArgumentStates) -> bool:
    """Whether one of these holds something else now."""
    return any(not _is_same(_held(each), before) for each, before in states)


def _held(value: Any) -> list[Any]:
    """The length and the parts of a container or an object; of a tensor, how often it has been written."""
    if isinstance(value, Tensor):
        return [] if value.is_inference() else [value._version]
    if isinstance(value, dict):
        return [len(value), *value, *value.values()]
    if isinstance(value, list):
        return [len(value), *value]
    is_object = not isinstance(value, nn.Module | type) and isinstance(getattr(value, "__dict__", None), dict)
    return [len(vars(value)), *vars(value).values()] if is_object else []


def _is_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(
        a is b or (type(a) is type(b) is int and a == b) for a, b in zip(now, before, strict=True)
    )


def take_apart(value: Any) -> tuple[Form, list[Any]]:
    """The form and the leaves of a value."""
    leaves: list[Any] = []
    return _form_of(value, leaves), leaves


def _form_of(value: Any, leaves: list[Any]) -> Form:
    kind = type(value)
    if isinstance(value, dict):
        return _named(kind, value, lambda parts: parts if kind is dict else kind(**parts), leaves)
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)) is not None:
        return _named(kind, dict(zip(fields, value, strict=True)), lambda parts: kind(**parts), leaves)
    if isinstance(value, list | tuple):
        return _named(kind, dict(enumerate(value)), lambda parts: kind(parts.values()), leaves)  # pyright: ignore[reportCallIssue]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _named(kind, dict(vars(value)), lambda parts: _with_fields(value, parts), leaves)
    leaves.append(value)
    return Form("*", next)


def _named(kind: type, parts: Mapping[Any, Any], join: Callable[[dict[Any, Any]], Any], leaves: list[Any]) -> Form:
    forms = {name: _form_of(part, leaves) for name, part in parts.items()}
    text = ",".join(f"{name}:{form.text}" for name, form in forms.items())
    return Form(
        f"{kind.__name__}({text})", lambda given: join({name: form.build(given) for name, form in forms.items()})
    )


def _with_fields(value: Any, fields: Mapping[str, Any]) -> Any:
    changed = copy.copy(value)
    for name, each in fields.items():
        object.__setattr__(changed, name, each)
    return changed


def describe(leaf: Any) -> Described:
    """What the metadata of messages say of a leaf."""
    if isinstance(leaf, Tensor):
        return (TENSOR, DTYPES.index(leaf.dtype), leaf.requires_grad, *leaf.shape)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return (PLAIN, leaf)
    return (OBJECT, type(leaf).__name__)


def stand_in_of(described: Described, device: torch.device, source: Source) -> Any:
    """What a stage has in place of a leaf of which the metadata say this."""
    kind, *rest = described
    if kind == PLAIN:
        return rest[0]
    if kind == OBJECT:
        return UnknownValue(source)
    dtype, needs_gradient, *shape = rest
    return stand_in(shape, DTYPES[dtype], device, source, needs_gradient=needs_gradient)


def encode(known: Known, device: torch.device) -> Tensor:
    """The metadata of a message; uint8."""
    text = json.dumps([[*source, described] for source, described in known.items()])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def decode(metadata: Tensor) -> dict[Source, tuple[Described, ...]]:
    """What `encode` has encoded."""
    entries = json.loads(bytes(metadata.tolist()))
    return {
        Source(kind, name, call): tuple(tuple(each) for each in described) for kind, name, call, described in entries
    }


def tensors_among(leaves: Sequence[Any]) -> list[Tensor]:
    """The leaves that are tensors."""
    return [each for each in leaves if isinstance(each, Tensor)]


def without_caches(returned: Any) -> Any:
    """A model's outputs without objects that have a state of their own: those of a dry run are no later call's."""
    if not isinstance(returned, dict):
        return returned
    kept = {name: each for name, each in returned.items() if is_plain(each)}
    return kept if type(returned) is dict else type(returned)(**kept)


def attributes_of(module: nn.Module) -> dict[str, list[Any]]:
    """What a module's forward may write: its own attributes, each with what it holds if it is a list or a dict."""
    return {key: _contents(value) for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}


def written_attributes(module: nn.Module, before: Mapping[str, list[Any]]) -> list[str]:
    """The names of those that are others than before."""
    return [key for key, now in attributes_of(module).items() if _is_changed(now, before.get(key))]


def is_of_torch(module: nn.Module) -> bool:
    """Whether a module is one of torch's own, whose forwards write no attributes."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _contents(value: Any) -> list[Any]:
    return [value, *(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())]


def _is_changed(now: list[Any], before: list[Any] | None) -> bool:
    return before is None or len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))


class _Received(torch.autograd.Function):
    """What was received, in the same memory, as a module's output: one that the next module may write in place.

    It is a leaf, for its gradient is sent; and autograd refuses to write a leaf or a view of one.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.data  # not detach(): a view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def writable(received: Tensor) -> Tensor:
    """What was received, as the next module may write it."""
    return cast(Tensor, _Received.apply(received)) if received.requires_grad else received


def copies(leaves: Sequence[Any]) -> list[Any]:
    """Leaves of which the model may write into its own afterwards."""
    return [each.clone() if isinstance(each, Tensor) else each for each in leaves]


# ---- replaced --------------------------------------------------------------------------------------------------------

Replacements = list[tuple[MutableMapping[str, Any], str, Any]]
"""Where, under which key, what."""


@contextlib.contextmanager
def replaced(values: Sequence[tuple[MutableMapping[str, Any], str, Any]]) -> Iterator[None]:
    """Within, these dicts have these values under these keys."""
    before = [(place, key, place.get(key), key in place) for place, key, _ in values]
    for place, key, value in values:
        place[key] = value
    try:
        yield
    finally:
        for place, key, value, was_there in reversed(before):
            if was_there:
                place[key] = value
            else:
                place.pop(key, None)


def attribute_of(model: nn.Module, attribute: Source) -> tuple[MutableMapping[str, Any], str, Any]:
    """Where an attribute of a module is, and what it is."""
    attributes = vars(model.get_submodule(attribute.module))
    return attributes, attribute.key, attributes[attribute.key]
