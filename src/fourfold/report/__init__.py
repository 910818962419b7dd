"""Floor 4: what a person sees of a run."""
