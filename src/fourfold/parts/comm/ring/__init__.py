"""Exchanges of blocks between the ranks of a sequence-parallel group."""
