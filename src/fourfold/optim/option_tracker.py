"""Option tracker: the options of an optimizer's groups in every step, as text that ranks compare.

text      a digest of all options and the values of each; a step's call carries it, so ranks that differ raise before
          the update
constant  an option that has never changed; all constant options are compared at once
Law: equal options have equal text on every rank. No device tensor is read during training.
"""

import itertools
import operator
import struct
from collections.abc import Sequence
from typing import Any

import xxhash
from torch import Tensor
from torch.optim import Optimizer

from fourfold.torch_kit.option_text import (
    ABSENT,
    ELLIPSIS,
    EQUALS,
    HEX_PREFIX,
    IMPLEMENTATION_OPTIONS,
    NOT_COMPARED,
    SEPARATOR,
    option_text,
)

MAX_SHOWN_VALUES = 4  # values of one option
MAX_SHOWN_BYTES = MAX_SHOWN_VALUES * 8
IMMUTABLE_TYPES = (int, float, bool, str, type(None))
NUMBER_TYPES = frozenset({int, float})


class OptionTracker:
    """Keeps the text of an optimizer's options. Only options that have changed are formatted again.

    Dozens of groups with a new rate for each in every step are usual. So the loops over groups are those of `map` and
    of tuples: constant options are compared all at once, the others one by one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._num_options: list[int] = []
        self._pick_constant: operator.itemgetter[Any] | None = None
        """Picks the constant options from a group."""
        self._constant_rows: tuple[Any, ...] = ()
        self._constant_hash = 0
        self._changed: set[str] = set()
        self._last_values: dict[str, list[Any]] = {}
        """By option that is not constant: its values by group. Empty: they may change in place, so read every step."""
        self._texts: dict[str, str] = {}
        self._packed_values: dict[str, bytes] = {}
        """By option with more values than are shown: all of them."""
        self._text = ""

    def text(self) -> str:
        """A digest of all options, then each option with its values by group: `1f3a9c2e lr = 0.1; …`."""
        groups = self._optimizer.param_groups
        if not self._is_unchanged(groups):
            self._rebuild(groups)
        elif not self._refresh(groups):
            return self._text
        text = SEPARATOR.join(self._texts.values())
        full_text = b"".join([text.encode(), *self._packed_values.values()])
        self._text = f"{xxhash.xxh32_hexdigest(full_text)} {text}"
        return self._text

    def implementation(self) -> str:
        """How updates are carried out, if the user chose it: ranks that differ in it may round differently."""
        groups = self._optimizer.param_groups
        chosen = {f"{name} = {group[name]}" for group in groups for name in IMPLEMENTATION_OPTIONS if group.get(name)}
        return ", ".join(sorted(chosen))

    def short_digest(self) -> int:
        """20 bits of the digest: their squares can be summed over ranks in float64."""
        return int(self.text().partition(" ")[0], 16) >> 12

    def _is_unchanged(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether groups and options are those of the last call, and constant options have not changed."""
        if list(map(len, groups)) != self._num_options:
            return False
        if self._pick_constant is None:
            return True
        try:
            rows = tuple(map(self._pick_constant, groups))
            # Hashes first: a tensor in a number's place has another hash, and `==` would wait for its device.
            # Then values: -1 and -2 have the same hash.
            return hash(rows) == self._constant_hash and rows == self._constant_rows
        except (KeyError, TypeError):  # another option in this one's place, or a list
            return False

    def _rebuild(self, groups: Sequence[dict[str, Any]]) -> None:
        """Format all options, and find which have changed."""
        names = sorted({name for group in groups for name in group} - NOT_COMPARED)
        texts, packed = self._texts, self._packed_values
        self._texts, self._packed_values, self._last_values, constant = {}, {}, {}, []
        for name in names:
            values = _option_values(groups, name)
            is_final = self._format_option(name, values)
            if name in texts and (texts[name], packed[name]) != (self._texts[name], self._packed_values[name]):
                self._changed.add(name)
            if name not in self._changed and all(map(_is_immutable, values)):
                constant.append(name)
            else:
                self._last_values[name] = values if is_final else []
        self._num_options = list(map(len, groups))
        self._pick_constant = operator.itemgetter(*constant) if constant else None
        self._constant_rows = tuple(map(self._pick_constant, groups)) if self._pick_constant else ()
        self._constant_hash = hash(self._constant_rows)

    def _refresh(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Format the options that are not constant and have changed. Returns whether there was one."""
        has_changed = False
        for name, seen in self._last_values.items():
            values = _option_values(groups, name)
            if seen and all(map(operator.is_, values, seen)):
                continue
            self._last_values[name] = values if self._format_option(name, values) else []
            has_changed = True
        return has_changed

    def _format_option(self, name: str, values: list[Any]) -> bool:
        """Format an option's values. Returns whether the text can change only if the value objects do."""
        are_numbers = _are_numbers(values)
        if are_numbers and values.count(values[0]) == len(values):
            values = values[:1]
        # One rate per layer, for example: the digest covers all of them, the text shows the first ones.
        packed = _pack_numbers(values) if are_numbers and len(values) > MAX_SHOWN_VALUES else b""
        if packed:
            text = f"{HEX_PREFIX}{packed[:MAX_SHOWN_BYTES].hex()}{ELLIPSIS}"  # decimals would take a microsecond each
        else:
            texts = [ABSENT if value is _Absent else option_text(value) for value in values]
            text = texts[0] if len(set(texts)) == 1 else ", ".join(texts)
        self._texts[name], self._packed_values[name] = f"{name}{EQUALS}{text}", packed
        return are_numbers or all(_is_immutable(value) or value is _Absent or _is_on_device(value) for value in values)


def _option_values(groups: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return list(map(dict.get, groups, itertools.repeat(name), itertools.repeat(_Absent)))


def _are_numbers(values: Sequence[Any]) -> bool:
    """Whether all are Python numbers, or tuples of Python numbers."""
    kinds = set(map(type, values))
    if kinds == {tuple}:
        kinds = set(map(type, itertools.chain.from_iterable(values)))
    return kinds <= NUMBER_TYPES


def _pack_numbers(values: Sequence[Any]) -> bytes:
    """The bits of numbers, in the same byte order on every machine; empty if one is a tuple or too large."""
    try:
        return struct.pack(f"<{len(values)}d", *values)
    except struct.error:
        return b""


def _is_immutable(value: Any) -> bool:
    """Whether a value cannot change in place, and can be compared without reading a device."""
    return isinstance(value, IMMUTABLE_TYPES) or (isinstance(value, tuple) and all(map(_is_immutable, value)))


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


class _Absent:
    """Stands for an option that a group does not have."""
