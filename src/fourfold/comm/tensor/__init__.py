"""Collectives of activations among the ranks of the tensor axis, on one protocol."""
