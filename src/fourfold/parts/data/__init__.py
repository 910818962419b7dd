"""The data axis, with tensors."""
