"""Sharing: the ranks of one host that need the same samples read them once."""
