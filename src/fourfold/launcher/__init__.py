"""Floor 6: starts ranks, restarts them, finds the one that hangs."""
