"""Sequence parallelism in a step: token shards, attention over all of them, and the checks on the model."""
