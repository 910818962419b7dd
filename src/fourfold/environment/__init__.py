"""Floor 0: what the launcher and the machine say. Standard library only."""
