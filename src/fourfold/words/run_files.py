"""Run files: where runs lie, and the file by which a folder is known as a run of `ff.train`."""

RUNS_DIR = "runs"
"""The folder of all runs, in the current folder, unless the caller names another."""
SETTINGS_FILE = "settings.json"
