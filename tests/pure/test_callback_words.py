"""Laws of callbacks as words: a name is a shipped callback or one in a file; all that is wrong is said at once."""

import contextlib
import re
from pathlib import Path

import pytest

from fourfold.callbacks import CSV, EarlyStopping
from fourfold.cli import main
from fourfold.cli.arguments import parse_values
from fourfold.cli.callback_loader import load_callbacks
from fourfold.cli.run import resolve
from fourfold.trainer.callbacks.registry import SHIPPED, callback_options, make_shipped, shipped_class
from fourfold.words.errors import SettingError
from fourfold.words.field import value_text
from tests.jobs import parse_job

ROOT = Path(__file__).parents[2]
MINE = """
import fourfold as ff

class Mine(ff.Callback):
    def on_step(self, event):
        print("mine", event.step)

made = Mine()

def make():
    return Mine()

def wrong():
    return 3

def needs(argument):
    return Mine()
"""


def loaded(*words: str) -> list:
    parsed = parse_values(resolve(words).texts, {})
    return load_callbacks(parsed.run.get("callback"), parsed.callback_options)


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)


def test_words_name_callbacks_in_order_with_commas_or_repeated():
    kinds = [type(each).__name__ for each in loaded("callback=csv,early_stopping", "callback=mine.py:made")]
    assert kinds == ["CSV", "EarlyStopping", "Mine"]
    assert [type(each).__name__ for each in loaded("callback=mine.py:Mine,mine.py:make")] == ["Mine", "Mine"]


def test_options_of_shipped_callbacks_are_parsed_by_their_types():
    (got,) = loaded("callback=early_stopping", "early_stopping.patience=7", "early_stopping.min_delta=1e-3")
    assert isinstance(got, EarlyStopping)
    expected = EarlyStopping(patience=7, min_delta=1e-3)
    assert vars(got) == vars(expected)


@pytest.mark.parametrize(("words", "needs"), [
    (["callback=early_stoping"], ["the callback early_stoping", "try early_stopping"]),
    (["callback=csv", "callback=csv"], ["csv, twice"]),
    (["callback=early_stopping", "early_stopping.patience=x"], ["early_stopping.patience = x", "need a whole number"]),
    (["callback=early_stopping", "early_stopping.patience=0"], ["patience = 0", "at least 1"]),
    (["callback=early_stopping", "early_stopping.patient=3"], ["try early_stopping.patience"]),
    (["early_stopping.patience=3"], ["need the callback early_stopping", "try callback=early_stopping"]),
    (["callback=csv,none.py:x,mine.py:Min"], ["none.py (no such file)", "mine.py has no Min", "=mine.py:Mine"]),
    (["callback=mine.py"], ["mine.py without a name", "try callback=mine.py:"]),
    (["callback=mine.py:wrong"], ["mine.py:wrong returned an object of class int"]),
    (["callback=mine.py:needs"], ["mine.py:needs failed", "argument"]),
])  # fmt: skip
def test_what_is_wrong_is_named_with_what_to_try(words, needs):
    with pytest.raises(SettingError) as refused:
        loaded(*words)
    assert all(need in str(refused.value) for need in needs), str(refused.value)


@pytest.mark.parametrize(("name", "options", "need"), [
    ("mine.py:Mine", {}, "need csv, early_stopping"),
    ("os.system", {}, "need csv, early_stopping"),
    ("csv", {"path": "x"}, "an option of csv: folder"),
    ("early_stopping", {"patience": "true"}, "need a whole number"),
    ("wandb", {"settings": "{}"}, "an option of wandb: project, entity, mode, every"),
])  # fmt: skip
def test_a_settings_file_can_name_only_shipped_callbacks_and_their_options(name, options, need):
    with pytest.raises(SettingError, match=need):
        make_shipped(name, options)


def test_every_shipped_callback_is_made_from_its_name_and_default_options():
    for name in SHIPPED:
        defaults = {key: value_text(option.default) for key, option in callback_options(name).items()}
        assert type(make_shipped(name, defaults)) is shipped_class(name)
    assert type(make_shipped("csv", {})) is CSV


