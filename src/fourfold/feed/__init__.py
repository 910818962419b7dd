"""The data plane: sources, and how batches are fed from them."""
