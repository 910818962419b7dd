"""Dtypes: what buckets are made of, and what sums are made in."""

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket


def bucket_dtype(bucket: Bucket) -> torch.dtype:
    """The dtype that a bucket names."""
    return getattr(torch, bucket.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and residuals: float32, or the numbers' own dtype if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def autocast_device(tensor: Tensor) -> str:
    """The type of the device whose autocast applies to a tensor. On the meta device, which has none, that of a CPU."""
    return "cpu" if tensor.is_meta else tensor.device.type
