"""The pipeline axis: schedules as lists, the sends between stages, and the proof that a program ends."""
