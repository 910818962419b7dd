"""Run files: where runs lie, the file by which a folder is known as a run of `ff.train`, and what it has of a run."""

RUNS_DIR = "runs"
"""The folder of all runs, in the current folder, unless the caller names another."""
SETTINGS_FILE = "settings.json"
ALWAYS_RECORDED, RECORDED_IF_GIVEN = ("steps", "batch_size", "clip", "seed"), ("epochs", "drop_last")
"""The run's own settings in that file. The task's arguments stand apart from them, under ARGUMENTS_KEY."""
ARGUMENTS_KEY = "task_arguments"
