"""The command line: how it is parsed, and what is refused before any process starts."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main, sigint
from fourfold.cli.arguments import SETTINGS, ParsedValues, argument_types, parse_values
from fourfold.cli.errors import nearest_file, report_error
from fourfold.cli.run import Run, resolve
from fourfold.cli.task_loader import (
    ANY_TEXT,
    BUILT_IN,
    arguments_in_source,
    find_task,
    is_script,
    task_arguments,
)
from fourfold.environment import malloc
from fourfold.environment.world import World, num_cores
from fourfold.launcher.process_defaults import check_num_processes, loopback_variables, thread_variables
from fourfold.words.errors import SettingError, TaskError
from fourfold.words.field import Field

TASK = """
import torch
import fourfold as ff


class Source:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.tensor([0.0])


class Jumpy(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def task(*, width: int = 4, lr: float = 0.1, bias: bool = True, samples: int = 64, jumpy: bool = False):
    make = Jumpy if jumpy else (lambda params: torch.optim.SGD(params, lr=lr))
    return ff.Task(
        model=lambda: torch.nn.Linear(4, 1, bias=bias),
        loss=lambda outputs, targets: (outputs - targets) ** 2,
        data=lambda: ff.Data(train=Source(samples)),
        optimizer=make,
        steps=4,
        batch_size=8,
    )


fixed = task()
number = 3


def needy(width):
    return task(width=width)


def wrong():
    return 3


def field(dp=1):
    return task()
"""

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command in a folder with a task file. It must be refused with code 2, before any process starts.

    Law: no message is wider than 80 columns at a terminal that is not. Returns the message of one that is very wide.
    """
    (tmp_path / "mine.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *_, **__: pytest.fail("a process was started"))

    def run(*arguments: str) -> str:
        known, err = set(sys.modules), ""
        for columns in (80, 1000):
            monkeypatch.setenv("COLUMNS", str(columns))
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            for name in {"mine", "broken"} & (set(sys.modules) - known):
                del sys.modules[name]
            out, err = capfd.readouterr()
            assert ended.value.code == 2, err
            assert re.fullmatch(r"(starting \d+ process(es)?\n)?", out)
            assert "fourfold/cli" not in err
            wide = [line for line in err.split("\n") if len(line) > columns]
            assert all(max(map(len, line.split())) > columns // 2 for line in wide), err  # a path is not broken
        return err

    return run


def test_what_a_source_logs_while_a_command_opens_it_is_wrapped(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("fourfold")
    monkeypatch.setattr(log, "propagate", False)  # to pytest, after which Python prints nothing by itself
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    text = "https://host/pack/shard-00000.data: no answer; again in 0.5 s; " * 3
    said = f"import logging\nlogging.getLogger('fourfold').warning({text!r})\n"
    (tmp_path / "mine.py").write_text(said + TASK)
    assert text.strip() in refused("train", "mine.py:wrong")


def test_an_unknown_setting_is_reported_with_the_closest_name(refused: Refused) -> None:
    text = refused("train", "mine.py", "widht=3", "-n", "2")
    assert "SettingError: 1 problem in the command line" in text
    assert "widht = 3   need a known setting   try width=3" in text


def test_an_unknown_setting_without_a_close_match_lists_the_arguments_of_the_task(refused: Refused) -> None:
    text = refused("train", "mine.py", "xyzzy=3")
    assert "try width=…, lr=…, bias=…, samples=…, jumpy=…, fourfold train --help for the settings" in text


def test_all_problems_are_reported_at_once(refused: Refused) -> None:
    text = refused("train", "mine.py", "width=3.5", "lr=fast", "bias=perhaps", "steps=0", "zero=7", "seed=-1", "dp=x")
    for got, need in {
        "width = 3.5": "need a whole number",
        "lr = fast": "need a number",
        "bias = perhaps": "need true or false",
        "steps = 0": "need a whole number of at least 1",
        "seed = -1": "need a whole number from 0 to 18446744073709551615",
        "zero = 7": "need one of 0, 1, 2, 3",
        "dp = 'x'": "need a whole number from 1 to 1048576",
    }.items():
        (line,) = (line for line in text.splitlines() if line.strip().startswith(got))
        assert need in line


def test_what_is_not_built_yet_is_refused(refused: Refused) -> None:
    message = "sync = server   need step or local (other values are not implemented yet)   try sync = step or local"
    assert message in refused("train", "mine.py", "sync=server")


def test_an_invalid_mesh_is_refused_and_valid_ones_suggested(refused: Refused) -> None:
    Path("plan.toml").write_text("version = 1\ndp = 4\n")
    text = refused("train", "mine.py", "plan.toml", "-n", "2")
    assert "PlanError: 1 problem in plan.toml" in text
    assert "need the number of ranks, 2" in text
    assert "try dp = 2, or -n 4" in text


def test_problems_of_a_plan_file_are_reported_with_its_name(refused: Refused) -> None:
    Path("plan.toml").write_text("version = 1\nzeroo = 1\ndp = 0\n")
    text = refused("train", "mine.py", "plan.toml")
    assert "PlanError: 2 problems in plan.toml" in text
    assert "try zero" in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dp = 2\ndp 2", "line 2: Expected '=' after a key in a key/value pair   need valid TOML"),
        ("dp = 2", "no version"),
        ("version = 9", "need version = 1"),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused(refused: Refused, text: str, problem: str) -> None:
    Path("plan.toml").write_text(text)
    assert problem in refused("train", "mine.py", "plan.toml")


def test_missing_files_are_reported_with_the_closest_names(refused: Refused) -> None:
    Path("plan.toml").write_text("version = 1\n")
    assert "mime.py (no such file)   need a Python file with a task   try mine.py" in refused("train", "mime.py")
    text = refused("train", "mine.py", "plam.toml")
    assert "plam.toml (no such file or directory)   need a file   try plan.toml" in text
    assert "need a Python file   try mine.py" in refused("run", "-n", "2", "mime.py")
    assert "need a file or folder of text" in refused("train", "lm", "data=nowhere", "-n", "2")


def test_an_empty_corpus_is_refused(refused: Refused) -> None:
    Path("empty.txt").write_text("")
    assert "DataError" in refused("train", "lm", "data=empty.txt", "-n", "2")
    assert "train without samples   need at least one" in refused("train", "mine.py", "samples=0", "-n", "2")


def test_local_steps_that_do_not_divide_the_steps_are_refused_and_valid_steps_suggested(refused: Refused) -> None:
    text = refused("train", "mine.py", "-n", "2", "sync=local", "local_steps=3", "steps=7")
    assert "steps = 7, local_steps = 3   need a number of steps divisible by local_steps   try steps=6 or 9" in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["batch_size=7"], "batch_size = 7, dp = 2   need a batch divisible by dp   try batch_size=6 or 8"),
        (["batch_size=1"], "try batch_size=2"),
        (["batch_size=7", "microbatches=3"], "need a batch divisible by dp × microbatches   try batch_size=6 or 12"),
    ],
)
def test_an_indivisible_batch_is_refused_and_divisible_ones_suggested(
    refused: Refused, words: list[str], problem: str
) -> None:
    assert problem in refused("train", "mine.py", "-n", "2", *words)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def f():\n    return 1 / 0\n\nf()", "ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("raise SystemExit(3)", "it calls sys.exit(3)"),
        ("import pytest\n\n\npytest.importorskip('nothing_of_this_name')", "Skipped: could not import"),
        ("class Mine(BaseException): ...\n\n\nraise Mine('of mine')", "broken.Mine: of mine"),
    ],
)
def test_a_task_file_that_does_not_import_is_reported_with_the_users_lines(
    refused: Refused, code: str, error: str
) -> None:
    Path("broken.py").write_text(f"{code}\n\n\ntask = None\n")
    text = refused("train", "broken.py", "-n", "2")
    assert text.startswith("TaskError: broken.py does not import")
    assert error in text
    assert "importlib" not in text
    assert 'broken.py", line 1' in text or "sys.exit" in text or "line 4" in text


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("mine.py:tusk", "no tusk   need a Task, or a function that returns one   try mine.py:task"),
        ("mine.py:number", "number is a int   need a Task"),
        ("mine.py:wrong", "a int   need the task's function to return a Task"),
        ("mine.py:needy", "the argument width has no default"),
        ("mine.py:field", "the argument dp   need a name that is not a field of the plan"),
        ("lmm", "need lm, digits, hf:CONFIG.json, or path/to/file.py:name   try lm"),
    ],
)
def test_an_argument_that_is_not_a_task_is_refused(refused: Refused, word: str, problem: str) -> None:
    assert problem in refused("train", word)


