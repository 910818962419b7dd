"""Options: an optimizer's class and the options of its groups, as text that ranks can compare.

option       an entry of a parameter group, such as `lr`; `params`, `fused` and `foreach` are not compared
changing     the options as they are now: a step's call carries them, so ranks that differ raise before the update
Law: equal options have equal text on every rank; no device tensor is read during training.
"""

import array
import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# `fused` and `foreach` say how an update is carried out, not what it computes.
NOT_COMPARED = frozenset({"params", "param_names", "fused", "foreach"})
ABSENT = "none"
CLASS = "optimizer class"
ON_DEVICE = "a device tensor"
SEPARATOR, EQUALS = "; ", " = "
SHOWN = 4  # values of one option
FIXED = (int, float, bool, str, type(None))


def described(optimizer: Optimizer) -> dict[str, str]:
    """Class, defaults and every group's options, by name. Reads device tensors too: for use when a step is built."""
    kind = type(optimizer)
    found = {CLASS: f"{kind.__module__}.{kind.__qualname__}"}
    for where, options in (("default", optimizer.defaults), *_numbered(optimizer.param_groups)):
        compared = sorted(options.keys() - NOT_COMPARED)
        found |= {f"{where} {name}": text_of(options[name], read=True) for name in compared}
    return found


def _numbered(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(f"group {index}", group) for index, group in enumerate(groups)]


def text_of(value: Any, *, read: bool = False) -> str:
    """The text of an option's value. `read`: also of a tensor on a device, which has to be copied for it."""
    if type(value) is float:
        return repr(value)
    if isinstance(value, Tensor):
        return text_of(value.tolist()) if read or value.device.type == "cpu" else ON_DEVICE
    if value is None or isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | float):
        return repr(float(value))  # lr = 1 and lr = 1.0 train the same
    if isinstance(value, list | tuple):
        return f"({', '.join(text_of(each, read=read) for each in value)})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key}: {text_of(each, read=read)}' for key, each in value.items())})"
    if hasattr(value, "item"):  # a number of numpy's
        return text_of(value.item())
    # Not repr: it may hold an address, which differs between processes.
    return getattr(value, "__qualname__", type(value).__qualname__)


class Options:
    """The options of an optimizer's groups in every step. Only those that have changed become text again."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._by_option: dict[str, str] = {}
        self._packed: dict[str, bytes] = {}
        """Of options with more values than are shown: all of them."""
        self._mutable: set[str] = set()
        """Options whose values may be changed in place, such as a tensor on the CPU."""
        self._text = ""

    def text(self) -> str:
        """A digest of all options, then each option with its values by group: `1f3a9c2e lr = 0.1; …`."""
        groups = self._optimizer.param_groups
        stale = self._stale(groups)
        if stale:
            for name in stale:
                self._read(name, groups)
            text = SEPARATOR.join([f"{name}{EQUALS}{values}" for name, values in self._by_option.items()])
            every = b"".join([text.encode(), *self._packed.values()])
            self._text = f"{hashlib.blake2b(every, digest_size=4).hexdigest()} {text}"
        return self._text

    def mark(self) -> int:
        """20 bits of the digest: their squares can be summed over ranks in float64."""
        return int(self.text().partition(" ")[0], 16) >> 12

    def _stale(self, groups: Sequence[dict[str, Any]]) -> set[str]:
        """The options that may have changed since the last call."""
        if list(map(len, groups)) != self._lengths:
            return self._begin(groups)
        stale = set(self._mutable)
        for group, seen in zip(groups, self._seen, strict=True):
            if all(map(operator.is_, group.values(), seen.values())):
                continue
            for name, value, there in zip(group, group.values(), tuple(seen.values()), strict=True):
                if value is there:
                    continue  # the same object, as most are in most steps
                if name not in seen:
                    return self._begin(groups)
                before = seen[name]
                seen[name] = value
                if before is value or name in NOT_COMPARED:
                    continue
                if type(value) is type(before) is float:  # a schedule's rate, the usual change
                    if value != before:
                        stale.add(name)
                # Tensors are not compared here: the comparison of device tensors would wait for the device.
                elif not (_is_fixed(value) and _is_fixed(before)) or value != before:
                    stale.add(name)
                    self._note(name, value)
        return stale

    def _begin(self, groups: Sequence[dict[str, Any]]) -> set[str]:
        self._seen, self._lengths = [dict(group) for group in groups], list(map(len, groups))
        names = sorted({name for group in groups for name in group} - NOT_COMPARED)
        self._by_option, self._packed, self._mutable = dict.fromkeys(names, ""), {}, set()
        for group in groups:
            for name in names:
                self._note(name, group.get(name))
        return set(names)

    def _note(self, name: str, value: Any) -> None:
        on_device = isinstance(value, Tensor) and value.device.type != "cpu"
        if not (on_device or _is_fixed(value)):
            self._mutable.add(name)

    def _read(self, name: str, groups: Sequence[dict[str, Any]]) -> None:
        """Make an option's values text again."""
        values = [group.get(name, _Absent) for group in groups]
        self._packed.pop(name, None)
        if len(values) > SHOWN and all(type(value) is float for value in values):
            if len(set(values)) > 1:
                # A rate of its own for each layer: the digest has all of them, the text the first.
                self._packed[name] = array.array("d", values).tobytes()
                self._by_option[name] = f"{', '.join(map(repr, values[:SHOWN]))}, …"
                return
            values = values[:1]
        texts = [ABSENT if value is _Absent else text_of(value) for value in values]
        self._by_option[name] = texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _is_fixed(value: Any) -> bool:
    """Whether a value cannot be changed in place, and can be compared without a device."""
    return isinstance(value, FIXED) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


class _Absent:
    """Of an option that a group does not have."""


def parsed(text: str) -> dict[str, str]:
    """By option: its values, of what `Options.text` gave, which may be cut off at its end."""
    rows = text.partition(" ")[2].split(SEPARATOR)
    return {name: values for name, equals, values in (row.partition(EQUALS) for row in rows) if equals}
