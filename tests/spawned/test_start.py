"""How a rank starts: forked from the launcher, it sees what a new process would see, and nothing of the checks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.environment.malloc import NO_TCACHE, TUNABLES_VARIABLE
from fourfold.environment.world import num_cores
from fourfold.launcher.process_defaults import THREAD_VARIABLES, may_have_gpus
from tests.spawned import SOURCE

pytestmark = pytest.mark.skipif(may_have_gpus(), reason="ranks that use a GPU are not forked")

TASK = """
import json, logging, os, random, signal, sys, threading
from pathlib import Path
import numpy, torch
import fourfold as ff

CHECKED_BY = Path("checked-by")
if "RANK" not in os.environ:
    CHECKED_BY.write_text(str(os.getpid()))
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # it may hold any lock at a fork
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["LEFT_BEHIND"] = "1"


class Source:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), 0.01 * index), torch.tensor([0.0])


def loss(outputs, targets):
    rank = os.environ.get("RANK", "alone")
    found = {
        "pid": os.getpid(), "parent": os.getppid(), "leader": os.getpgid(0) == os.getsid(0) == os.getpid(),
        "threads": torch.get_num_threads(), "python_threads": len(threading.enumerate()),
        "name": Path("/proc/self/comm").read_text().strip(), "path": sys.path[0], "argv": sys.argv[1:],
        "main": sys.modules["__main__"].__spec__.name, "sigterm_ignored": signal.getsignal(15) == signal.SIG_IGN,
        "left_behind": "LEFT_BEHIND" in os.environ, "logs": logging.root.manager.disable, "random": random.random(),
        "numpy": float(numpy.random.rand()), "variables": {name: os.environ.get(name) for name in VARIABLES},
    }
    Path(f"rank-{rank}").exists() or Path(f"rank-{rank}").write_text(json.dumps(found))
    return ((outputs - targets) ** 2).sum(), len(targets)


VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLIBC_TUNABLES", "WORLD_SIZE", "LOCAL_RANK")
task = ff.Task(
    model=lambda: torch.nn.Linear(4, 1),
    loss=loss,
    data=lambda: ff.Data(train=Source()),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    steps=2,
    batch_size=8,
)
"""
Command = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    (tmp_path / "script.py").write_text(TASK)
    foreign = ("RANK", "WORLD_SIZE", *THREAD_VARIABLES, TUNABLES_VARIABLE)
    environ = {name: value for name, value in os.environ.items() if name not in foreign}
    environ["PYTHONPATH"] = f"{tmp_path}:{SOURCE}"

    def start(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        argv = [sys.executable, "-m", "fourfold", *words]
        return subprocess.Popen(argv, cwd=tmp_path, env=environ, stdout=pipe, stderr=pipe, text=True)

    return start


def until(job: subprocess.Popen[str], path: Path) -> None:
    """Wait until the job has written this file."""
    deadline = time.monotonic() + 300
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.01)


def test_a_forked_rank_begins_like_a_new_process(command: Command, tmp_path: Path) -> None:
    job = command("train", "script.py", "name=first", "-n", "2")
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert out.startswith("starting 2 processes\n")
    ranks = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    checked_by, threads = int((tmp_path / "checked-by").read_text()), max(1, num_cores() // 2)
    assert checked_by not in {job.pid, ranks[0]["pid"], ranks[1]["pid"]}  # nothing of the user's ran in the launcher
    for number, rank in enumerate(ranks):
        assert rank["parent"] == job.pid  # the launcher has imported torch, and forked it
        assert rank["leader"]
        assert rank["name"] == f"fourfold-{number}"
        assert rank["threads"] == threads
        assert rank["path"] == str(tmp_path)
        assert rank["argv"] == ["script.py", "name=first"]
        assert rank["main"] == "fourfold.cli.rank_main"
        assert not rank["sigterm_ignored"]
        assert not rank["left_behind"]
        assert rank["logs"] == 0
        assert rank["variables"] == {
            **dict.fromkeys(THREAD_VARIABLES, str(threads)),
            TUNABLES_VARIABLE: NO_TCACHE,
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(number),
        }
    assert ranks[0]["random"] != ranks[1]["random"]  # nobody has set a seed
    assert ranks[0]["numpy"] != ranks[1]["numpy"]


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("os._exit(7)", 7, ""),
        ("os._exit(0)", 1, "the process that checked the task ended by itself, with exit code 0"),
        ("os.kill(os.getpid(), 11)", 1, "the process that checked the task was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", 1, "the task was killed by SIGKILL; if no person did this, the machine"),
        ("raise OSError('the disk of the task')", 2, "OSError: the disk of the task"),
    ],
)
def test_a_check_that_fails_is_reported_once_and_starts_no_rank(
    command: Command, tmp_path: Path, line: str, code: int, text: str
) -> None:
    script = TASK.replace('if "RANK" not in os.environ:\n', f'if "RANK" not in os.environ:\n    {line}\n')
    (tmp_path / "script.py").write_text(script)
    job = command("train", "script.py", "name=first", "-n", "2")
    _, err = job.communicate(timeout=300)
    assert job.returncode == code, err
    assert err.count(text) == 1 or (not text and not err)
    assert not (tmp_path / "rank-0").exists()


def test_what_a_recipe_brings_with_it_is_printed_once(command: Command) -> None:
    job = command("train", "digits", "recipe:pipedream", "lr=-1", "-n", "2")
    out, err = job.communicate(timeout=300)
    assert (job.returncode, out) == (2, "starting 2 processes\nrecipe:pipedream: clip = none\n"), err


def test_ctrl_c_during_the_checks_ends_them_and_prints_one_line(command: Command, tmp_path: Path) -> None:
    script = TASK.replace(
        "class Source", 'if "RANK" not in os.environ:\n    threading.Event().wait()\n\n\nclass Source'
    )
    (tmp_path / "script.py").write_text(script)
    job = command("train", "script.py", "name=first", "-n", "2")
    checked_by = tmp_path / "checked-by"
    until(job, checked_by)
    job.send_signal(2)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert err == "fourfold: stopped by SIGINT\n"
    assert not Path(f"/proc/{checked_by.read_text()}").exists()


STOPPED = "fourfold: stopped by SIGTERM; run the same command again\n"
READY = "import pathlib, signal, threading, time\npathlib.Path('ready').write_text('yes')\n"
WAITS = f"{READY}threading.Event().wait(99)"
# The launcher replaces itself by the same command once: what comes in between must not be lost.
WAITS_FOR_THE_SIGNAL = f"""
import os
if {TUNABLES_VARIABLE!r} in os.environ:
    {READY.replace(chr(10), chr(10) + "    ")}
    while signal.SIGTERM not in signal.sigpending():
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("words", "module", "body"),
    [
        (("train", "-n", "2"), "typer", WAITS),  # what parses the command line
        (("train", "-n", "2"), "torch", WAITS),
        (("train", "-n", "2"), "sitecustomize", WAITS_FOR_THE_SIGNAL),
        (("train", "-n", "1"), "torch", WAITS),
        (("run", "-n", "2", "script.py"), "torch", WAITS),
        (("plan", "lm"), "torch", WAITS),
    ],
)
def test_sigterm_while_a_command_starts_asks_for_the_same_command_again(
    command: Command, tmp_path: Path, words: tuple[str, ...], module: str, body: str
) -> None:
    (tmp_path / f"{module}.py").write_text(body)
    job = command(*words)
    until(job, tmp_path / "ready")
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (75, STOPPED)


def test_sigterm_during_the_checks_asks_for_the_same_command_again(command: Command, tmp_path: Path) -> None:
    stops = 'if "RANK" not in os.environ:\n    os.kill(os.getppid(), 15)\n\n\nclass Source'
    (tmp_path / "script.py").write_text(TASK.replace("class Source", stops))
    job = command("train", "script.py", "-n", "2")
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (75, STOPPED)


FORKS = """
import numpy.random, random, signal, sys, tempfile
from fourfold.launcher.forked_process import fork

file, number = tempfile.TemporaryFile(), numpy.random.rand()
signal.signal(signal.SIGTERM, lambda *_: print("the parent's handler", flush=True))
print("once")  # in the buffer


def child():
    try:
        file.fileno(), open(f"/proc/self/fd/{file.fileno()}")
    except OSError:
        words = numpy.random.rand(), random.random(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        print(" ".join(map(str, words)) + "\\n", end="")  # one write, even if Python does not buffer
        sys.exit(5)


children = [fork(child) for _ in range(2)]
assert [each.wait() for each in children] == [5, 5] and [each.poll() for each in children] == [5, 5]
killed = fork(lambda: signal.pause())
killed.kill()
assert killed.returncode == -signal.SIGKILL
"""


def test_a_fork_has_its_own_random_numbers_handlers_and_descriptors() -> None:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", FORKS], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    one, two = (line.split() for line in lines)
    assert first == "once"
    assert one[2] == two[2] == "True"
    assert len({*one[:2], *two[:2]}) == 4
