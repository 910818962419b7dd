"""The sequence axis, with tensors: exact attention over sharded sequences."""