def test_an_optimizer_that_cannot_run_on_flat_buffers_is_refused(refused: Refused) -> None:
    text = refused("train", "mine.py", "jumpy=yes", "-n", "2")
    assert "OptimizerError" in text
    assert "Jumpy" in text


@pytest.mark.parametrize("number", ["0", "-2", "two", "1.5"])
def test_the_number_of_processes_is_at_least_one(refused: Refused, number: str) -> None:
    assert f"-n {number}   need a number of processes, at least 1" in refused("train", "mine.py", "-n", number)


def test_surplus_arguments_are_refused(refused: Refused) -> None:
    text = refused("train", "lm", "digits", "a.toml", "b.toml", "steps=1", "steps=2")
    assert "lm and digits" in text
    assert "a.toml and b.toml" in text
    assert "steps = 1 and steps=2   need each key once" in text


def test_unknown_options_and_commands_are_reported_with_valid_ones(refused: Refused) -> None:
    assert "the option --np   need settings as KEY=VALUE   try -n N, the number" in refused("train", "--np", "2")
    assert "the option --steps   need settings as KEY=VALUE   try steps=…" in refused("train", "--steps", "5")
    assert "try fourfold train" in refused("trian")
    assert "try fourfold --version" in refused("version")
    assert "try fourfold train mine.py" in refused("mine.py")
    assert "need SCRIPT.py" in refused("run")


