"""CRC-32C: the values of RFC 3720, by numpy and by the library, which is used if it is installed."""

import sys

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.feed.formats import tfrecord as own

VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (b"123456789", 0xE3069283),
]


@pytest.fixture(autouse=True)
def _forget():
    yield
    own.fastest.cache_clear()


@pytest.mark.parametrize(("message", "value"), VECTORS)
def test_the_values_of_the_rfc(message, value):
    assert own.crc32c_by_numpy(message) == own.fastest()(message) == value


@given(st.binary(max_size=3000))
def test_numpy_and_the_library_agree(message):
    assert own.crc32c_by_numpy(message) == crc32c.crc32c(message)
    rows = np.frombuffer(message * 2, np.uint8).reshape(2, -1)
    assert own.masked_crc32c_of_rows(rows).tolist() == [own.masked_crc32c(message)] * 2


def test_without_the_library_numpy_computes_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "crc32c", None)
    own.fastest.cache_clear()
    assert own.fastest() is own.crc32c_by_numpy
