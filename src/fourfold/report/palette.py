"""Palette: the colours of the page, once for light and once for dark.

Law: what is drawn together differs by at least 0.09 in OKLab, in normal, deutan and protan vision, also from the card
below it; a curve has a contrast of at least 3 to the card, and the name on a block at least 4.5 to the block.
"""

# What a step's drawing shows; curves use them too.
DRAWN = ("forward", "backward", "reduce", "unshard", "update", "measure", "wait", "data")
CURVES = ("forward", "reduce", "update", "unshard", "backward", "measure")
"""By the number of a curve's colour."""

LIGHT = {
    "paper": "#f6f7f9", "card": "#ffffff", "ink": "#1c2228", "muted": "#5f6973", "grid": "#e4e8ec", "edge": "#dde2e7",
    "forward": "#4a65ac", "backward": "#432c76", "reduce": "#c27a02", "unshard": "#6b0537", "update": "#32662d",
    "measure": "#7a868f", "wait": "#d3d9df", "data": "#0092d1", "fault": "#b8324f",
    "on-forward": "#ffffff", "on-backward": "#ffffff", "on-reduce": "#14181c", "on-unshard": "#ffffff",
    "on-update": "#ffffff", "on-measure": "#0d1013", "on-wait": "#444c55", "on-data": "#10141a",
}  # fmt: skip
DARK = {
    "paper": "#14181c", "card": "#1c2127", "ink": "#e6eaee", "muted": "#98a3ae", "grid": "#2b323a", "edge": "#2f3740",
    "forward": "#7fa4e6", "backward": "#7767c0", "reduce": "#b78809", "unshard": "#f3c4ff", "update": "#8bc59a",
    "measure": "#7b857e", "wait": "#3b444e", "data": "#0f8cff", "fault": "#e8698a",
    "on-forward": "#10141a", "on-backward": "#ffffff", "on-reduce": "#10141a", "on-unshard": "#10141a",
    "on-update": "#10141a", "on-measure": "#0a0d10", "on-wait": "#c3ccd5", "on-data": "#10141a",
}  # fmt: skip


def css_variables(colours: dict[str, str]) -> str:
    """The declarations of the colours."""
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def css_classes() -> str:
    """A class for each colour of blocks, of the names on them, and of curves."""
    blocks = [f".{name} {{ fill: var(--{name}); background: var(--{name}) }}" for name in DRAWN]
    names = [f"svg .on-{name} {{ fill: var(--on-{name}) }}" for name in DRAWN]
    curves = [
        f".line.c{number}, .faint.c{number} {{ stroke: var(--{name}) }} "
        f".dot.c{number} {{ fill: var(--{name}) }} .swatch.c{number} {{ color: var(--{name}) }}"
        for number, name in enumerate(CURVES)
    ]
    return "\n".join([*blocks, *names, *curves])
