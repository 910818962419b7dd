"""ff.losses: losses that keep less memory than torch's.

Law: values and gradients are those of torch's functions of the same names, without reduction.
"""

from fourfold.axes.tensor.work.cross_entropy import cross_entropy

__all__ = ["cross_entropy"]
