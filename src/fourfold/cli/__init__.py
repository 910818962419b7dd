"""The command line, `fourfold …`. Importing this package imports next to nothing: the command begins here."""

from collections.abc import Sequence

from fourfold.environment import early_sigterm


def main(arguments: Sequence[str] | None = None) -> None:
    """The `fourfold` command. Always ends the process: raises SystemExit. `arguments`: None: the process's own."""
    early_sigterm.install()
    try:
        from fourfold.cli.entry import main as run_command

        run_command(arguments)
    finally:
        if arguments is not None:  # a program may go on
            early_sigterm.restore()
