"""Rules of the data axis: who holds what, what is sent, and when buckets are updated. No torch."""
