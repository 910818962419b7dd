"""Update slices: how large the parts of a bucket are that one update works on."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fourfold.axes.data.rules.buckets import Bucket, Slot
from fourfold.comm.reduce.protocol import BucketSlice
from fourfold.optim.flat_optimizer import update_slices


@pytest.mark.parametrize(("device", "largest"), [("cpu", 2**18), ("meta", 2**24)])
def test_a_gpu_updates_larger_slices_than_a_cpu(device, largest):
    """A CPU's fit its cache; a GPU is launched less often. The meta device stands for a GPU."""
    size = 2**24 + 2**20 + 5
    bucket = Bucket(0, (Slot("weight", 0, size),), size, "float32", 4, 0)
    flat = torch.empty(size, device="meta") if device == "meta" else torch.empty(1).expand(size)
    views = SimpleNamespace(reduced_views=lambda _: [BucketSlice(0, size, flat)])
    masters = SimpleNamespace(by_bucket=[None])
    whole = [BucketSlice(0, size, flat)]
    options: dict[str, Any] = {"split_by_param": False, "is_chunked": True}
    (slices,) = update_slices(whole, cast(Any, masters), [bucket], cast(Any, views), **options)
    assert max(each.stop - each.start for each in slices) == largest
    assert [each.start for each in slices] == [0, *(each.stop for each in slices[:-1])]
    assert slices[-1].stop == size
