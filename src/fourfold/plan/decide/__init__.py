"""Which plan a task should have on a cluster: the plans that are possible, priced, and the best of them."""
