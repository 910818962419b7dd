"""Benches: every speed claim of Fourfold as a ratio against a peer, interleaved in one run, printed with medians."""
