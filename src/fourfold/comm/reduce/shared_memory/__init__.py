"""Transport over shared memory: the ranks of one host reduce without messages."""
