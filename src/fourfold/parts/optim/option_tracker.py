"""Options: an optimizer's class and the options of its groups, as text that ranks can compare.

option       an entry of a parameter group, such as `lr`; `params`, `fused` and `foreach` are not compared
changing     the options as they are now: a step's call carries them, so ranks that differ raise before the update
Law: equal options have equal text on every rank; no device tensor is read during training.
"""

import itertools
import operator
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from torch import Tensor
from torch.optim import Optimizer

# `fused` and `foreach` say how an update is carried out, not what it computes.
IMPLEMENTATION_OPTIONS = frozenset({"fused", "foreach"})
NOT_COMPARED = frozenset({"params", "param_names"}) | IMPLEMENTATION_OPTIONS
ABSENT = "none"
CLASS_KEY = "optimizer class"
DEVICE_TENSOR = "a device tensor"
SEPARATOR, EQUALS = "; ", " = "
MAX_SHOWN_VALUES = 4  # values of one option
MAX_SHOWN_BYTES = MAX_SHOWN_VALUES * 8
HEX_PREFIX, ELLIPSIS = "0x", "…"  # around bits of numbers
IMMUTABLE_TYPES = (int, float, bool, str, type(None))
NUMBER_TYPES = frozenset({int, float})


def describe_options(optimizer: Optimizer) -> dict[str, str]:
    """Class, defaults and every group's options, by name. Reads device tensors too: for use when a step is built."""
    kind = type(optimizer)
    found = {CLASS_KEY: f"{kind.__module__}.{kind.__qualname__}"}
    for where, options in (("default", optimizer.defaults), *_named_groups(optimizer.param_groups)):
        compared = sorted(options.keys() - NOT_COMPARED)
        found |= {f"{where} {name}": option_text(options[name], read_device=True) for name in compared}
    return found


def _named_groups(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(f"group {index}", group) for index, group in enumerate(groups)]


def option_text(value: Any, *, read_device: bool = False) -> str:
    """The text of an option's value. `read`: also of a tensor on a device, which has to be copied for it."""
    if type(value) is float:
        return repr(value)
    if isinstance(value, Tensor):
        return option_text(value.tolist()) if read_device or value.device.type == "cpu" else DEVICE_TENSOR
    if value is None or isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | float):
        return _number_text(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(option_text(each, read_device=read_device) for each in value)})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key}: {option_text(each, read_device=read_device)}' for key, each in value.items())})"
    if hasattr(value, "item"):  # a number of numpy's
        return option_text(value.item())
    # Not repr: it may hold an address, which differs between processes.
    return getattr(value, "__qualname__", type(value).__qualname__)


def _number_text(value: float) -> str:
    try:
        return repr(float(value))  # lr = 1 and lr = 1.0 train the same
    except OverflowError:
        return repr(value)


