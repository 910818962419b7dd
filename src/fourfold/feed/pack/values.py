"""Values: samples to the parts of records, and back to tensors.

part  a contiguous buffer; the parts of a sample, joined, are its record
Law: what comes back of a sample stacks to the same batch as the sample itself.
"""

import io
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.feed.optional_package import import_optional
from fourfold.feed.pack.schema import (
    BYTES_LIKE,
    DTYPE_OF_NUMBER,
    ITEM_BYTES,
    OPEN,
    EncodedImage,
    Extent,
    Field,
    Kind,
    Schema,
    build,
    is_possible,
    leaves,
)
from fourfold.feed.unpacked import check_fits
from fourfold.torch_kit.tensor_tree import tensor_of_list
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DataError, Problem

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
KINDS: dict[type, Kind] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "text",
    bytes: "bytes",
    bytearray: "bytes",
}
INT64 = range(-(2**63), 2**63)
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
IMAGE_THREADS, PIXEL_BYTES = 4, 8  # that decode at once; of a pixel as it is stored, as RGB, and in the batch
BITS_PER_SAMPLE, TILE_WIDTH, TILE_HEIGHT = 258, 322, 323  # TIFF 6.0, sections 8 and 15
ORIENTATION = 0x0112  # of EXIF: how the pixels are turned to be upright
FLIPS = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}
"""By orientation: the steps through rows and columns, from 5 on after the two have changed places."""
STRUCT_OF_NUMBER = {"int": struct.Struct("<q"), "float": struct.Struct("<d"), "bool": struct.Struct("<?")}
Part = bytes | memoryview


def schema_of(sample: Any, key: str) -> Schema:
    """The schema of one sample, with the sizes it has. Raises DataError for values that cannot be packed."""
    fields, problems = [], []
    is_pair = isinstance(sample, tuple | list)
    if not isinstance(sample, dict) and not (is_pair and len(sample) == 2):
        got = f"{key} is a {type(sample).__name__}"
        raise DataError(Problem(got, "a pair (inputs, targets), or a dict"), where="the samples to pack")
    for path, value in leaves(sample):
        field = _field_of(path, value) if all(isinstance(name, str) and name for name in path) else None
        if field is None:
            got = f"{key}: {'.'.join(map(str, path))} is {_describe(value)}"
            need = "a tensor, an array, a number, text or bytes, under names that are text"
            problems.append(Problem(got, need, "a source that leaves it out"))
        else:
            fields.append(field)
    if not fields and not problems:
        problems.append(Problem(f"{key} has no values", "at least one"))
    if problems:
        raise DataError(problems, where="the samples to pack")
    return Schema(tuple(fields), is_pair)