def test_errors_of_the_option_parser_come_with_a_suggestion(refused: Refused) -> None:
    assert "the option -n without a value   need a value after it" in refused("train", "-n")
    assert "the option --html without a value   need a value after it   try fourfold show --help" in refused(
        "show", "--html"
    )
    assert "the option --htm   need an option of this command   try --html" in refused(
        "show", "dp=2", "--htm=plan.html"
    )
    assert "the option --verson   need an option of this command   try --version" in refused("--verson")
    assert "the option --jsn   need an option of this command   try --json" in refused("doctor", "--jsn")
    assert "Missing argument 'RUN'   try fourfold checkpoint list --help" in refused("checkpoint", "list")
    text = refused("train", "steps = 3")
    assert "'steps = 3'   need a setting as KEY=VALUE, without spaces   try steps=3" in text


@pytest.mark.parametrize("words", [("-n", "2"), ("-n",), ("-n2",)])
def test_show_says_that_it_starts_no_processes(refused: Refused, words: Sequence[str]) -> None:
    text = refused("show", "lm", *words)
    assert "the option -n   need no number of processes: show starts none   try fourfold show lm dp=2" in text


def test_a_run_name_that_is_taken_is_refused(refused: Refused) -> None:
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/notes.txt").touch()
    assert "exists already" in refused("train", "mine.py", "name=first", "-n", "2")


# ---- parsing


