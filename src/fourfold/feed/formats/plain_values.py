"""Values that formats have in common: JSON, and the bytes of .npy files.

Law: what a header claims of an array's size must be what its bytes are; an array of Python objects is refused.
"""

import io
import json
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy_format


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text, as a batch can hold it. Raises ValueError or RecursionError if it is none."""
    return stackable(json.loads(content))


def stackable(value: Any) -> Any:
    """A value of JSON with its lists of numbers as tensors. Raises ValueError for null, which no batch can hold."""
    if value is None:
        raise ValueError("null, where a value must be")
    if isinstance(value, dict):
        return {name: stackable(each) for name, each in value.items()}
    if isinstance(value, list):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            return [stackable(each) for each in value]
    return value


def parse_npy(content: bytes) -> np.ndarray:
    """The array of a .npy file. Raises ValueError if it is damaged, or holds Python objects."""
    file = io.BytesIO(content)
    version = npy_format.read_magic(file)
    if version == (1, 0):
        shape, fortran_order, dtype = npy_format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran_order, dtype = npy_format.read_array_header_2_0(file)
    else:
        raise ValueError(f"an array of version {version[0]}.{version[1]}")
    if dtype.kind not in "biufc":
        raise ValueError(f"an array of {dtype}, not of numbers")
    values = memoryview(content)[file.tell() :]
    count = 1
    for size in shape:
        count *= size
    if min(shape, default=0) < 0 or count * dtype.itemsize != len(values):
        raise ValueError(f"{len(values)} bytes for an array of {dtype} {list(shape)}")
    array = np.frombuffer(values, dtype=dtype).reshape(shape, order="F" if fortran_order else "C")
    return np.ascontiguousarray(array, dtype=dtype.newbyteorder("=")).reshape(shape).copy()
