"""The column of the pipeline axis: stages, schedules."""
