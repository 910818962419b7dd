"""Floor 6: how processes come to be."""
