"""What ranks hash and compare: one table, and who computes each kind of digest."""