def test_arguments_are_classified_by_their_form() -> None:
    parsed = resolve(["data=a.toml", "my/task.py:task", "steps=5", "plans/two.toml", "prompt=a = b"])
    texts = {"data": "a.toml", "steps": "5", "prompt": "a = b"}
    assert parsed == Run(named_task="my/task.py:task", plan_file="plans/two.toml", texts=texts)
    assert resolve([]) == Run()


def test_values_are_parsed_by_the_type_of_the_default() -> None:
    def task(
        *,
        width: int = 8,
        lr: float = 1,
        bias: bool = True,
        data: str | None = None,
        heads: "int | None" = None,
        clip: float | None = 1.0,
        anything=None,
        steps: int = 5,
    ) -> None: ...

    words = [
        "width=1e3",
        "lr=3",
        "bias=off",
        "data=12",
        "heads=4",
        "clip=none",
        "anything=x",
        "steps=7",
        "seed=3",
        "dp=2",
    ]
    parsed = parse_values(resolve(words).texts, argument_types(task))
    assert parsed.task == {
        "width": 1000,
        "lr": 3.0,
        "bias": False,
        "data": "12",
        "heads": 4,
        "clip": None,
        "anything": "x",
        "steps": 7,
    }
    assert type(parsed.task["lr"]) is float
    assert parsed.run == {"seed": 3}
    assert parsed.plan == {"dp": 2}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Field(type=int), ""),
        (Field(type=int), "none"),
        (Field(type=int), "inf"),
        (Field(type=float), "1,5"),
        (SETTINGS["clip"], "0"),
        (SETTINGS["clip"], "nan"),
    ],
)
def test_text_of_the_wrong_type_does_not_parse(kind: Field, text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        kind.parse(text)


SOURCES = """
from functools import partial
from other import imported
import fourfold as ff
LAYERS = 3

def plain(first=4, width=4, *, lr: "float | None" = 1, bias=True, data: str | None = None, betas: tuple = (1, 2)): ...
def odd(layers: int = LAYERS, size: ff.Size = 3, any_value=None, **others): ...
task = ff.Task(model=None)
made = partial(plain, width=5)
@partial
def wrapped(width=4): ...
def twice(width=4): ...
if LAYERS:
    def twice(height=4): ...
"""


def test_what_the_source_of_a_task_says_of_its_arguments_is_what_its_import_says(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCES)
    plain = arguments_in_source("mine.py:plain")
    scope: dict[str, Any] = {}
    exec("\n".join(line for line in SOURCES.splitlines() if line.startswith("def plain")), scope)
    assert plain is not None
    assert [*plain.items()] == [*argument_types(scope["plain"]).items()]
    odd = arguments_in_source("mine.py:odd")
    assert odd is not None
    assert odd["layers"].parse("any, text") == odd["size"].parse("any, text") == odd["any_value"].parse("any, text")
    assert arguments_in_source("mine.py") == {}
    for name in ("made", "wrapped", "twice", "imported", "LAYERS"):
        assert arguments_in_source(f"mine.py:{name}") is None, name
    with pytest.raises(TaskError, match=r"no plane +need a Task, or a function that returns one +try mine.py:plain"):
        arguments_in_source("mine.py:plane")
    with pytest.raises(TaskError, match=r"no nothing .* try mine.py:task"):
        arguments_in_source("mine.py:nothing")
    for way in ("from other import *", "globals()['nothing'] = task", "def __getattr__(name): ..."):
        Path("open.py").write_text(f"{SOURCES}\n{way}\n")
        assert arguments_in_source("open.py:nothing") is None
    for name in BUILT_IN:
        found, imported = arguments_in_source(name), task_arguments(find_task(name))
        assert found is not None
        assert found.keys() == imported.keys()
        assert all(found[key] in (imported[key], ANY_TEXT) for key in found)


def test_settings_of_an_unknown_task_are_not_checked() -> None:
    assert parse_values({"whatever": "3", "steps": "x"}, None) == ParsedValues()


# ---- processes and threads


def test_a_launcher_and_the_command_must_agree() -> None:
    assert check_num_processes(None, None) is None
    assert check_num_processes("3", None) == 3
    assert check_num_processes(None, World(rank=1, size=4)) == 4
    assert check_num_processes("4", World(rank=1, size=4)) == 4
    with pytest.raises(SettingError, match="one number"):
        check_num_processes("2", World(rank=1, size=4))


def test_ranks_divide_the_cores_unless_the_user_sets_threads() -> None:
    assert thread_variables(1, {}) == {"OMP_NUM_THREADS": str(num_cores()), "MKL_NUM_THREADS": str(num_cores())}
    assert thread_variables(10_000, {"OMP_NUM_THREADS": "7"}) == {"MKL_NUM_THREADS": "1"}


@pytest.mark.parametrize(("given", "is_users"), [
    ({}, False),
    ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, False),
    ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, True),
    ({"MALLOC_ARENA_MAX": "1"}, True),
])  # fmt: skip
def test_the_users_malloc_settings_are_kept(given: dict[str, str], is_users: bool) -> None:
    assert malloc.is_user_configured(given) == is_users
    assert malloc.malloc_variables(given) == ({} if is_users else {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"})


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], []])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys, fourfold.cli\n"
        f"try: fourfold.cli.main({arguments!r})\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert not {'torch', 'numpy', 'rich.live'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "fourfold" in ended.stdout


