"""The context axis, in one folder."""
