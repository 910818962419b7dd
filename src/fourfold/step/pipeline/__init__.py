"""The pipeline axis of a step: stages of a model that is not rewritten, and how they pass tensors on."""
