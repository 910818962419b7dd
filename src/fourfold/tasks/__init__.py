"""Built-in tasks: single-device code that knows no ranks. `lm` a byte-level language model, `digits` images."""
