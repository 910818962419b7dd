"""Tools on torch: its private parts, memory, deferred weights, recomputation, deferred gradients."""
