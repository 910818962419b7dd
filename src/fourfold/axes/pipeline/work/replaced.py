"""Replaced: dicts of modules that have other values for a while."""

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch import nn

from fourfold.axes.pipeline.work.stand_in import Source

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
