"""Units: numbers for people, with three digits and a suitable prefix.

dimension  what is measured: bytes, bytes per second, operations, operations per second, seconds
prefix     decimal (k, M, G, T, P), or of bytes binary too (Ki, Mi, Gi, Ti)
Law: a count above 0 is never shown as 0.
Law: a number without a unit is refused, but for 0, and so is a unit of another dimension.
"""

import enum
import math
import re
from collections.abc import Sequence

from fourfold.words.errors import Problem

# ---- quantities ----------------------------------------------------------------------------------------------------

NUMBER_AND_UNIT = re.compile(r"\s*+([+-]?[0-9.]++(?:[eE][+-]?\d++)?+)\s*+(\S*+)\s*+")
SI = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


class Dimension(enum.Enum):
    """What a quantity measures, with an example of how it is written."""

    BYTES = "80 GiB"
    BYTES_PER_SECOND = "25 GB/s"
    OPERATIONS = "2 GFLOP"
    OPERATIONS_PER_SECOND = "312 TFLOP/s"
    SECONDS = "5 us"


def _with_prefixes(unit: str, prefixes: dict[str, float], factor: float = 1.0) -> dict[str, float]:
    return {prefix + unit: value * factor for prefix, value in prefixes.items()}


UNITS: dict[Dimension, dict[str, float]] = {
    Dimension.BYTES: _with_prefixes("B", SI | BINARY),
    Dimension.BYTES_PER_SECOND: _with_prefixes("B/s", SI | BINARY) | _with_prefixes("bit/s", SI, 1 / 8),
    Dimension.OPERATIONS: _with_prefixes("FLOP", SI),
    Dimension.OPERATIONS_PER_SECOND: _with_prefixes("FLOP/s", SI),
    Dimension.SECONDS: {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
}


def read_quantity(name: str, value: object, dimension: Dimension, *, allows_zero: bool = False) -> float | Problem:
    """The number in base units (B, B/s, FLOP, FLOP/s, s), or what is wrong with it. `name`: of the field."""
    units, attempt = UNITS[dimension], f'{name} = "{dimension.value}"'
    if not isinstance(value, str):
        return Problem(f"{name} = {value!r}", "a text: a number with its unit", attempt)
    got = f'{name} = "{value}"'
    match = NUMBER_AND_UNIT.fullmatch(value)
    number = _number(match[1]) if match else None
    if match is None or number is None:
        return Problem(got, "a number with its unit", attempt)
    if number == 0 and not match[2] and allows_zero:
        return 0.0
    if not match[2]:
        return Problem(got, f"a unit behind the number, such as {_examples(dimension)}", attempt)
    if match[2] not in units:
        return Problem(
            got, f"a unit such as {_examples(dimension)}", _similar(name, match[1], match[2], units) or attempt
        )
    result = number * units[match[2]]
    if not math.isfinite(result) or result < 0 or (result == 0 and not allows_zero):
        return Problem(got, "0 or more" if allows_zero else "more than 0", attempt)
    return result


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "1.2.3"
        return None


def _examples(dimension: Dimension) -> str:
    names = {
        Dimension.BYTES: "GB or GiB",
        Dimension.BYTES_PER_SECOND: "GB/s or Gbit/s",
        Dimension.OPERATIONS: "GFLOP",
        Dimension.OPERATIONS_PER_SECOND: "TFLOP/s",
        Dimension.SECONDS: "us, ms or s",
    }
    return names[dimension]


def _similar(name: str, number: str, unit: str, units: dict[str, float]) -> str:
    """The line with the unit that was meant: "Gb/s" of networks is bits, FLOPS are FLOP/s, "GB" is GB/s."""
    plain = unit.replace("bps", "bit/s").replace("b/s", "bit/s").replace("FLOPS", "FLOP/s").lower()
    by_lower = {each.lower(): each for each in units}
    meant = by_lower.get(plain) or by_lower.get(f"{plain}/s")
    return f'{name} = "{number} {meant}"' if meant else ""


# ---- numbers for people --------------------------------------------------------------------------------------------


SI_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY_PREFIXES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_si(value: float) -> str:
    """A measured number with three digits and a prefix: 12.3 k, 4.56 M."""
    factor, prefix = _prefix_of(value, (*SI_PREFIXES, (1.0, "")))
    return f"{format_three_digits(value / factor)} {prefix}".rstrip()


def _prefix_of(value: float, prefixes: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The first prefix with which the value is at least 1, in three digits; else the last one."""
    return next((each for each in prefixes if value >= 0.9995 * each[0]), prefixes[-1])


def format_three_digits(value: float) -> str:
    """A number below 1000 with three digits: 9.99, 12.3, 456."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def format_count(number: int) -> str:
    """A count: 17, 867 k, 4.94 M."""
    return str(number) if number < 1000 else format_si(number)


def format_bytes(num_bytes: float) -> str:
    """Bytes of memory, of a file or of a message: 812 B, 1.23 KiB, 4.56 MiB."""
    factor, unit = _prefix_of(num_bytes, (*BINARY_PREFIXES, (1, "B")))
    return f"{num_bytes:.0f} B" if factor == 1 else f"{format_three_digits(num_bytes / factor)} {unit}"


def format_bytes_per_second(rate: float) -> str:
    """What storage delivers, with decimal prefixes as its makers have them: 812 B/s, 1.23 MB/s, 4.56 GB/s."""
    number, _, prefix = format_si(rate).partition(" ")
    return f"{number} {prefix}B/s"


def write_bytes(num_bytes: int) -> str:
    """A number of bytes, exactly, in the largest unit of which it is a multiple: 80 GiB."""
    factor, unit = next((pair for pair in BINARY_PREFIXES if num_bytes % pair[0] == 0), (1, "B"))
    return f"{num_bytes // factor} {unit}"


def format_step_seconds(seconds: float) -> str:
    """How long a step takes: 840 µs, 41.2 ms, 3.53 s, 1,240 s."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    factor, unit = _prefix_of(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))
    return f"{format_three_digits(seconds / factor)} {unit}"


def format_percent(fraction: float) -> str:
    """A fraction with three digits: 31.2 %, 8 %, 0.42 %; what is below a millionth is 0 %."""
    return f"{100 * fraction:.3g} %" if abs(fraction) >= 1e-6 else "0 %"
