"""What the tensor axis gives a step: which modules are split, the split model, and its proof."""
