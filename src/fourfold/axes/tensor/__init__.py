"""The tensor axis, in one folder."""
