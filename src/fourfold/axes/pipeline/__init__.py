"""The pipeline axis, in one folder."""
