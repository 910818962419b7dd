"""Density: how many elements a codec sends of each tensor. Of a gradient, or of activations between stages."""

import math


def num_sent(num_elements: int, density: float) -> int:
    """How many of the elements are sent: n − ⌊n·η⌋ with η = 1 − density, at least one."""
    # 0.1 of ten elements is one, not two: the error of binary fractions at the 9th digit is no element.
    return max(1, min(num_elements, math.ceil(num_elements * density - 1e-9)))
