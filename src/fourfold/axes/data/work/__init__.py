"""The data axis's work on tensors: buckets of gradients, sharded weights, local steps."""
