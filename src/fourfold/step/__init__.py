"""One optimizer update: a plan and a model become a training step."""
