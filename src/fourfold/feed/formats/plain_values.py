"""Values of JSON, as formats have them in common."""

import json
from typing import Any

import torch


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text, as a batch can hold it. Raises ValueError or RecursionError if it is none."""
    return stackable(json.loads(content))


def stackable(value: Any) -> Any:
    """A value of JSON with its lists of numbers as tensors; a null stays None. ValueError for what is no int64."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of more than 64 bits")
    if isinstance(value, dict):
        return {name: stackable(each) for name, each in value.items()}
    if isinstance(value, list):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            return [stackable(each) for each in value]
    return value