def test_the_documentation_lists_every_shipped_callback_with_its_options():
    rows = [line for line in (ROOT / "docs" / "callbacks.md").read_text().splitlines() if line.startswith("| `")]
    for name in SHIPPED:
        (row,) = (row for row in rows if row.startswith(f"| `{name}` | `{shipped_class(name).__name__}` |"))
        assert all(f"`{option}`" in row for option in callback_options(name)), row


def test_the_command_line_calls_the_callback_in_a_file_once_for_each_step(capfd):
    with contextlib.suppress(SystemExit):
        main(["train", "digits", "steps=3", "batch_size=8", "callback=mine.py:made,csv", "name=run", "-n", "1"])
    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if line.startswith("mine")] == ["mine 1", "mine 2", "mine 3"], err
    assert len(Path("runs/run/metrics.csv").read_text().splitlines()) == 4


def test_a_callback_in_the_file_of_the_task_is_of_the_same_module(capfd):
    Path("both.py").write_text(f"print('imported')\nfrom fourfold.tasks.digits import task{MINE}")
    with contextlib.suppress(SystemExit):
        main(["train", "both.py", "steps=1", "batch_size=8", "callback=both.py:made", "-n", "1"])
    out, err = capfd.readouterr()
    assert out.count("imported") == 1, err
    assert "mine 1" in out


@pytest.mark.parametrize("word", [
    "callback=cvs",
    "callback=csv,mine.py:made,cvs",
    "callback=mine.py:maid",
    "csv.folder=x",
    "callback=csv callback=early_stopping early_stopping.patience=x",
    "seed=x",
    "widht=3",
])  # fmt: skip
def test_a_wrong_name_is_refused_before_a_launcher_says_that_processes_start(word, capfd):
    Path("mine.py").write_text("raise SystemExit('the file was run')\ndef made(): ...")
    for command in ("train", "verify"):
        if command == "train" or "callback" not in word:
            with pytest.raises(SystemExit, match="2"):
                main([command, "digits", "dp=2", *word.split()])
            assert "starting" not in capfd.readouterr().out


@pytest.mark.parametrize(("words", "expected"), [
    (["train", "digits", "callback=mine.py:maid"], "mine.py has no maid .*try callback=mine.py:made"),
    (["feed", "pack", "mine.py:maid", "x.pack"], "mine.py:maid .*try mine.py:made"),
    (["feed", "pack", "mime.py:made", "x.pack"], r"mime.py \(no such file\) .*try mine.py"),
    (["train", "mine.py:maid"], "no maid .*try mine.py:made"),
])  # fmt: skip
def test_a_name_that_a_file_does_not_have_is_said_with_the_near_one_and_without_running_it(words, expected, capfd):
    Path("mine.py").write_text("raise SystemExit('the file was run')\ndef made(): ...")
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert re.search(expected, " ".join(capfd.readouterr().err.split()))


def test_several_values_are_refused_before_a_launcher_says_that_processes_start_where_they_are_no_sweep(capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "digits", "dp=2", "lr=1,2"])
    assert "starting" not in capfd.readouterr().out


def test_right_words_are_known_without_the_task_and_without_running_a_file():
    Path("mine.py").write_text("raise SystemExit('the file was run')\ndef task(*, betas=(1, 2)): ...\nmade = 1")
    Path("config.toml").write_text("[task]\nbetas = [1, 2]\n[run]\ncallback = 'csv'\n[plan]\nzero = 1")
    words = ["mine.py", "callback=csv,mine.py:made", "csv.folder=x", "betas=1,2", "seed=3"]
    for known in (words, [*words, "config.toml"]):
        resolve(known).check(3)
        assert resolve(known).plan(3).mesh.size == 3
    for wrong in ("keep=x", "bettas=1", "betas=x", "csv.foldr=x"):
        with pytest.raises(SettingError, match=wrong.partition("=")[0]):
            resolve([*words, wrong]).check(3)


