"""Watch: `fourfold watch`: which run is shown, and the server's life.

Law: what was typed is checked before the server starts; Ctrl-C is its normal end, with exit code 0.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from fourfold.cli import sigint
from fourfold.cli.output import print_text
from fourfold.words.errors import Problem, SettingError, closest_match, os_error_text
from fourfold.words.run_files import LOG_FILE, RUNS_DIR, SETTINGS_FILE
from fourfold.words.terminal_text import escape_controls

WHERE = "fourfold watch"
MAX_PORT = 65535
MAX_NAMED = 5  # runs that exist, where none has a name like the one that was typed


def watch_run(words: Sequence[str], port: str) -> int:
    """`fourfold watch`; returns the exit code. Raises SettingError."""
    if not (port.isascii() and port.isdecimal() and int(port) <= MAX_PORT):
        raise SettingError(Problem(f"--port {port}", f"a whole number from 0 to {MAX_PORT}"), where=WHERE)
    if len(words) > 1:
        attempt = f"fourfold watch {words[0]}, or fourfold report {' '.join(words)}"
        raise SettingError(Problem(f"{len(words)} runs", "one run, or none for the newest", attempt), where=WHERE)
    path = _find(words[0], Path(RUNS_DIR)) if words else _newest(Path(RUNS_DIR))
    _serve(path, int(port))
    return 0


def _serve(path: Path, port: int) -> None:
    from fourfold.report.live import LiveRun, LiveServer

    try:
        server = LiveServer(LiveRun(path), port=port)
    except OSError as error:
        problem = Problem(f"--port {port} ({os_error_text(error)})", "a free port", "no --port, which takes a free one")
        raise SettingError(problem, where=WHERE) from None
    with server:
        name = escape_controls(str(path))
        print(name if path.is_dir() else f"{name} does not exist yet; waiting for it to begin", flush=True)
        print(f"{server.url}   Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sigint.restore_and_raise()
            server.serve_forever(poll_interval=0.1)


def _find(word: str, parent: Path) -> Path:
    """The folder that a user named by its path or its name, whether it exists or not."""
    if not word or not word.isprintable():
        raise SettingError(Problem(f"the run {word!r}", "the folder of a run, or its name"), where=WHERE)
    for path in (Path(word), parent / word):
        with contextlib.suppress(OSError):  # a name that is too long for a file system
            if path.is_dir():
                return _checked(path, parent)
            if path.exists():
                raise SettingError(Problem(f"{path} is not a folder", "the folder of a run", "its name"), where=WHERE)
    path = Path(word) if len(Path(word).parts) > 1 else parent / word
    names = _names(path.parent)
    close = closest_match(path.name, names)
    if close is not None:
        print_text(f"there is a run {path.parent / close}")
    elif names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        print_text(f"runs in {path.parent}/: {', '.join(names[:MAX_NAMED])}{more}")
    return path


def _checked(path: Path, parent: Path) -> Path:
    """The path. Raises SettingError if the folder is not a run's: a run's has settings.json from the first moment."""
    if (path / SETTINGS_FILE).is_file():
        return path
    names = _names(parent)
    close = closest_match(path.name, names) or next(iter(names), None)
    attempt = f"fourfold watch {close}" if close else "fourfold train"
    raise SettingError(Problem(f"no {path / SETTINGS_FILE}", "the folder of a run", attempt), where=WHERE)


def _names(parent: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in parent.iterdir() if (path / SETTINGS_FILE).is_file())
    return []


def _newest(parent: Path) -> Path:
    """The run whose log grew last."""
    times = {}
    for name in _names(parent):
        with contextlib.suppress(OSError):
            times[name] = (parent / name / LOG_FILE).stat().st_mtime_ns
    if not times:
        raise SettingError(
            Problem(f"no run in {parent}/", "a run", "fourfold train, or fourfold watch RUN"), where=WHERE
        )
    return parent / max(times, key=lambda name: times[name])
