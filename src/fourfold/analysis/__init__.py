"""Floor 5: what a plan will do: its program, its memory, and the proof against one device."""
