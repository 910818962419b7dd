"""Environment: what the launcher and the machine say about this process. Standard library only."""
