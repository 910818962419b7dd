"""Floor 1: thinking. No torch."""
