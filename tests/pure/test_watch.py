"""Laws of the live page: it shows the run as its files are, to this machine only; nothing else is answered."""

import contextlib
import fcntl
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.watch import watch_run
from fourfold.report import live
from fourfold.report.live import LiveRun, LiveServer, judge_status
from fourfold.report.run_record import read_run
from fourfold.words.errors import SettingError
from tests.browser import needs_browser, open_tab
from tests.report_data import NASTY, log, make_run, titles

STEP = {
    "loss": 2.0,
    "samples": 8,
    "units": 8,
    "unit": "samples",
    "seconds": 0.5,
    "waiting_seconds": 0.1,
    "lr": 0.1,
    "grad_norm": 1.0,
}


def steps(first: int, last: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"step": number, "elapsed_seconds": 0.5 * number, **STEP, **fields} for number in range(first, last + 1)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of six steps that has done two."""
    folder = make_run(tmp_path / "first")
    (folder / "metrics.jsonl").unlink()
    log(folder, *steps(1, 2))
    return folder


@pytest.fixture
def server(run: Path) -> Iterator[LiveServer]:
    with LiveServer(LiveRun(run)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """The status, the headers and the body of an answer. `Host=""` sends no such header."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{server.server_address[1]}", **headers}.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def data(server: LiveServer, since: str = "") -> dict[str, Any]:
    status, _, body = ask(server, f"/{server.token}/data?since={since}")
    assert status == 200
    return json.loads(body)


# ---- the protocol


def test_the_page_and_its_data_are_served_to_who_has_the_token(server):
    status, headers, body = ask(server, f"/{server.token}/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "first" in body
    assert "step 2 of 6" in data(server)["status"]["facts"]
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/{server.token}/"


@pytest.mark.parametrize("path", [
    "/", "/data", "/TOKEN", "/TOKEN/metrics.jsonl", "/TOKEN/../", "/TOKEN//", "/TOKEN/data/", "/TOKENx/", "/wrong/",
    "/wrong/data", "/x/TOKEN/", "/%2FTOKEN/", "/TOKEN/plan.toml", "/TOKEN/?token=TOKEN/data/..",
])  # fmt: skip
def test_nothing_but_the_page_and_its_data_is_answered(server, path):
    expected = 200 if path.startswith("/TOKEN/?") else 404
    assert ask(server, path.replace("TOKEN", server.token))[0] == expected


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.2", "0.0.0.0",
    "user@127.0.0.1", "127.0.0.1:80:80", "", "localhost:port",
])  # fmt: skip
def test_a_request_under_another_machine_s_name_is_refused_even_with_the_token(server, host):
    assert ask(server, f"/{server.token}/", Host=host)[0] == 403
    assert ask(server, f"/{server.token}/data", Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9999", "127.0.0.1:1", "[::1]:80"])
def test_this_machine_s_names_are_answered_at_any_port_as_through_a_tunnel(server, host):
    assert ask(server, f"/{server.token}/", Host=host)[0] == 200


def test_a_request_with_two_hosts_is_refused(server):
    with socket.create_connection(server.server_address[:2], timeout=10) as connection:
        connection.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.0 403")


@pytest.mark.parametrize("line", [
    b"GET http://[/ HTTP/1.1", b"GET http://[::1/TOKEN/ HTTP/1.1", b"GET //[/ HTTP/1.1", b"GET http://[x]/ HTTP/1.1",
    b"GET", b"GET /", b"GET  HTTP/1.1", b"GET / HTTP/9.9", b"GET / HTTP/1.\xb2", b"GET / HTTP/" + b"9" * 5000 + b".0",
    b"GET /\xff\x00\x1b[2J HTTP/1.1", b"GET /%ff%00?since=%ff HTTP/1.1", b"\xff\x00\xfe / HTTP/1.1", b"get / HTTP/1.1",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1", b"GET / HTTP/1.1\r\nHost: \xff\xfe", b"GET / HTTP/1.1\r\n\xff: \x00",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon", b"GET / HTTP/1.1" + b"\r\na: b" * 200,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: -1",
])  # fmt: skip
def test_no_request_brings_an_error_of_the_server(server, capfd, line):
    named = line if b"Host" in line else line + b"\r\nHost: localhost"
    # A request that is too long is refused before all of it is read.
    with (
        socket.create_connection(server.server_address[:2], timeout=10) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(named + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert ask(server, f"/{server.token}/")[0] == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_answered(server, method):
    assert ask(server, f"/{server.token}/", method=method)[0] == 405


def test_answers_forbid_what_the_page_does_not_need(server):
    for path in (f"/{server.token}/", f"/{server.token}/data", "/"):
        _, headers, body = ask(server, path)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert "Python" not in str(headers)
        assert server.token not in body


def test_it_listens_on_the_loopback_interface_with_a_token_of_its_own(run, server):
    assert server.server_address[0] == "127.0.0.1"
    with LiveServer(LiveRun(run)) as other:
        assert other.token != server.token
        assert len(other.token) >= 20


# ---- the data


def test_the_data_follows_the_log_and_leaves_out_what_the_reader_has(run, server):
    first = data(server)
    assert set(data(server, first["version"])) == {"title", "under", "status"}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(steps(3, 3)[0])[:20])
    assert "cards" not in data(server, first["version"])  # half a line is no line
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(steps(3, 3)[0])[20:] + "\n")
    later = data(server, first["version"])
    assert later["version"] != first["version"]
    assert "step 3 of 6" in later["status"]["facts"]
    assert [*titles(later)] == [
        "Loss",
        "Throughput",
        "Learning rate",
        "Gradient norm",
        "Checkpoints",
        "Plan and settings",
    ]
    assert later["figures"]
    log(
        run, {"step": 3, "valid": {"loss": 1.0, "accuracy": 0.5}}, *steps(4, 4), {"step": 4, "valid": {"accuracy": 0.7}}
    )
    assert "Accuracy" in titles(data(server))
    (run / "faults.jsonl").write_text(json.dumps({"time": 1.0, "kind": "restart", "step": 3, "text": NASTY}) + "\n")
    assert titles(data(server))[0] == "Faults and restarts"


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path):
    following = LiveRun(tmp_path / "later")
    assert following.view()["cards"] == []
    assert following.view()["status"]["state"] == "waiting"
    assert "does not exist yet" in following.view()["status"]["text"]
    log(make_run(tmp_path / "later"), *steps(7, 7))
    assert following.view()["status"]["state"] == "finished"
    assert following.view()["cards"]


