"""The tensor axis's work on tensors: split layers, logits and cross-entropy."""
