"""A headless Chromium for tests of pages, which are skipped where none is installed.

tab  a page that the test loads, looks at and acts on, over pipes (the DevTools protocol needs no port this way)
Law: the browser ends with the block in which it was started.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(PATH is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--window-size=1200,1200",  # where a pointer is, is then in view
)
TIMEOUT = 60.0
POLL_SECONDS = 0.05


class Tab:
    """One tab. Values of JavaScript come back as JSON."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._session: str | None = None
        self._number, self._buffer = 0, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            poll = select.poll()  # unlike select, for any number of open files
            poll.register(self._read_fd, select.POLLIN)
            assert poll.poll(1000 * max(0.0, deadline - time.monotonic())), "no answer"
            chunk = os.read(self._read_fd, 2**16)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def load(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Wait until an expression is true in the page, and return its value."""
        deadline = time.monotonic() + TIMEOUT
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(POLL_SECONDS)
        return value

    def resize(self, width: int) -> None:
        """Make the window so wide, and as high as the page. (The command line makes no window narrower than 500.)"""
        size = {"width": width, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", height=800, **size)
        height = self.run("document.documentElement.scrollHeight")
        self.call("Emulation.setDeviceMetricsOverride", height=height, **size)

    def screenshot(self, *, width: int = 1200, scheme: str = "light") -> bytes:
        """A PNG of the whole page, in a light or dark scheme: for people, who look at a page that has changed."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.resize(width)
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def open_tab() -> Iterator[Tab]:
    """A tab of a browser of its own, which ends with the block."""
    assert PATH is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads from descriptor 3 and writes to 4.
        shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        command = [PATH, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        browser = subprocess.Popen(
            ["bash", "-c", shell, "bash", str(to_browser[0]), str(from_browser[1]), *command],
            pass_fds=(to_browser[0], from_browser[1]),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Tab(from_browser[0], to_browser[1])
        finally:
            os.close(to_browser[1])  # the browser ends with the pipe
            os.close(from_browser[0])
            with contextlib.suppress(subprocess.TimeoutExpired):
                browser.wait(5)
            browser.kill()
            browser.wait()
