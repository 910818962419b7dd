"""Floor 6: what this machine means for training."""
