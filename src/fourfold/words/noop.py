"""noop: the callback that does nothing."""


def noop(*_: object) -> None:
    """Take any arguments, and do nothing."""
