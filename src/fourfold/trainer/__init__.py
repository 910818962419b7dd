"""Floor 5: a run of a task, from start to end: settings, training loop, folder, log, heartbeat, trace, stop signals."""
