"""Which sample each rank trains on at each step. No torch."""
