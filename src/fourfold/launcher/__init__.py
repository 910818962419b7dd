"""Starts ranks, restarts them, finds the one that hangs."""
