"""The data axis: buckets, where their tensors rest, and the program of a step. No torch."""
