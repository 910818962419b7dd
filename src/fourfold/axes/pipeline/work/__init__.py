"""The pipeline axis's work on a model that nobody rewrote: chain, gates, messages."""
