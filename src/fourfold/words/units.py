"""Units: numbers for people, with three digits and a suitable prefix.

Law: a count above 0 is never shown as 0.
"""

SI_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY_PREFIXES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_si(value: float) -> str:
    """A measured number with three digits and a prefix: 12.3 k, 4.56 M."""
    for factor, prefix in SI_PREFIXES:
        if value >= 0.9995 * factor:
            return f"{format_three_digits(value / factor)} {prefix}"
    return format_three_digits(value)


def format_three_digits(value: float) -> str:
    """A number below 1000 with three digits: 9.99, 12.3, 456."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def format_count(number: int) -> str:
    """A count: 17, 867 k, 4.94 M."""
    return str(number) if number < 1000 else format_si(number)


def format_bytes(num_bytes: float) -> str:
    """Bytes of memory, of a file or of a message: 812 B, 1.23 KiB, 4.56 MiB."""
    for factor, unit in BINARY_PREFIXES:
        if num_bytes >= 0.9995 * factor:
            return f"{format_three_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


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
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * factor or unit == "µs":
            break
    return f"{format_three_digits(seconds / factor)} {unit}"


def format_percent(fraction: float) -> str:
    """A fraction with three digits: 31.2 %, 8 %, 0.42 %; what is below a millionth is 0 %."""
    return f"{100 * fraction:.3g} %" if abs(fraction) >= 1e-6 else "0 %"
