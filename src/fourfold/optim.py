"""ff.optim: optimizers with layer-wise rates. They are torch optimizers whose updates also run on flat buffers.

Law: `LARS` and `LAMB` compute the same updates alone, in a `DistributedOptimizer` and under `parallelize`.
"""

from fourfold.parts.optim.lars_lamb import LAMB, LARS

__all__ = ["LAMB", "LARS"]
