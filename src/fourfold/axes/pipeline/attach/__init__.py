"""What the pipeline axis gives a step: a stage's edges and its part of the model, and their proof."""
