"""Floor 5: what a plan will do (its program, its memory, the bytes it sends), and the proof against one device."""
