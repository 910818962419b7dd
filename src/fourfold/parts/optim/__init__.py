"""Optimizer updates over flat buffers."""
