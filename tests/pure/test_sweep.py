"""Laws of a sweep: every combination is a run of its own, and all are checked before the first begins."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import run_commands
from fourfold.cli.job import Job
from fourfold.cli.launch import Ended
from fourfold.cli.run import resolve
from fourfold.cli.run_commands import with_plan
from fourfold.cli.sweep import Member, format_sweep, prepare_sweep, run_sweep
from fourfold.words.errors import FourfoldError, SettingError

TASK = """
import torch
import fourfold as ff


def task(*, lr: float = 0.1, betas: tuple = (0.9, 0.99), text: str = "", width: int = 1):
    return ff.Task(
        model=lambda: torch.nn.Linear(4, width),
        loss=lambda outputs, targets: (outputs - targets) ** 2,
        data=lambda: ff.Data(train=[(torch.zeros(4), torch.zeros(1))] * 8),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        steps=4,
        batch_size=8,
    )
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a task file; it is the current folder."""
    here, before = tmp_path_factory.mktemp("sweep"), Path.cwd()
    (here / "mine.py").write_text(TASK)
    (here / "a,b.txt").write_text("")
    os.chdir(here)
    yield here
    os.chdir(before)


def prepared(*words: str) -> list[Member]:
    run = resolve(["mine.py", *words])
    return prepare_sweep(run, run.swept_values(), lambda member: with_plan(member, None, None))


@pytest.mark.parametrize(("words", "swept"), [
    (["lr=1"], {}),
    (["lr=1,2"], {"lr": ["1", "2"]}),
    (["lr=1,2", "zero=0,1", "seed=3,4"], {"lr": ["1", "2"], "zero": ["0", "1"], "seed": ["3", "4"]}),
    (["betas=0.5,0.9"], {}),
    (["lr_milestones=0.5,0.9"], {}),
    (["text=a,b.txt"], {}),
    (["text=a,c.txt"], {}),
    (["text=a,b", "callback=csv,early_stopping"], {}),
    (["name=a,b"], {}),
    (["unknown=1,2"], {}),
    (["pp=4", "stages=4,1,4,3", "program=a,b.txt"], {}),
])  # fmt: skip
def test_a_comma_separates_values_unless_they_have_commas_themselves(words: list[str], swept: Any) -> None:
    assert resolve(["mine.py", *words]).swept_values() == swept


@pytest.mark.parametrize("word", ["lr=1,", "lr=,1", "lr=1,,2", "lr=1,2,1"])
def test_missing_and_repeated_values_are_refused(word: str) -> None:
    with pytest.raises(SettingError, match="value"):
        resolve(["mine.py", word]).swept_values()


@pytest.mark.parametrize("named", [[], ["name=first"]])
def test_each_member_is_its_own_run_named_after_its_values(named: list[str]) -> None:
    sweep = prepared("lr=1,2", "zero=0,1", "codec=none,int8", "dp=1", *named)
    assert [tuple(member.values.values()) for member in sweep][:3] == [
        ("1", "0", "none"),
        ("1", "0", "int8"),
        ("1", "1", "none"),
    ]
    names = [member.run_dir.name for member in sweep]
    assert len(set(names)) == 8
    assert names[0].startswith(f"{'first' if named else 'mine'}-lr=1-zero=0-codec=none")
    assert names == [
        member.run_dir.name for member in prepared("lr=1,2", "zero=0,1", "codec=none,int8", "dp=1", *named)
    ]
    other = prepared("lr=1,2", "zero=0,1", "codec=none,int8", "dp=1", "steps=5", *named)
    assert named or not set(names) & {member.run_dir.name for member in other}


def test_the_problems_of_all_members_are_reported_at_once_and_each_once() -> None:
    with pytest.raises((FourfoldError, ExceptionGroup)) as caught:
        prepared("width=1,2", "batch_size=7,9", "dp=2", "ema=3")
    error = caught.value
    texts = [str(each) for each in (error.exceptions if isinstance(error, ExceptionGroup) else [error])]
    assert len(texts) == len(set(texts)) == 1, "ema is refused before batches are looked at"
    with pytest.raises(ExceptionGroup) as group:
        prepared("width=1,2", "batch_size=7,9", "dp=2")
    assert [
        str(each).count("batch_size = 7") + str(each).count("batch_size = 9") for each in group.value.exceptions
    ] == [1, 1]


def finish(member: Member, loss: float | None) -> None:
    member.run_dir.mkdir(parents=True, exist_ok=True)
    record = {"finished": 4, "seconds": 1.0, "rate": 1234.5, "unit": "tokens", "valid": {"loss": loss}, "loss": loss}
    (member.run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")


def test_a_failing_member_does_not_hide_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    sweep = prepared("lr=1,2,3,4", "dp=1")
    tried = []

    def train(job: Job) -> int:
        member = next(each for each in sweep if each.job is job)
        tried.append(member)
        if member.values == {"lr": "1"}:
            return 1
        if member.values == {"lr": "2"}:
            raise SettingError("in use")
        finish(member, None if member.values == {"lr": "4"} else 0.25)
        return 0

    assert run_sweep(sweep, train) == 1
    assert len(tried) == 4
    out, err = capfd.readouterr()
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("1 ", "2 ", "3 ", "4 "))}
    assert lines["1"][1:3] == ["failed", "(1)"]
    assert lines["2"][1:3] == ["failed", "(2)"]
    assert "in use" in err
    assert lines["3"][1:4] == ["0.2500", "0.2500", "1,234"]
    assert lines["4"][1:3] == ["nan", "1,234"]
    assert f"fourfold report {sweep[2].run_dir} {sweep[3].run_dir}" in out


@pytest.mark.parametrize("code", [75, 130, 129])
def test_a_stop_ends_the_sweep_with_its_code(code: int, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = prepared("lr=5,6,7", "dp=1")
    codes = iter([1, code])
    assert run_sweep(sweep, lambda job: next(codes)) == code
    out = capfd.readouterr().out
    assert "stopped" in out
    assert "not begun" in out
    assert format_sweep(sweep, {})[1].split()[1:3] == ["not", "begun"]


def test_a_signal_that_came_when_a_run_had_finished_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    run, begun = resolve(["mine.py", "lr=8,9", "dp=1"]), list[object]()

    def launch(run: object, *_: object) -> Ended:
        begun.append(run)
        return Ended(0, stop_code=75)

    monkeypatch.setattr(run_commands, "_launch_run", launch)
    assert run_commands._train_sweep(run, run.swept_values(), None, None) == 75
    assert len(begun) == 1
