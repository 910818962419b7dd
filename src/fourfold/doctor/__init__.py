"""This machine: what was found, what it means for training, what to fix."""
