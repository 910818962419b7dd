"""Run files: where runs lie."""

RUNS_DIR = "runs"
"""The folder of all runs, in the current folder, unless the caller names another."""
