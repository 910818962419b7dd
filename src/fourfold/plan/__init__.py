"""Plan: everything that can be decided without a tensor. No torch."""
