"""A run of a task, from start to end: settings, loop, folder, log, callbacks, heartbeat, trace, stops."""
