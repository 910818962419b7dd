"""Compression of records with zstd, an optional library.

Law: what a record claims to decompress to is bounded before memory is reserved for it.
"""

import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from fourfold.feed.optional_package import import_optional
from fourfold.feed.unpacked import check_fits
from fourfold.words.noop import noop

LEVEL = 3
Compression = Literal["none", "zstd"]


class Codec(threading.local):
    """One compressor and one decompressor for each thread: they are not safe to share."""

    def __init__(self) -> None:
        got, need = "compression zstd, and no zstandard", "zstandard, which reads and writes it"
        self._library = import_optional("zstandard", need, "zstd", got=got, where="the pack")
        self._compressor = self._library.ZstdCompressor(level=LEVEL)
        self._decompressor = self._library.ZstdDecompressor()

    def compress(self, record: bytes) -> bytes:
        """One zstd frame that says how long the record is."""
        return self._compressor.compress(record)

    def decompress(self, stored: Any, max_bytes: int, reserve: Callable[[int], Any] = noop) -> np.ndarray:
        """The record. Raises ValueError if it is damaged, or claims to be longer than `max_bytes`.

        `reserve` is called with its length before memory is reserved for it.
        """
        try:
            claimed = self._library.frame_content_size(stored)
            if not 0 <= claimed <= max_bytes:
                raise ValueError(f"a frame of {claimed} bytes, of at most {max_bytes}")
            check_fits(claimed, "a record", times=3)  # as it is stored, as it is, and its values
            reserve(claimed)
            record = self._decompressor.decompress(stored)
        except (self._library.ZstdError, MemoryError) as error:
            raise ValueError(str(error)) from error
        if len(record) != claimed:
            raise ValueError(f"a frame of {claimed} bytes that holds {len(record)}")
        return np.frombuffer(record, dtype=np.uint8)