def test_files_that_cannot_be_read_are_said_so_and_read_again(run):
    following = LiveRun(run)
    plan = (run / "plan.toml").read_text()
    (run / "plan.toml").write_text("= nonsense")
    assert "cannot be read" in following.view()["status"]["text"]
    assert "cannot be read" in following.view()["status"]["text"]
    (run / "plan.toml").write_text(plan)
    assert "step 2 of 6" in following.view()["status"]["facts"]


def test_the_lock_of_a_run_is_seen_and_not_taken(run):
    path = run / "metrics.jsonl"
    assert live.is_locked(path) is False
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert live.is_locked(path) is True
    with path.open("ab") as file:
        assert live.is_locked(path) is False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if asking had left a lock


def test_without_a_list_of_locks_it_is_unknown_who_has_one(run, monkeypatch):
    monkeypatch.setattr(live, "PROC_LOCKS", run / "none")
    assert live.is_locked(run / "metrics.jsonl") is None


@pytest.mark.parametrize(("last", "locked", "quiet", "state"), [
    (0, True, 30.0, "starting"), (0, True, 700.0, "stalled"), (0, False, 5.0, "starting"), (0, False, 30.0, "stopped"),
    (2, True, 9.0, "running"), (2, True, 30.0, "quiet"), (2, True, 130.0, "stalled"), (2, False, 9.0, "running"),
    (2, False, 11.0, "stopped"), (2, None, 9.0, "running"), (2, None, 11.0, "stopped"),
])  # fmt: skip
def test_a_run_is_called_stopped_only_if_nobody_here_trains_it_and_it_is_quiet(run, last, locked, quiet, state):
    (run / "metrics.jsonl").write_text("")
    log(run, *steps(1, last))
    assert judge_status(read_run(run), is_locked=locked, quiet_seconds=quiet).state == state


def test_long_steps_may_be_quiet_for_longer(run):
    log(run, *steps(1, 6, seconds=40.0))
    assert judge_status(read_run(run), is_locked=True, quiet_seconds=190.0).state == "running"
    assert judge_status(read_run(run), is_locked=True, quiet_seconds=210.0).state == "stalled"


def test_the_time_left_is_that_of_the_steps_since_the_start_and_of_what_lies_between_them(run):
    def left():
        return judge_status(read_run(run), is_locked=True, quiet_seconds=0.0).remaining_seconds

    assert left() == pytest.approx(4 * 0.5)
    log(run, *steps(3, 3, elapsed_seconds=4.5))  # an evaluation, say
    assert left() == pytest.approx(3 * (4.5 - 0.5) / 2)
    log(run, {"resumed": 3})
    assert left() is None
    log(run, *steps(4, 4, elapsed_seconds=9.0))
    assert left() == pytest.approx(2 * 9.0)
    log(run, {"finished": 2, "seconds": 3.0})
    assert judge_status(read_run(run), is_locked=False, quiet_seconds=99.0)[0] == "finished"


# ---- the command


@pytest.mark.parametrize(("words", "port", "message"), [
    (["first"], "70000", "--port 70000   need a whole number from 0 to 65535"),
    (["first"], "-1", "--port -1"),
    (["first"], "http", "--port http"),
    (["first", "second"], "0", "fourfold report first second"),
    (["empty"], "0", "settings.json   need the folder of a run   try fourfold watch first"),
    (["runs/file"], "0", "runs/file is not a folder"),
    (["a\nb"], "0", r"the run 'a\nb'"),
])  # fmt: skip
def test_what_cannot_be_watched_is_refused_before_a_server_starts(run, monkeypatch, words, port, message):
    monkeypatch.chdir(run.parent)
    Path("runs").mkdir()
    run.rename("runs/first")
    Path("runs/empty").mkdir()
    Path("runs/file").touch()
    with pytest.raises(SettingError) as caught:
        watch_run(words, port)
    assert message in str(caught.value)


