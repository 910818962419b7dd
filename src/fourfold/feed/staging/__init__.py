"""Staging: copies of a data set's shards on a node's own disk, made ahead of need."""
