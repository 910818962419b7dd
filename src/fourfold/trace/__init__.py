"""What a run's trace says: events of ranks, costs of actions, stragglers, where a step's seconds went. No torch."""
