"""Floor 4: how processes come to be."""