def test_ctrl_c_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("fourfold.cli.commands.parse_command", interrupted)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["train"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert capfd.readouterr() == ("", "fourfold: stopped by SIGINT\n")


def test_ctrl_c_while_options_are_read_is_130(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("typer._click.core.Command.make_context", interrupted)
    monkeypatch.setattr("click.Command.make_context", interrupted)
    monkeypatch.setattr(sigint, "_is_interrupted", False)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["train"])
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert ended.value.code == 130
    assert capfd.readouterr().err.strip() == "fourfold: stopped by SIGINT"


def test_samples_that_cannot_be_split_by_tokens_are_refused_before_processes_start(refused: Refused):
    text = refused("train", "digits", "cp=2", "dp=1")
    assert "inputs that are a Tensor" in text
    assert "position_ids or positions" in text


def test_an_interrupt_swallowed_during_imports_is_raised_later(monkeypatch: pytest.MonkeyPatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sigint, "_is_interrupted", False)
    try:
        sigint.install()
        sigint.restore_and_raise()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # which training may replace
        sigint.install()
        with contextlib.suppress(KeyboardInterrupt):  # as Python does in a callback
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            sigint.restore_and_raise()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("arguments", [["--version"], ["show", "zerro=1"]])
def test_main_called_from_a_program_restores_its_signal_handlers(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_misspelt_field_is_reported_rather_than_a_missing_plan(refused: Refused, command: str):
    assert "zerro = 1   need a known setting   try zero=1" in refused(command, "zerro=1")


def test_an_empty_path_is_refused(refused: Refused):
    assert "data= with nothing after it" in refused("train", "lm", "data=")


def test_verify_refuses_what_it_cannot_verify_with_the_reason(refused: Refused):
    assert "no plan" in refused("verify", "lm")
    assert "trains differently from one device" in refused("verify", "lm", "dp=2", "sync=local")


def test_gloo_uses_the_loopback_interface_unless_the_user_sets_one(tmp_path: Path) -> None:
    (tmp_path / "up").write_text("0x9\n")
    (tmp_path / "down").write_text("0x8\n")
    assert loopback_variables({}, tmp_path / "up") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert loopback_variables({}, tmp_path / "down") == {}
    assert loopback_variables({}, tmp_path / "missing") == {}
    assert loopback_variables({"GLOO_SOCKET_IFNAME": "eth0"}, tmp_path / "up") == {}


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "mine.py", "seed=18446744073709551616"), "seed = 18446744073709551616"),
        (("verify", "mine.py", "dp=1", "seed=1e30"), "seed = 1e30"),
        (("train", "mine.py", "lr=inf"), "lr = inf   need a finite number"),
        (("train", "mine.py", "lr=nan"), "lr = nan   need a finite number"),
        (("train", "mine.py", "lr=-1"), "Invalid learning rate: -1.0"),
        (("show", "mine.py", "dp=1", "lr=-1"), "Invalid learning rate: -1.0"),
        (("train", "lm", "lr=inf", "temperature=inf"), "2 problems"),
        (("train", "mine.py", "samples=-1"), "__len__() should return >= 0"),
        (("train", "mine.py", "samples=1e30"), "train of type Source"),
        (("train", "mine.py", "name=a\nb"), "control characters"),
        (("train", "mine.py", f"name={LONG}"), "at most 200 bytes"),
        (("train", "mine.py", "dp=1", f"init={LONG}"), "no such file"),
        (("train", f"{LONG}.py"), "no such file"),
        (("train", f"{LONG}.toml"), "file name too long"),
        (("run", f"{LONG}.py"), "no such file"),
        (("train", "lm", f"data={LONG}"), "file name too long"),
        (("train", "lm", "data=~nobody-of-this-name/x"), "home directory"),
        (("report", LONG), "no run"),
        (("checkpoint", "list", LONG), "no run"),
        (("checkpoint", "list", ""), "no run"),
        (("show", "dp=1000000000000"), "dp = 1000000000000   need a whole number from 1 to 1048576"),
        (("show", "dp=1048576", "cp=2"), "2097152 ranks"),
        (("show", "lm", "dp=1", "layers=1e9"), "layers = 1000000000   need at most 100000"),
        (("show", "lm", "dp=1", "width=1000000000"), "a tensor of the model cannot be made"),
    ],
)
def test_out_of_range_values_are_refused_without_a_traceback(
    refused: Refused, arguments: tuple[str, ...], message: str
) -> None:
    text = refused(*arguments)
    assert message in text
    assert "Traceback" not in text


