"""SplitMix64: the constants of its stream and of its finalizer, as unsigned numbers.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
"""

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1, MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
