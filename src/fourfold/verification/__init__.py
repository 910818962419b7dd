"""Verify: a plan's training beside that of one device."""
