"""Generators: where torch draws random numbers on a rank: the CPU's generator, and that of the rank's own device.

Law: no other device's generator is read or changed, whichever device is the current one.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The CPU's default generator, and that of a GPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def states_of(device: torch.device) -> list[Tensor]:
    """The states of these generators."""
    return [each.get_state() for each in generators_of(device)]


def restore(device: torch.device, states: list[Tensor]) -> None:
    """Give these generators the states that they had."""
    for generator, state in zip(generators_of(device), states, strict=True):
        generator.set_state(state)


def seed(device: torch.device, number: int) -> None:
    """Seed these generators."""
    # Not torch.manual_seed, which seeds all GPUs, nor torch.cuda.manual_seed, which seeds the current one.
    for generator in generators_of(device):
        generator.manual_seed(number)


@contextlib.contextmanager
def unchanged(device: torch.device) -> Iterator[None]:
    """Whatever is drawn or seeded within, the generators are afterwards as they were."""
    before = states_of(device)
    try:
        yield
    finally:
        restore(device, before)
