"""Words: the nouns that every floor shares. Standard library only."""
