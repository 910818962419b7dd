"""Floor 5: a whole run of a task: many steps, its folder, its log."""
