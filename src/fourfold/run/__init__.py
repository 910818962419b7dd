"""Floor 3: a plan and a task become a running program."""
