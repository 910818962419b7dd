"""Floor 0: the nouns. Standard library only."""
