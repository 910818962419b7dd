"""Values of MosaicML's MDS: how the bytes of a column are read.

encoding  what a column holds, such as `int`, `ndarray:float32:3,4` or `jpeg`; with a fixed size, or one in each sample
Law: what an encoding claims, a shape or a size, must account for every byte of the value. `pkl` is refused.

Source: mosaicml-streaming 0.13.0, base/format/mds/encodings.py.
"""

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fourfold.feed.formats.plain_values import parse_json, stackable
from fourfold.feed.pack.schema import EncodedImage

FLOATS = ("float16", "float32", "float64")
SCALARS = (*(f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)), *FLOATS)
CODES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4"}
VALUE_DTYPES = CODES | {64: "<u8", 65: "<i8", 66: "<f8"}
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}  # of Pillow's modes
MAX_DIMS = 64


class Encoding(NamedTuple):
    """How a column's values are read. `size`: of each in bytes; None: it differs."""

    decode: Callable[[bytes], Any]
    size: int | None = None


def parse_encoding(text: str) -> Encoding:
    """The encoding of this name. Raises ValueError if it is unknown, or cannot be read here."""
    name, _, config = text.partition(":")
    if name == "ndarray":
        return _ndarray(config)
    if name == "pkl":
        raise ValueError("a pickle, which is never read")
    if not config and name in SCALARS:
        dtype = np.dtype(name).newbyteorder("<")
        return Encoding(lambda content: _array(content, dtype, ()), dtype.itemsize)
    if config or name not in DECODERS:
        raise ValueError(f"encoding {text[:60]!r}, not one of {', '.join([*DECODERS, 'ndarray'])} or a number")
    return DECODERS[name]


def _array(content: bytes | memoryview, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for {dtype.name} {list(shape)}")
    return np.frombuffer(content, dtype=dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _ndarray(config: str) -> Encoding:
    dtype_text, _, shape_text = config.partition(":")
    if dtype_text and dtype_text not in SCALARS:
        raise ValueError(f"ndarray of {dtype_text[:60]!r}")
    dtype = np.dtype(dtype_text).newbyteorder("<") if dtype_text else None
    shape = tuple(map(int, shape_text.split(","))) if shape_text else None
    if shape is not None and (min(shape) < 1 or len(shape) > MAX_DIMS or math.prod(shape) > 2**40):
        raise ValueError(f"ndarray of shape {shape_text[:60]}")

    def decode(content: bytes) -> np.ndarray:
        at, own_dtype, own_shape = 0, dtype, shape
        if own_dtype is None:
            if content[:1] and content[0] in VALUE_DTYPES:
                own_dtype, at = np.dtype(VALUE_DTYPES[content[0]]), 1
            else:
                raise ValueError(f"an array of dtype {content[:1].hex() or 'none'}")
        if own_shape is None:
            if len(content) <= at:
                raise ValueError("an array without a shape")
            num_dims, item = content[at] >> 2, 1 << (content[at] & 3)
            dims = content[at + 1 : at + 1 + num_dims * item]
            if len(dims) < num_dims * item:
                raise ValueError(f"an array whose shape is cut off, of {num_dims} dims")
            own_shape = tuple(int(size) for size in np.frombuffer(dims, dtype=f"<u{item}"))
            at += 1 + len(dims)
        return _array(memoryview(content)[at:], own_dtype, own_shape)

    fixed = dtype is not None and shape is not None
    return Encoding(decode, math.prod(shape) * dtype.itemsize if fixed else None)  # type: ignore[arg-type,union-attr]


def _int64(content: bytes) -> np.ndarray:
    return _array(content, np.dtype("<i8"), ())


def _whole_number(content: bytes) -> int:
    if len(content) > 20:  # more digits than int64 has: Python's ints have no bound
        raise ValueError(f"a whole number of {len(content)} digits")
    return stackable(int(content.decode()))


def _pil(content: bytes) -> np.ndarray:
    """Pixels: uint8 [3, height, width], as Pillow converts them to RGB."""
    if len(content) < 12:
        raise ValueError(f"an image of {len(content)} bytes")
    width, height, mode_bytes = struct.unpack_from("<III", content)
    mode = content[12 : 12 + min(mode_bytes, 16)].decode()
    if len(mode) != mode_bytes or mode not in CHANNELS:
        raise ValueError(f"an image of mode {mode!r}, not {', '.join(CHANNELS)}")
    pixels = _array(memoryview(content)[12 + mode_bytes :], np.dtype("u1"), (height, width, CHANNELS[mode]))
    rgb = pixels[..., :3] if mode != "L" else np.repeat(pixels, 3, axis=2)
    return np.ascontiguousarray(rgb.transpose(2, 0, 1))


DECODERS = {
    "bytes": Encoding(bytes),
    "str": Encoding(lambda content: content.decode()),
    "int": Encoding(_int64, 8),
    "str_int": Encoding(_whole_number),
    "str_float": Encoding(lambda content: float(content.decode())),
    "str_decimal": Encoding(lambda content: content.decode()),
    "json": Encoding(parse_json),
    "jpeg": Encoding(EncodedImage),
    "png": Encoding(EncodedImage),
    "pil": Encoding(_pil),
}
