"""What a plan will take before it runs: facts of a model, prices of a machine, and the step and memory they give."""
