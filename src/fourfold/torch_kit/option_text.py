"""Option text: the options of an optimizer's parameter groups as text that ranks can compare.

option  an entry of a parameter group, such as `lr`; `params`, `fused` and `foreach` are not compared
Law: equal options have equal text on every rank.
"""

import re
import struct
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

IMPLEMENTATION_OPTIONS = ("fused", "foreach")
"""How an update is carried out, not what it computes."""
NOT_COMPARED = frozenset({"params", "param_names", *IMPLEMENTATION_OPTIONS})
ABSENT = "none"
CLASS_KEY = "optimizer class"
DEVICE_TENSOR = "a device tensor"
SEPARATOR, EQUALS = "; ", " = "
HEX_PREFIX, ELLIPSIS = "0x", "…"  # around the bits of numbers


def describe_options(optimizer: Optimizer) -> dict[str, str]:
    """Class and every group's options, by name. Reads device tensors too, so it is for building a step."""
    kind = type(optimizer)
    texts = {CLASS_KEY: f"{kind.__module__}.{kind.__qualname__}"}
    for index, options in enumerate(optimizer.param_groups):
        compared = sorted(options.keys() - NOT_COMPARED)
        texts |= {f"group {index} {name}": option_text(options[name], read_device=True) for name in compared}
    return texts


def option_text(value: Any, *, read_device: bool = False) -> str:
    """The text of an option's value. `read_device`: copy a tensor from its device to show its value."""
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
    # Not repr: it may contain an address, which differs between processes.
    return getattr(value, "__qualname__", type(value).__qualname__)


def _number_text(value: float) -> str:
    try:
        return repr(float(value))  # lr = 1 and lr = 1.0 train the same
    except OverflowError:
        return repr(value)


def parse_options(text: str) -> dict[str, str]:
    """The values by option, from a text of `OptionTracker.text` that may be cut off at its end."""
    rows = text.partition(" ")[2].split(SEPARATOR)
    return {name: _decode_numbers(values) for name, equals, values in (row.partition(EQUALS) for row in rows) if equals}


def _decode_numbers(values: str) -> str:
    """Bits of numbers as decimals: `0x9a9999999999b93f…` becomes `0.1, …`."""
    bits = re.fullmatch(rf"{HEX_PREFIX}((?:[0-9a-f]{{16}})++)[0-9a-f]*{ELLIPSIS}?", values)
    if bits is None:
        return values
    raw = bytes.fromhex(bits[1])
    return ", ".join([*map(repr, struct.unpack(f"<{len(raw) // 8}d", raw)), ELLIPSIS])
