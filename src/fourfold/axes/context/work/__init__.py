"""The context axis's work on tensors: ring attention, Ulysses, masks, dropout."""