def test_a_port_in_use_is_refused(server, monkeypatch):
    monkeypatch.chdir(server.run.path.parent)
    with pytest.raises(SettingError, match=r"address already in use.*need a free port"):
        watch_run(["first"], str(server.server_address[1]))


def test_without_a_run_the_newest_is_watched_and_without_any_it_is_refused(run, monkeypatch):
    from fourfold.cli import watch

    monkeypatch.chdir(run.parent)
    with pytest.raises(SettingError, match="no run in runs/"):
        watch_run([], "0")
    Path("runs").mkdir()
    run.rename("runs/first")
    os.utime(make_run(Path("runs/second")) / "metrics.jsonl", (1, 1))
    found = []
    monkeypatch.setattr(watch, "_serve", lambda path, port: found.append((path, port)))
    assert watch_run([], "0") == 0
    assert watch_run(["third"], "81") == 0  # may begin later
    assert found == [(Path("runs/first"), 0), (Path("runs/third"), 81)]


def test_a_run_that_does_not_exist_is_waited_for_and_those_that_do_are_named(run, monkeypatch, capsys):
    from fourfold.cli import watch

    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(watch, "_serve", lambda path, port: None)
    watch_run(["nope"], "0")
    assert capsys.readouterr().out == ""  # there is none
    Path("runs").mkdir()
    run.rename("runs/first")
    for word, line in {"nope": "runs in runs/: first", "frist": "there is a run runs/first"}.items():
        watch_run([word], "0")
        assert capsys.readouterr().out == f"{line}\n"
    for number in range(6):
        make_run(Path(f"runs/run-{number}"))
    watch_run(["nope"], "0")
    assert capsys.readouterr().out == "runs in runs/: first, run-0, run-1, run-2, run-3 and 2 more\n"


def test_the_command_prints_its_address_and_ends_with_ctrl_c(run):
    command = [sys.executable, "-m", "fourfold", "watch", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{run}\n"
        address = re.match(r"http://(127\.0\.0\.1):([0-9]+)(/\S+/)", process.stdout.readline())
        assert address is not None
        connection = http.client.HTTPConnection(address[1], int(address[2]), timeout=10)
        connection.request("GET", f"{address[3]}data")
        assert "step 2 of 6" in json.loads(connection.getresponse().read())["status"]["facts"]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


# ---- in a browser


ASK_NOW = 'document.dispatchEvent(new Event("visibilitychange"))'  # as when its tab is looked at again

POINT_AT_END = """
var chart = document.querySelector("svg[tabindex]"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: box.right - 20, clientY: box.top + 50}));
"""
SHOWN = 'document.querySelector(".tip").innerText'


@needs_browser
def test_the_page_in_a_browser_follows_a_run_that_grows(run, server):
    state = 'document.querySelector("#status .state span").innerText'
    shown = 'Array.from(document.querySelectorAll("#cards h2"), (node) => node.innerText)'
    with open_tab() as tab:
        tab.load(server.url)
        tab.wait_for(f'{state} === "step 2 of 6"')
        tab.wait_for('document.querySelector(".figures") !== null')
        cards = ["Loss", "Throughput", "Learning rate", "Gradient norm", "Checkpoints", "Plan and settings"]
        assert tab.run(shown) == cards
        tab.run("window.kept = document.querySelectorAll('#cards section')[5]")
        assert "batch_size" in tab.run("kept.innerText")
        tab.run(POINT_AT_END)
        assert tab.run(SHOWN).split()[:2] == ["step", "2"]
        log(run, *steps(3, 3), {"step": 3, "valid": {NASTY: 1.0}}, {"step": 3, "valid": {"loss": 1.0}})
        tab.wait_for(f'{state} === "step 3 of 6"')
        assert tab.run(SHOWN).split()[:2] == ["step", "3"]  # the values under the pointer, which has not moved
        log(run, {"step": 4, "valid": {NASTY: 2.0}}, *steps(4, 6), {"finished": 6, "seconds": 9.0})
        tab.run(ASK_NOW)
        tab.wait_for('document.title === "first · finished"')
        assert tab.run(shown)[:4] == ["Loss", "Throughput", NASTY, "Learning rate"]
        assert tab.run("window.kept.isConnected")  # what has not changed stays in place
        assert tab.run('document.querySelector(".progress div").style.width') == "100%"
        assert tab.run('document.getElementById("lost").hidden')
        server.shutdown()
        server.server_close()
        tab.run(ASK_NOW)
        tab.wait_for('!document.getElementById("lost").hidden')
