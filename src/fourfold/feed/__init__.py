"""Floor 2: the data plane: sources, and how batches are fed from them."""
