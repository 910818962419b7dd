"""Shell completion, and the file that `fourfold new` writes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fourfold.cli import completion, main
from fourfold.cli.commands import COMMANDS, app
from fourfold.cli.completion import EXPORT_OPTIONS
from fourfold.plan.ask import ask_names
from fourfold.plan.plan_fields import FIELDS, PLAN_FIELDS
from fourfold.plan.recipes import recipe_names
from fourfold.trainer.callbacks.registry import SHIPPED
from tests.spawned import SOURCE


def offered(line: str) -> list[str]:
    return completion.candidates(line.split(" "), COMMANDS)


def test_a_word_is_completed_by_what_may_stand_in_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "mine.py").write_text("raise SystemExit\ndef task(*, depth=3): ...\ndef other(breadth=3): ...\n")
    assert offered("") == sorted(COMMANDS)
    assert offered("tr") == ["train"]
    assert {"digits", "lm", "recipe:", "seed=", "length=", *(f"{name}=" for name in FIELDS)} <= set(offered("train "))
    assert offered("show recipe:") == [f"recipe:{name}" for name in recipe_names()]
    assert offered("verify lm zero=") == ["zero=0", "zero=1", "zero=2", "zero=3"]
    assert offered("train sync=") == ["sync=local", "sync=step"]  # what this version can build
    assert offered("train sequence_parallel=") == ["sequence_parallel=false", "sequence_parallel=true"]
    assert offered("train fresh=") == ["fresh=false", "fresh=true"]
    assert offered("train mine.py de") == ["depth="]
    assert offered("train mine.py:other br") == ["breadth="]
    assert "lm" not in offered("train mine.py ")
    assert "recipe:" not in offered("train lm recipe:ddp ")
    assert offered("train lm dp=2 dp") == []
    assert offered("train plan") == ["plan=auto"]
    assert offered("show plan") == offered("train plan=auto plan") == []
    assert offered("plan lm cluster=dgx") == ["cluster=dgx-a100", "cluster=dgx-h100", "cluster=dgx-h200"]
    assert offered("plan lm ask:") == [f"ask:{name}" for name in ask_names()]
    assert offered("plan lm overwrite=") == ["overwrite=false", "overwrite=true"]
    assert {"calibrate", "gpt", "lm", "first", "devices=", "tp=", "length="} <= set(offered("plan "))
    assert offered("plan gpt layer") == offered("plan gpt width=8 layer") == ["layers="]
    assert offered("plan lm devices=4 dev") == offered("plan lm seed") == offered("plan calibrate ") == []
    assert offered("checkpoint ") == ["export", "list", "verify"]
    assert offered("checkpoint list ") == offered("report f") == ["first"]
    assert offered("checkpoint export first --format ") == ["dcp", "hf", "safetensors"]
    assert offered("checkpoint export first --format=h") == ["--format=hf"]
    assert offered("checkpoint export first --f") == ["--format"]
    assert offered("run ") == offered("nonsense ") == []
    assert all(
        rule.choices or rule.type is bool or offered(f"train {name}=") == [] for name, rule in PLAN_FIELDS.items()
    )


def test_callbacks_are_completed_by_name_and_then_by_option():
    assert offered("train lm callback=") == [f"callback={name}" for name in sorted(SHIPPED)]
    assert offered("train lm callback=csv,t") == ["callback=csv,tensorboard", "callback=csv,trackio"]
    assert offered("train lm callback=csv callb") == ["callback="]
    assert offered("train lm callback=csv callback=cs") == []
    assert offered("train lm callback=csv,wandb wandb.mode=offline wan") == [
        "wandb.entity=",
        "wandb.every=",
        "wandb.project=",
    ]
    assert offered("train lm wandb.") == offered("train lm callback=mine.py:x mine") == []


def test_every_option_of_an_export_is_offered():
    checkpoint: Any = vars(typer.main.get_command(app))["commands"]["checkpoint"]
    export = checkpoint.commands["export"]
    assert {name for each in export.params for name in each.opts if name.startswith("--")} == {*EXPORT_OPTIONS}


SHELLS = {
    "bash": 'source script; COMP_LINE="$LINE"; COMP_POINT=${#LINE}; _fourfold; printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": 'source script; complete -C "$LINE" | string replace -r "\\t.*" ""',
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_words_with_colons_and_equal_signs(shell: str, tmp_path: Path):
    if not shutil.which(shell):
        pytest.skip(f"no {shell}")
    (tmp_path / "fourfold").write_text(f'#!/bin/sh\nexec {sys.executable} -m fourfold "$@"\n')
    (tmp_path / "fourfold").chmod(0o755)
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "HOME": str(tmp_path)}
    environ["PATH"] = f"{tmp_path}:{os.environ['PATH']}"

    def complete(line: str) -> set[str]:
        command = [shell, "-c", SHELLS[shell].replace("compopt", ":")]
        done = subprocess.run(command, cwd=tmp_path, env={**environ, "LINE": line}, capture_output=True, check=False)
        return set(done.stdout.decode().split())

    (tmp_path / "script").write_text(completion.SCRIPTS[shell])
    assert complete("fourfold trai") == {"train"}
    # bash takes what follows a colon or an equal sign for a word of its own. fish offers files too.
    recipe, values = complete("fourfold train lm recipe:zero3-"), complete("fourfold show zero=")
    if shell == "bash":
        assert recipe == {"zero3-hybrid"}
        assert values == {"0", "1", "2", "3"}
    else:
        assert recipe == {"recipe:zero3-hybrid"}
        assert {f"zero={value}" for value in range(4)} <= values


def test_completion_prints_a_script_and_imports_no_torch(capsys):
    for shell, script in completion.SCRIPTS.items():
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["completion", shell])
        assert capsys.readouterr().out == script
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["completion", "zhs"])
    assert "try fourfold completion zsh" in capsys.readouterr().err
    code = (
        "import sys; from fourfold.cli.completion import candidates; "
        "assert candidates(['train', 'lm', 'callback=csv', ''], ('train',)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}).returncode == 0


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
