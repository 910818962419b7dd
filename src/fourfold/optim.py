"""The door's optimizers: torch optimizers like any other, whose updates also run on flat buffers.

Law: `LARS` and `LAMB` do the same alone, in a `DistributedOptimizer` and under `parallelize`.
"""

from fourfold.parts.optim.lars_lamb import LAMB, LARS

__all__ = ["LAMB", "LARS"]
