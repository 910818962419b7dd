"""What the context axis gives a step: shards of a batch, attention that reaches all tokens, and their proof."""
