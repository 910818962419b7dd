"""Floor 2: doing. The columns again, now with tensors."""
