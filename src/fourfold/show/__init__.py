"""What a plan will do, as text."""
