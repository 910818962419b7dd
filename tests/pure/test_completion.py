"""Shell completion, and the file that `fourfold new` writes."""

import os
import subprocess
import sys

import pytest

from fourfold.cli import main
from fourfold.plan.plan_fields import FIELDS
from tests.spawned import SOURCE


def offered(*words: str) -> set[str]:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "_FOURFOLD_COMPLETE": "complete_bash"}
    environ |= {"COMP_WORDS": "\n".join(["fourfold", *words]), "COMP_CWORD": str(len(words))}
    code = "import sys, fourfold.cli as cli\ntry: cli.main()\nfinally: assert 'torch' not in sys.modules"
    return set(subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True).stdout.split())


def test_tab_offers_commands_options_tasks_recipes_fields_and_settings_without_torch():
    assert offered("tr") == {"train"}
    assert {"digits", "lm", "recipe:zero3", "seed=", *(f"{name}=" for name in FIELDS)} <= offered("train", "")
    assert offered("verify", "lm", "zero=") == {"zero=0", "zero=1", "zero=2", "zero=3"}
    assert offered("checkpoint", "export", "first", "--f") == {"--format"}


def test_a_new_task_file_trains_as_it_is_and_is_never_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["new", "mine.py"])
    assert capsys.readouterr().out == "mine.py is a task that trains: fourfold train mine.py -n 2\n"
    lint = ["ruff", "check", "--isolated", "--select=E,F", "--line-length=120", "mine.py"]
    subprocess.run(lint, check=True, stdout=subprocess.DEVNULL)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", "mine.py", "-n", "1", "width=16", "name=first"])
    lines = capsys.readouterr().out.splitlines()
    (accuracy,) = (float(line.split()[-1].rstrip("%")) for line in lines if line.startswith("accuracy"))
    assert accuracy > 0.9
    before = (tmp_path / "mine.py").read_text()
    for file, problem in {
        "mine.py": "mine.py exists   need a file that does not   try mine_2.py",
        "mine.txt": "need a file FILE.py   try mine.py",
        "nowhere/mine.py": "nowhere/mine.py (no folder nowhere)   need an existing folder   try mkdir -p nowhere",
    }.items():
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["new", file])
        assert problem in capsys.readouterr().err
    assert (tmp_path / "mine.py").read_text() == before
