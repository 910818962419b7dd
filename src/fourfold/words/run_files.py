"""Run files: where runs lie, the names of their files, and what settings.json has of a run."""

RUNS_DIR = "runs"
"""The folder of all runs, in the current folder, unless the caller names another."""
SETTINGS_FILE = "settings.json"
"""By this file a folder is known as a run of `ff.train`."""
LOG_FILE, PLAN_FILE, CONFIG_FILE = "metrics.jsonl", "plan.toml", "config.toml"
PREDICTION_FILE = "prediction.json"
ALWAYS_RECORDED, RECORDED_IF_GIVEN = ("steps", "batch_size", "clip", "seed"), ("epochs", "drop_last")
"""The run's own settings in settings.json. The task's arguments stand apart from them, under ARGUMENTS_KEY."""
ARGUMENTS_KEY = "task_arguments"