def test_a_group_of_errors_of_the_task_is_reported_as_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert report_error(ExceptionGroup("many", [ValueError("a"), SettingError("b")])) == 1
    assert "ExceptionGroup: many" in capfd.readouterr().err
    assert report_error(ExceptionGroup("several problems", [SettingError("a"), SettingError("b")])) == 2
    assert "several problems" not in capfd.readouterr().err


def test_the_nearest_file_is_one_that_exists(tmp_path: Path) -> None:
    (tmp_path / "good.py").touch()
    assert [nearest_file(tmp_path / name, "*.py") for name in ("good", "god.pt")] == [str(tmp_path / "good.py")] * 2


def test_a_folder_given_as_a_file_is_not_suggested_again(refused: Refused) -> None:
    Path("plan.toml").mkdir()
    Path("a.py").mkdir()
    assert "try" not in refused("train", "plan.toml")
    assert "try" not in refused("train", "a.py")


def test_a_plan_that_is_a_pipe_is_refused_without_blocking(refused: Refused, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.toml")
    assert "pipe.toml (is a pipe)   need a file" in refused("train", "mine.py", "pipe.toml")


def test_a_plan_may_begin_with_a_byte_order_mark(refused: Refused, tmp_path: Path):
    (tmp_path / "mark.toml").write_bytes(b"\xef\xbb\xbfversion = 1\ndp = 3\n")
    assert "need the number of ranks, 2" in refused("train", "mine.py", "mark.toml", "-n", "2")


def test_a_number_of_processes_with_thousands_of_digits_is_refused(refused: Refused):
    assert "need a number of processes" in refused("train", "mine.py", "-n", "9" * 5000)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("None", "model() = None   need a torch.nn.Module"),
        ("(torch.nn.Linear(4, 1),)", "model() of type tuple   need a torch.nn.Module"),
        ("torch.nn.LazyLinear(1)", "a lazy model: weight has no shape yet   need parameters with shapes"),
    ],
)
def test_a_task_without_a_usable_model_is_refused(refused: Refused, tmp_path: Path, model: str, problem: str):
    code = f"\nimport dataclasses\nodd = dataclasses.replace(fixed, model=lambda: {model})\n"
    (tmp_path / "mine.py").write_text(TASK + code)
    assert problem in refused("train", "mine.py:odd", "-n", "1")


