"""Decide: from a question about a plan, and what plans would take, to the plan that is best, and why."""
