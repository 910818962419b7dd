"""The sequence axis of a step: token shards of a batch, and attention that reaches all tokens."""
