"""Laws of printed text: whatever its source, it contains no terminal controls."""

import io
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cli import main
from fourfold.cli.commands import COMMANDS
from fourfold.launcher.traceback_text import format_error
from fourfold.tasks import lm
from fourfold.trainer.progress import Progress
from fourfold.words.errors import Problem, SettingError
from fourfold.words.terminal_text import align_columns, escape_controls, table_lines, wrap_lines

CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode categories
NASTY = "a\x1b[31mb\x07\x9bc\x7f\u202ed\u2066\u2028\r\x00"


def controls_in(text: str) -> list[str]:
    return [char for char in text if unicodedata.category(char) in CONTROLS and char not in "\n\t"]


@given(st.text(st.characters(codec=None)))
def test_escaped_text_has_no_controls_and_escaping_is_idempotent(text: str) -> None:
    assert not controls_in(escape_controls(text))
    assert escape_controls(escape_controls(text)) == escape_controls(text)


def test_controls_are_escaped_and_text_of_every_language_is_kept() -> None:
    assert escape_controls("\x1b[2J \x9b \x7f \u202e") == r"\x1b[2J \x9b \x7f \u202e"
    text = "Grüße, 你好\u3000שלום\u00a0\tümlaut\n"
    assert escape_controls(text) == text


def test_errors_are_printed_escaped() -> None:
    assert not controls_in(str(SettingError(Problem(NASTY, NASTY, NASTY), where=NASTY)))
    assert not controls_in(str(SettingError(NASTY)))
    assert not controls_in(format_error(ValueError(NASTY)))
    assert r"\x1b[31m" in format_error(ValueError(NASTY))


def test_a_sample_of_generated_text_is_printed_escaped() -> None:
    out = io.StringIO()
    Progress(out, live=False).finish(f"sample\n{NASTY}")
    assert not controls_in(out.getvalue())
    assert r"\x1b[31m" in out.getvalue()


def test_generated_text_has_no_controls() -> None:
    model = lm.task(width=8, heads=1, layers=1, length=8).model()
    assert not controls_in(lm.generate(model, prompt=NASTY, length=8, temperature=5.0, num_bytes=64))


MODEL = """
import torch
import fourfold as ff


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("w\\x1b[31m", torch.nn.Parameter(torch.ones(4)))

    def forward(self, x):
        return x * dict(self.named_parameters())["w\\x1b[31m"]


task = ff.Task(
    model=Named,
    loss=lambda outputs, targets: (outputs - targets) ** 2,
    data=lambda: ff.Data(train=[(torch.ones(4), torch.zeros(4))] * 4),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    steps=1,
    batch_size=2,
)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "dp=1", "nasty.py"),
        ("verify", "dp=1", "nasty.py"),
        ("train", "\x1b[31m.py"),
        ("train", "nasty.py", "width=\u202e3"),
        ("checkpoint", "list", "run\x1b[31m"),
        ("checkpoint", "verify", "run\x1b[31m"),
        ("report", "\x9b31m"),
    ],
)
def test_no_command_prints_a_users_control_characters(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("nasty.py").write_text(MODEL)
    Path("run\x1b[31m/checkpoints").mkdir(parents=True)
    try:
        with pytest.raises(SystemExit):
            main(arguments)
    finally:
        sys.modules.pop("nasty", None)
    out, err = capfd.readouterr()
    assert out or err
    assert not controls_in(out + err)


@given(
    st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=30), min_size=1), st.integers(0, 8)
)
def test_wrapped_lines_fit_and_keep_every_word(words: list[str], indent: int) -> None:
    text = " " * indent + " ".join(words)
    lines = wrap_lines(text, 60).split("\n")
    assert all(len(line) <= 60 for line in lines)
    assert " ".join(lines).split() == text.split()


def test_a_wrapped_line_goes_on_below_its_last_column() -> None:
    assert wrap_lines("  name  a b c d e", 12) == "  name  a b\n        c d\n        e"
    assert wrap_lines("    need a b c d", 12) == "    need a b\n         c d"


def test_of_a_line_of_code_in_a_traceback_the_marked_part_is_shown() -> None:
    place, code = (
        '  File "a b c.py", line 1, in <lambda>',
        "task = Task(model=Net, loss=lambda out, y: out.mse(y), steps=8)",
    )
    marks = code.index("out.mse") * " " + "^^^^^^^^^^"
    shown = wrap_lines(f"{place}\n    {code}\n    {marks}\nTypeError: a b", 40).split("\n")
    assert (shown[0], shown[3:]) == (place, ["TypeError: a b"])
    assert max(map(len, shown[1:])) <= 40
    assert shown[1][shown[2].index("^") :].startswith("out.mse(y)")
    assert wrap_lines(f"{place}\n    {code}\n", 40) == f"{place}\n    {code[:36]}\n"


@given(st.lists(st.lists(st.text("ab .", max_size=30).map(str.strip), min_size=4, max_size=4), min_size=2))
def test_columns_that_do_not_fit_follow_below_with_the_first_column(rows: list[list[str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "70")
        lines = table_lines(rows, "<><<")
    assert all(len(line) <= 68 for line in lines)
    assert not [line for line in lines if line.endswith(" ")]
    assert lines == align_columns(rows, "<><<") or len(lines) > len(rows)


@pytest.mark.parametrize("command", ["", *COMMANDS, "feed bench", "feed pack", "checkpoint export"])
def test_the_help_of_every_command_fits_into_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert max(map(len, capsys.readouterr().out.split("\n"))) <= 80


@pytest.mark.parametrize("words", ["recipe:", "recipe:four-d", "recipe:zero-bubble", "recipe:powersgd"])
def test_what_show_prints_fits_into_80_columns(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["show", words])
    assert max(map(len, capsys.readouterr().out.split("\n"))) <= 80
