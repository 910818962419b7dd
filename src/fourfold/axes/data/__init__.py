"""The data axis, in one folder."""
