"""Benches: every speed claim of Fourfold, as a ratio to a peer that takes turns with it in one run, with medians."""
