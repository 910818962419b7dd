"""All communication in a step: communicators, reductions, edges, rings, over shared memory or a process group."""
