"""Transports: how the gradients and weights of a bucket travel between data-parallel ranks."""
