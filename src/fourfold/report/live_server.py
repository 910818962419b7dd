"""Live server: serves the live page of one run to this machine.

token  a random word in the address: other users and other pages of this machine do not know it
Law: it answers GET of the page and of its data, on the loopback interface, to requests that name this machine and have
the token; all others are refused, and learn nothing of the run. It only reads.
"""

import hmac
import json
import re
import secrets
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from fourfold.report.live_page import SECURITY_POLICY, page_title, render_live_page
from fourfold.report.live_run import LiveRun

ADDRESS = "127.0.0.1"
# A page of another site may let its own name lead to this machine (DNS rebinding); its requests carry that name. Any
# port: an SSH tunnel may have another one at its other end.
OWN_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
REQUEST_SECONDS = 10
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": SECURITY_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """Serves one run until `shutdown`, or until an exception ends `serve_forever`."""

    daemon_threads = True

    def __init__(self, run: LiveRun, *, port: int = 0) -> None:
        """`port` 0 takes a free one. Raises OSError if the port cannot be had."""
        self.run, self.token = run, secrets.token_urlsafe(16)
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error; any other is shown, and the server goes on."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer  # type: ignore[assignment]
    timeout = REQUEST_SECONDS
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        if not self._names_this_machine():
            self.send_error(403, "Forbidden")
            return
        # Nothing of the address is parsed before the token is checked: a parser may raise for what a stranger sends.
        address, _, query = self.path.partition("?")
        path = f"/{self.server.token}/"
        folder, name = address[: len(path)], address[len(path) :]
        if not hmac.compare_digest(folder.encode(), path.encode()) or name not in ("", "data"):
            self.send_error(404, "Not Found")
            return
        run = self.server.run
        if name == "data":
            (since,) = parse_qs(query).get("since", [""])[-1:]
            view = run.view(since)
            content = {**view._asdict(), "title": page_title(run.name, view.state)}
            self._send(json.dumps(content), "application/json")
        else:
            self._send(render_live_page(run.name, run.view()), "text/html; charset=utf-8")

    def _refuse_method(self) -> None:
        self.send_error(405, "Method Not Allowed")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method

    def _names_this_machine(self) -> bool:
        """Whether the request has one Host header, with a name of this machine."""
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and OWN_NAMES.fullmatch(hosts[0].strip()) is not None

    def _send(self, text: str, kind: str) -> None:
        content = text.encode("utf-8", errors="replace")
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "fourfold"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal shows the address, and not every request."""