def test_a_parameter_twice_in_a_group_is_refused(refused: Refused, tmp_path: Path):
    make = "lambda p: torch.optim.SGD([*p] * 2, lr=0.1)"
    code = f"\nimport dataclasses\nodd = dataclasses.replace(fixed, optimizer={make})\n"
    (tmp_path / "mine.py").write_text(TASK + code)
    with pytest.warns(UserWarning, match="duplicate"):
        assert "2 parameters that are in a group more than once" in refused("train", "mine.py:odd", "-n", "1")


def test_a_command_runs_with_stdin_and_stdout_closed():
    command = f"{sys.executable} -m fourfold --version <&- >&-"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


MISSING = """
import sys
from fourfold.cli.run import resolve
for words, expected in {
    "train": ("nofile.py:task", "nofile.py (no such file)"),
    "hf": ("hf:no.json", "no.json (no such file)"),
    "text": ("lm data=no", "nothing at no"),
    "init": ("lm init=no", "init = no (no such file)"),
    "rules": ("lm tensor=no.toml", "tensor = no.toml (no such file)"),
    "callback": ("lm callback=csv,no.py:x", "no.py (no such file)"),
    "program": ("lm program=no", "program = no: No such file"),
    "plan": ("lm no.toml", "no.toml (no such file"),
    "recipe": ("lm recipe:no", "recipe:no"),
    "in a settings file": ("run.toml", "init = no (no such file)"),
    "one of several callbacks": ("mine.py callback=csv,tensorbord", "try tensorboard"),
}.values():
    try:
        resolve(words.split()).check()
    except Exception as error:
        assert expected in str(error), (words, error)
    else:
        raise AssertionError(words)
resolve(["mine.py"]).check()
resolve(["mine.py:task", "init=no", "tensor=3"]).check()  # the task's own
try:
    resolve("no.py init=no tensor=no.toml".split()).check()
except Exception as error:
    assert "no.py" in str(error), error
from fourfold.cli.feed_pack import run_pack, run_show, run_verify
for call in (
    lambda: run_pack(["nothing", "pack"]),
    lambda: run_pack(["nothing*.npy", "pack"]),
    lambda: run_pack(["nothing.py:x", "pack"]),
    lambda: run_verify("nothing", None),
    lambda: run_show("nothing"),
):
    try:
        call()
    except Exception as error:
        assert "nothing" in str(error), error
    else:
        raise AssertionError(call)
assert "torch" not in sys.modules
"""


def test_files_and_names_that_are_not_there_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def task(*, init: str = 'a', tensor: int = 1): ...\n")
    (tmp_path / "run.toml").write_text('[task]\nname = "lm"\n[run]\ninit = "no"\n')
    command = [sys.executable, "-c", MISSING]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import fourfold as ff\nstep = ff.parallelize(1, 2, 3)\n", True),
        ("print(vars())\n", True),
        ("def task(): return 1\n", False),
        ("from other import task\n", False),
        ("import fourfold as ff\nsmall = ff.Task()\n", False),
    ],
)
def test_a_file_without_a_task_is_a_script(tmp_path: Path, text: str, expected: bool):
    (tmp_path / "mine.py").write_text(text)
    assert is_script(str(tmp_path / "mine.py")) == expected
    assert not is_script(str(tmp_path / "missing.py"))
    assert not is_script("lm")
