"""Floor 3: one optimizer update. A plan and a model become a training step."""