def _describe(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _field_of(path: tuple[str, ...], value: Any) -> Field | None:
    kind = _kind_of(value)
    if kind is not None and kind != "array":
        return Field(path, kind, DTYPE_OF_NUMBER[kind]) if kind in DTYPE_OF_NUMBER else Field(path, kind, shape=(OPEN,))
    tensor = _as_tensor(value)
    if tensor is None or tensor.dtype not in NAME_OF_DTYPE:
        return None
    return Field(path, "array", NAME_OF_DTYPE[tensor.dtype], tuple(tensor.shape))


def _kind_of(value: Any) -> Kind | None:
    """None: of no kind, unless it is an array."""
    if isinstance(value, np.generic):  # np.float64 is a float of Python too
        return "array"
    if isinstance(value, EncodedImage):
        return "image"
    return KINDS.get(type(value))


def _as_tensor(value: Any) -> Tensor | None:
    """A dense tensor of the value, with its dtype; of a list of numbers as torch makes it."""
    if isinstance(value, Tensor):
        return value.detach().cpu() if value.layout is torch.strided and not value.is_quantized else None
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
        try:
            return torch.from_numpy(array if array.flags.writeable else array.copy())
        except TypeError:  # of a dtype that torch does not have: objects, dates, longdouble
            return None
    if isinstance(value, list):
        try:
            return tensor_of_list(value)
        except (TypeError, ValueError, RuntimeError):
            return None
    return None


class Encoder:
    """Samples of one schema to parts. Raises DataError for a sample of another schema, with its key."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._paths = [field.path for field in schema.fields]
        self._head = struct.Struct(f"<{schema.num_open_dims}Q")

    def encode(self, sample: Any, key: str) -> list[Part]:
        """The parts of a sample's record."""
        found = list(leaves(sample))
        if [path for path, _ in found] != self._paths or isinstance(sample, tuple | list) != self.schema.is_pair:
            raise self._mismatch(key, ", ".join(".".join(map(str, path)) for path, _ in found), "the fields")
        parts: list[Part] = []
        sizes: list[int] = []
        for field, (_, value) in zip(self.schema.fields, found, strict=True):
            parts.append(self._part(field, value, sizes, key))
        return [self._head.pack(*sizes), *parts] if self._head.size else parts

    def _part(self, field: Field, value: Any, sizes: list[int], key: str) -> Part:
        if field.kind in BYTES_LIKE:
            if _kind_of(value) != field.kind:
                raise self._mismatch(key, f"{field.name} = {_describe(value)}", field.describe())
            content = value.encode("utf-8", "surrogatepass") if field.kind == "text" else bytes(value)
            sizes.append(len(content))
            return content
        if field.kind in STRUCT_OF_NUMBER:
            return self._number(field, value, key)
        tensor = _as_tensor(value)
        if tensor is None or NAME_OF_DTYPE.get(tensor.dtype) != field.dtype or tensor.dim() != len(field.shape):
            got = _describe(value) if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise self._mismatch(key, f"{field.name} = {got}", field.describe())
        for size, need in zip(tensor.shape, field.shape, strict=True):
            if need == OPEN:
                sizes.append(size)
            elif need != size:
                raise self._mismatch(key, f"{field.name} of shape {list(tensor.shape)}", field.describe(), field.name)
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""

    def _number(self, field: Field, value: Any, key: str) -> bytes:
        kind = _kind_of(value)
        if kind != field.kind and not (kind == "int" and field.kind == "float"):
            raise self._mismatch(key, f"{field.name} = {_describe(value)}", field.describe())
        if field.kind == "int" and value not in INT64:
            raise self._mismatch(key, f"{field.name} = {value}", "a number of 64 bits")
        if field.kind == "float" and kind == "int" and not (value in INT64 and float(value) == value):
            raise self._mismatch(key, f"{field.name} = {value}", "a number that a float has room for")
        return STRUCT_OF_NUMBER[field.kind].pack(value)

    def _mismatch(self, key: str, got: str, need: str, variable: str = "") -> DataError:
        if need == "the fields":
            need = f"the fields {comma_list(field.name for field in self.schema.fields)}"
        attempt = f"variable={variable}" if variable else "a source whose samples have one schema"
        return DataError(Problem(f"{key}: {got}", f"{need}, as in the first samples", attempt), where="the pack")


def decode(schema: Schema, record: np.ndarray, *, images: bool) -> Any:
    """The sample of a record: uint8 [record bytes]. Raises ValueError for a record that cannot be one.

    images: decoded to uint8 [3, height, width]; else they stay bytes.
    """
    if len(record) < schema.head_bytes:
        raise ValueError(f"a record of {len(record)} bytes, shorter than its head")
    sizes = record[: schema.head_bytes].copy().view("<u8").tolist()
    extents = []
    for extent in schema.extents(sizes):
        extents.append(extent)
        if extent.stop > len(record) or not is_possible(extent.shape):
            raise ValueError(f"{extent.field.name} of {extent.shape} ends at byte {extent.stop} of {len(record)}")
    if extents[-1].stop != len(record):
        raise ValueError(f"a record of {len(record)} bytes, and fields of {extents[-1].stop}")
    return build(schema, [_value(each, record[each.start : each.stop], images) for each in extents])


def _value(extent: Extent, content: np.ndarray, images: bool) -> Any:
    kind = extent.field.kind
    if kind == "array":
        return tensor_of(content, extent.field.dtype, extent.shape)
    data = content.tobytes()
    if kind in STRUCT_OF_NUMBER:
        return STRUCT_OF_NUMBER[kind].unpack(data)[0]
    if kind == "text":
        return data.decode("utf-8", "surrogatepass")
    return decode_image(data) if kind == "image" and images else EncodedImage(data) if kind == "image" else data


def tensor_of(content: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A copy of bytes as a tensor of this dtype and shape."""
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    if len(content):
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = content
    return tensor


def decode_image(content: bytes) -> Tensor:
    """The pixels of an image file, upright: uint8 [3, height, width]. Raises ValueError if it is damaged."""
    pillow = import_optional("PIL.Image", "Pillow, which decodes images", "images", got="images, and no Pillow")
    try:
        with pillow.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            tags = getattr(image, "tag_v2", {})  # of a TIFF, which is unpacked by whole tiles, however small it is
            width, height = max(image.width, tags.get(TILE_WIDTH, 0)), max(image.height, tags.get(TILE_HEIGHT, 0))
            check_fits(IMAGE_THREADS * PIXEL_BYTES * width * height, f"{width} × {height} pixels")
            # Pillow would cut them down to 8 bits. A PNG's it reads in layouts named I;16B, RGB;16B, LA;16B, …
            if ";16B" in str(image.tile) or max(tags.get(BITS_PER_SAMPLE, (1,))) > 8:
                raise ValueError("samples of more than 8 bits in an image; with images=False they are bytes")
            pixels = _upright(np.array(image.convert("RGB")), image)
    except ValueError:
        raise
    except pillow.UnidentifiedImageError as error:  # whose message has an address, which is another in each attempt
        raise ValueError(f"it is no {', '.join(IMAGE_FORMATS)}") from error
    except Exception as error:  # Pillow's parsers raise what their input leads to: TypeError, struct.error, …
        raise ValueError(f"an image that cannot be decoded: {str(error) or type(error).__name__}") from error
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _upright(pixels: np.ndarray, image: Any) -> np.ndarray:
    """A view of an image's pixels [height, width, 3], turned as its EXIF data says."""
    try:
        orientation = image.getexif().get(ORIENTATION)  # Pillow has turned a TIFF, and has removed it
    except Exception:  # damaged data, whatever its parser raises: Pillow's own readers ignore them too
        return pixels
    rows, columns = FLIPS.get(orientation, (1, 1))
    turned = pixels.swapaxes(0, 1) if orientation in FLIPS and orientation > 4 else pixels
    return turned[::rows, ::columns]
