"""Floor 7: the command line, `fourfold …`."""

from fourfold.cli.entry import main

__all__ = ["main"]
