"""Messages between neighbouring stages of a pipeline."""
