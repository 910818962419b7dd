"""A headless Chromium for tests of pages; they are skipped where none is installed."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(PATH is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH")


def command(*arguments: str, profile: Path) -> list[str]:
    """The command line of a browser without a window, with a profile of its own."""
    assert PATH is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    return [PATH, *flags, f"--user-data-dir={profile}", *arguments]


def dump_dom(url: str, *, virtual_milliseconds: int = 2000, timeout: float = 60) -> str:
    """The document of a page after its scripts have run for so long on the page's own clock."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = (f"--virtual-time-budget={virtual_milliseconds}", "--dump-dom", url)
        ended = subprocess.run(command(*arguments, profile=Path(profile)), capture_output=True, timeout=timeout)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    return ended.stdout.decode()
