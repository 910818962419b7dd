"""Values that formats have in common: JSON, and the bytes of .npy files.

Law: what a header claims of an array's size must be what its bytes are; an array of Python objects is refused.
"""

import io
import json
import math
import tokenize
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy_format


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text, as a batch can hold it. Raises ValueError or RecursionError if it is none."""
    return stackable(json.loads(content))


def stackable(value: Any) -> Any:
    """A value of JSON with its lists of numbers as tensors; a null stays None."""
    if isinstance(value, dict):
        return {name: stackable(each) for name, each in value.items()}
    if isinstance(value, list):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            return [stackable(each) for each in value]
    return value


class NpyHead(NamedTuple):
    """What a .npy file says of its array. `start`: the array's first byte."""

    dtype: np.dtype
    shape: tuple[int, ...]
    by_columns: bool
    start: int


def read_npy_head(file: Any, size: int) -> NpyHead:
    """The head of a .npy file of `size` bytes. Raises ValueError if it is damaged, or the array no numbers."""
    version = npy_format.read_magic(file)
    readers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array of version {version[0]}.{version[1]}")
    try:
        shape, by_columns, dtype = readers[version](file)
    except (tokenize.TokenError, SyntaxError, TypeError) as error:  # numpy reads it as Python's literals
        raise ValueError(f"a head that cannot be read: {error}") from error
    head = NpyHead(dtype, shape, by_columns, file.tell())
    if dtype.kind not in "biufc":
        raise ValueError(f"an array of {dtype}, not of numbers")
    if min(shape, default=0) < 0 or dtype.itemsize * math.prod(shape) != size - head.start:
        raise ValueError(f"{size - head.start} bytes for an array of {dtype} {list(shape)}")
    return head


def parse_npy(content: bytes) -> np.ndarray:
    """The array of a .npy file. Raises ValueError if it is damaged, or holds Python objects."""
    head = read_npy_head(io.BytesIO(content), len(content))
    order = "F" if head.by_columns else "C"
    array = np.frombuffer(content, head.dtype, offset=head.start).reshape(head.shape, order=order)
    return np.array(array, dtype=head.dtype.newbyteorder("="), order="C")