class OptionTracker:
    """The options of an optimizer's groups in every step. Only those that have changed become text again.

    Models with dozens of groups and a new rate for each of them in every step are usual. So the loops over groups are
    those of `map` and of tuples: options that have never changed are compared all at once, the others one by one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._num_options: list[int] = []
        self._pick_constant: operator.itemgetter[Any] | None = None
        """Picks from a group the options that have never changed."""
        self._constant_rows: tuple[Any, ...] = ()
        self._constant_hash = 0
        self._changed: set[str] = set()
        self._last_values: dict[str, list[Any]] = {}
        """Of all options that are not constant: their values by group. Empty: to be read again in every step."""
        self._texts: dict[str, str] = {}
        self._packed_values: dict[str, bytes] = {}
        """Of options with more values than are shown: all of them."""
        self._text = ""

    def text(self) -> str:
        """A digest of all options, then each option with its values by group: `1f3a9c2e lr = 0.1; …`."""
        groups = self._optimizer.param_groups
        if not self._is_unchanged(groups):
            self._rebuild(groups)
        elif not self._refresh(groups):
            return self._text
        text = SEPARATOR.join(self._texts.values())
        every = b"".join([text.encode(), *self._packed_values.values()])
        self._text = f"{xxhash.xxh32_hexdigest(every)} {text}"
        return self._text

    def implementation(self) -> str:
        """How updates are carried out, where the user says so: ranks that differ in it may round differently."""
        groups = self._optimizer.param_groups
        chosen = {
            f"{name} = {group[name]}"
            for group in groups
            for name in IMPLEMENTATION_OPTIONS & group.keys()
            if group[name]
        }
        return ", ".join(sorted(chosen))

    def short_digest(self) -> int:
        """20 bits of the digest: their squares can be summed over ranks in float64."""
        return int(self.text().partition(" ")[0], 16) >> 12

    def _is_unchanged(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether groups and options are those of the last call, and what was constant has not changed."""
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
        """Make all options text, and find out which have changed."""
        names = sorted({name for group in groups for name in group} - NOT_COMPARED)
        texts, packed = self._texts, self._packed_values
        self._texts, self._packed_values, self._last_values, constant = {}, {}, {}, []
        for name in names:
            values = _option_values(groups, name)
            is_settled = self._format_option(name, values)
            if name in texts and (texts[name], packed[name]) != (self._texts[name], self._packed_values[name]):
                self._changed.add(name)
            if name not in self._changed and all(map(_is_immutable, values)):
                constant.append(name)
            else:
                self._last_values[name] = values if is_settled else []
        self._num_options = list(map(len, groups))
        self._pick_constant = operator.itemgetter(*constant) if constant else None
        self._constant_rows = tuple(map(self._pick_constant, groups)) if self._pick_constant else ()
        self._constant_hash = hash(self._constant_rows)

    def _refresh(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Make those options text that are not constant. Whether there was anything to do."""
        found = False
        for name, seen in self._last_values.items():
            values = _option_values(groups, name)
            if seen and all(map(operator.is_, values, seen)):
                continue
            self._last_values[name] = values if self._format_option(name, values) else []
            found = True
        return found

    def _format_option(self, name: str, values: list[Any]) -> bool:
        """Make an option's values text. Whether the text can only change with the objects."""
        are_numbers = _are_numbers(values)
        if are_numbers and values.count(values[0]) == len(values):
            values = values[:1]
        # A rate of its own for each layer: the digest has all of them, the text the first.
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
    """Whether all are numbers of Python's own, or tuples of them."""
    kinds = set(map(type, values))
    if kinds == {tuple}:
        kinds = set(map(type, itertools.chain.from_iterable(values)))
    return kinds <= NUMBER_TYPES


def _pack_numbers(values: Sequence[Any]) -> bytes:
    """Numbers as bits, in an order that all machines share; none where one of them is a tuple or too large."""
    try:
        return struct.pack(f"<{len(values)}d", *values)
    except struct.error:
        return b""


def _is_immutable(value: Any) -> bool:
    """Whether a value cannot be changed in place, and can be compared without a device."""
    return isinstance(value, IMMUTABLE_TYPES) or (isinstance(value, tuple) and all(map(_is_immutable, value)))


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


class _Absent:
    """Of an option that a group does not have."""


def parse_options(text: str) -> dict[str, str]:
    """By option: its values, of what `Options.text` gave, which may be cut off at its end."""
    rows = text.partition(" ")[2].split(SEPARATOR)
    return {name: _decode_numbers(values) for name, equals, values in (row.partition(EQUALS) for row in rows) if equals}


def _decode_numbers(values: str) -> str:
    """Bits of numbers as decimals: of `0x9a9999999999b93f…` `0.1, …`."""
    bits = re.fullmatch(rf"{HEX_PREFIX}((?:[0-9a-f]{{16}})+)[0-9a-f]*{ELLIPSIS}?", values)
    if bits is None:
        return values
    raw = bytes.fromhex(bits[1])
    return ", ".join([*map(repr, struct.unpack(f"<{len(raw) // 8}d", raw)), ELLIPSIS])
