"""The sequence axis, with tensors: exact attention over sequences whose tokens are split among ranks."""
