"""What the first batch shows of a model whose batches are split, before a weight changes."""