def test_early_stopping_without_evaluations_is_refused_before_any_process_starts(capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "digits", "callback=early_stopping", "-n", "2"])
    assert "EarlyStopping, without evaluate_every" in capfd.readouterr().err
    assert not Path("runs").exists()


def test_a_settings_file_names_shipped_callbacks_and_a_run_writes_them_down():
    options = 'evaluate_every = 2\ncallback = "csv,early_stopping"\nearly_stopping.patience = 7\n'
    Path("config.toml").write_text(f'[task]\nname = "digits"\n[run]\n{options}')
    job = parse_job(["config.toml"])
    assert [type(each).__name__ for each in job.callbacks] == ["CSV", "EarlyStopping"]
    job.run_dir.mkdir(parents=True)
    (job.run_dir / "config.toml").write_text(job.settings["config_text"])
    for words in (["config.toml"], [str(job.run_dir / "config.toml")]):
        again = parse_job(words)
        assert vars(again.callbacks[1]) == vars(EarlyStopping(patience=7))
        assert again.identity == job.identity


@pytest.mark.parametrize(("value", "needs"), [
    ("mine.py:Mine", ["shipped callbacks: csv", "try callback=mine.py:Mine in the command"]),
    ("csv,tensorbord", ["shipped callbacks", "try tensorboard"]),
    ("csv,none", ["shipped callbacks"]),
])  # fmt: skip
def test_a_settings_file_that_names_another_callback_is_refused_and_runs_nothing(value, needs):
    Path("mine.py").write_text("raise SystemExit('the file was run')")
    Path("config.toml").write_text(f'[task]\nname = "digits"\n[run]\ncallback = "{value}"\n')
    with pytest.raises(SettingError) as refused:
        parse_job(["config.toml"])
    assert all(need in str(refused.value) for need in needs), str(refused.value)


def test_a_settings_file_may_name_callbacks_in_a_list():
    Path("config.toml").write_text('[task]\nname = "digits"\n[run]\ncallback = ["csv", "tensorboard"]\n')
    job = parse_job(["config.toml"])
    assert [type(each).__name__ for each in job.callbacks] == ["CSV", "TensorBoard"]
    assert 'callback = "csv,tensorboard"' in job.settings["config_text"]
    Path("config.toml").write_text('[task]\nname = "digits"\n[run]\ncallback = ["csv", 3]\n')
    with pytest.raises(SettingError, match=r'callback = \["csv", 3\] in \[run\]   need shipped callbacks: csv'):
        parse_job(["config.toml"])


def test_callbacks_of_the_command_replace_those_of_the_file_and_options_are_never_lost_silently():
    text = '[task]\nname = "digits"\n[run]\ncallback = "early_stopping"\nearly_stopping.patience = 7\n'
    Path("config.toml").write_text(text)
    got = "early_stopping.patience = 7 in config.toml, whose callbacks callback=csv in the command replaces"
    with pytest.raises(SettingError) as refused:
        parse_job(["config.toml", "callback=csv"])
    assert f"{got}   need the callback early_stopping   try callback=csv,early_stopping to keep both" in str(
        refused.value
    )
    assert len(refused.value.problems) == 1
    both = parse_job(["config.toml", "callback=csv,early_stopping"]).callbacks
    assert vars(both[1]) == vars(EarlyStopping(patience=7))
    assert parse_job(["config.toml", "callback=none"]).callbacks == []
    Path("config.toml").write_text(text.replace("early_stopping.patience = 7\n", ""))
    assert [type(each) for each in parse_job(["config.toml", "callback=csv"]).callbacks] == [CSV]


def test_a_run_with_a_callback_in_a_file_writes_it_as_a_comment():
    text = parse_job(["digits", "callback=mine.py:made,csv"]).settings["config_text"]
    assert "# in the command: callback=mine.py:made" in text
    assert 'callback = "csv"' in text
