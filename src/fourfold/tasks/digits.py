"""Handwritten digits: a small convolutional network on scikit-learn's 1797 images of 8 × 8 pixels.

Law: the split is by a sample's number alone: every fifth is for validation.

B batch · C channels
"""

import functools
import gzip
import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.feed.source import TensorSource
from fourfold.words.errors import Problem, SettingError, TaskError
from fourfold.words.task import Data, Task

NUM_CLASSES = 10
SIDE = 8  # pixels
IMAGES = "datasets/data/digits.csv.gz"  # in scikit-learn's folder, whose import would take a second on every rank
MAX_PIXEL_VALUE = 16.0
GROUP_CHANNELS = 8  # channels normalized together
TUNED_BATCH_SIZE = 64  # samples; the default learning rate was tuned with it


def task(
    *,
    channels: int = 32,
    steps: int = 400,
    batch_size: int = TUNED_BATCH_SIZE,
    lr: float = 3e-3,
    weight_decay: float = 0.01,
) -> Task:
    """The task with these settings. Raises SettingError, or TaskError if scikit-learn is missing."""
    if channels < 1 or channels % GROUP_CHANNELS:
        fitting = max(channels // GROUP_CHANNELS, 1) * GROUP_CHANNELS
        raise SettingError(
            Problem(f"channels = {channels}", f"a multiple of {GROUP_CHANNELS}", f"channels={fitting}"),
            where="the settings of digits",
        )
    sklearn_folder()  # if it is missing, that is said before a rank starts
    return Task(
        model=functools.partial(Network, channels=channels),
        loss=loss,
        data=open_data,
        optimizer=functools.partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay, fused=True),
        evaluate=evaluate,
        schedule=schedule,
        tensor=TENSOR_RULES,
        steps=steps,
        batch_size=batch_size,
        tuned_for=TUNED_BATCH_SIZE,
    )


# The first and third convolution by output channels, what follows each by input channels or features.
TENSOR_RULES = {
    "layers.0": "column",
    "layers.1": "channels",
    "layers.3": "row",
    "layers.7": "column",
    "layers.8": "channels",
    "layers.11": "row",
}


class Network(nn.Module):
    """Three convolutions with group normalization: images [B, 1, 8, 8] -> logits [B, 10]."""

    def __init__(self, *, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_conv_norm_relu(1, channels),
            *_conv_norm_relu(channels, channels),
            nn.MaxPool2d(2),
            *_conv_norm_relu(channels, 2 * channels),
            nn.Flatten(),
            nn.Linear(2 * channels * (SIDE // 2) ** 2, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def _conv_norm_relu(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(outputs // GROUP_CHANNELS, outputs),
        nn.ReLU(),
    )


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every sample: [B]."""
    return F.cross_entropy(logits, targets, reduction="none")


def evaluate(logits: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, int]]:
    """The fraction of samples with the right class, as (correct, count)."""
    return {"accuracy": ((logits.argmax(dim=-1) == targets).sum(), targets.numel())}


def open_data() -> Data:
    """All images in memory, every fifth held out. Raises TaskError if scikit-learn is missing."""
    with gzip.open(sklearn_folder() / IMAGES) as file:
        rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    images = rows[:, :-1].reshape(-1, 1, SIDE, SIDE) / MAX_PIXEL_VALUE
    classes = rows[:, -1].long()
    held_out = torch.arange(len(classes)) % 5 == 4
    return Data(
        train=TensorSource(images[~held_out], classes[~held_out]),
        valid=TensorSource(images[held_out], classes[held_out]),
    )


def sklearn_folder() -> Path:
    """The folder of scikit-learn, which contains the images. Raises TaskError if it is missing."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise TaskError(
            Problem("scikit-learn is not installed", "its images of digits", "pip install scikit-learn"),
            where="digits",
        )
    return Path(spec.submodule_search_locations[0])


def schedule(step: int, steps: int) -> float:
    """The learning rate's factor at `step` of 0 .. steps - 1: half a cosine down."""
    return 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))
