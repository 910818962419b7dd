"""ff.optim: optimizers with layer-wise rates, torch optimizers that also run on flat buffers; and flat updates.

Law: `LARS` and `LAMB` compute the same updates alone, in a `DistributedOptimizer` and under `parallelize`.
"""

from fourfold.optim.lars_lamb import LAMB, LARS

__all__ = ["LAMB", "LARS"]
