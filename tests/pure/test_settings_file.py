"""Laws of the settings file: one TOML reproduces a run, and all that is wrong in it is refused at once."""

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.cli.job import Job
from fourfold.plan.decode import format_pair, format_table, format_value, from_toml
from fourfold.tasks import lm
from fourfold.trainer.settings import Settings
from fourfold.words.errors import FourfoldError
from fourfold.words.field import Field
from tests.jobs import parse_job

TASK = """
import torch
import fourfold as ff


def task(*, width: int = 4, lr: float = 0.1, data: str | None = None, betas: tuple = (0.9, 0.99), steps: int = 40,
         clip: float | None = 1, any_value=None, seed: int = 5):
    return ff.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda outputs, targets: (outputs - targets) ** 2,
        data=lambda: ff.Data(train=[(torch.zeros(4), torch.zeros(1))] * 8),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        steps=steps,
        batch_size=8,
        clip=clip,
    )


def plain(lr: float = 0.1):
    return task(lr=lr)


def doubled(steps: int = 3):
    return task(steps=2 * steps)


def named(name: str = "x"):
    return task()


fixed = task()
"""


RULES = """
"*.up" = "column(2)"
"*.down" = "row"
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a task file; it is the current folder."""
    here, before = tmp_path_factory.mktemp("settings_file"), Path.cwd()
    (here / "tasks").mkdir()
    (here / "tasks" / "mine.py").write_text(TASK)
    (here / "rules.toml").write_text(RULES)
    os.chdir(here)
    yield here
    os.chdir(before)


def same_again(job: Job) -> Job:
    """The job of the config.toml that this job writes, from its place."""
    job.run_dir.mkdir(parents=True, exist_ok=True)
    path = job.run_dir / "config.toml"
    path.write_text(job.settings["config_text"])
    return parse_job([str(path)])


def is_same(one: Job, other: Job) -> bool:
    """Whether two jobs are one run, with the same settings."""
    one_settings, other_settings = ({**job.settings, "config_text": ""} for job in (one, other))
    tasks = [(j.task.steps, j.task.batch_size, j.task.clip, j.task.tuned_for, j.task.tensor) for j in (one, other)]
    launch = [(job.restarts, job.hang_seconds) for job in (one, other)]
    defaults = {each.name: each.default for each in dataclasses.fields(Settings)}
    return (
        one.identity == other.identity
        and repr(one.identity) == repr(other.identity)  # 1 and 1.0 are different texts in a name's hash
        and one.plan == other.plan
        and {**defaults, **one_settings} == {**defaults, **other_settings}
        and tasks[0] == tasks[1]
        and launch[0] == launch[1]
    )


PLAIN_VALUES = (
    st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]), max_size=1200)
)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
        PLAIN_VALUES | st.lists(PLAIN_VALUES, max_size=3),
        max_size=4,
    )
)
@settings(max_examples=25, deadline=None)
def test_what_the_writer_writes_is_read_as_the_same_values(values: dict[str, Any]) -> None:
    text = "\n".join(format_table(values))
    assert repr(tomllib.loads(text)) == repr(values)
    if len(text) < 2**15:
        assert repr(from_toml(text)) == repr(values)  # whose lines are bounded


@pytest.mark.parametrize("value", [None, object(), "\ud800", {}, [None]])
def test_the_writer_refuses_what_toml_cannot_hold(value: Any) -> None:
    with pytest.raises(ValueError, match=r"a \w+|the character"):
        format_value(value)


MINE = "tasks/mine.py:task"
WORDS = {
    "dp": st.sampled_from(["dp=1", "dp=2"]),
    "zero": st.sampled_from(["zero=1", "zero=2"]),
    "shard": st.just("shard=none"),
    "precision": st.just("precision=bf16"),
    "width": st.integers(-9, 99).map("width={}".format),
    "lr": st.floats(0.0, 9.0, exclude_min=True).map("lr={!r}".format),
    "data": st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9).map("data={}".format),
    "betas": st.sampled_from(["betas=0.5", "betas=0.5,1"]),
    "steps": st.integers(30, 50).map("steps={}".format),
    "clip": st.sampled_from(["clip=none", "clip=1", "clip=inf", "clip=0.25"]),
    "any_value": st.sampled_from(["any_value=none", "any_value=3", "any_value=3.0", "any_value=x", "any_value=true"]),
    "seed": st.integers(0, 9).map("seed={}".format),
    "batch_size": st.sampled_from(["batch_size=8", "batch_size=1e1"]),
    "evaluate_every": st.sampled_from(["evaluate_every=4", "evaluate_every=none"]),
    "ema": st.sampled_from(["ema=0.5", "ema=none"]),
    "init": st.sampled_from(["init=a b.safetensors", "init=none"]),
    "tensor": st.just("tensor=rules.toml"),
    "name": st.sampled_from(["name=none", "name=first try"]),
    "hang_seconds": st.sampled_from(["hang_seconds=none", "hang_seconds=7"]),
    "restarts": st.just("restarts=0"),
    "fresh": st.just("fresh=true"),
    "lr_warmup": st.sampled_from(["lr_warmup=0", "lr_warmup=2"]),
    "lr_schedule": st.sampled_from(["lr_schedule=step", "lr_schedule=constant"]),
    "lr_milestones": st.just("lr_milestones=0.25,0.5"),
}  # fmt: skip
OF_PLAIN = sorted(set(WORDS) - {"width", "data", "betas", "any_value"})


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_the_resolved_file_given_back_is_the_same_run(data: Any) -> None:
    spec = data.draw(
        st.sampled_from([MINE, "tasks/mine.py:plain", "tasks/mine.py:fixed", "./tasks/../tasks/mine.py:plain"])
    )
    names = sorted(WORDS) if spec == MINE else [name for name in OF_PLAIN if name != "lr" or "plain" in spec]
    given = data.draw(st.lists(st.sampled_from(names), unique=True))
    job = parse_job([spec, *(data.draw(WORDS[name]) for name in given)])
    again = same_again(job)
    assert is_same(job, again), job.settings["config_text"]
    assert not again.fresh
    assert is_same(again, same_again(again))


def test_every_field_and_setting_has_its_place_in_the_resolved_file() -> None:
    text = parse_job(["tasks/mine.py:plain", "dp=2", "lr=0.5"]).settings["config_text"]
    table = tomllib.loads(text)
    assert table["task"] == {"name": "../../tasks/mine.py:plain", "lr": 0.5}
    assert next(iter(table["plan"])) == "dp"
    assert table["plan"]["zero"] == 0
    assert {"steps": 40, "batch_size": 8, "seed": 0, "evaluate_every": "none"}.items() <= table["run"].items()
    assert "fresh" not in table["run"]
    assert "# lr_schedule: the task's" in text
    default = parse_job([MINE]).settings["config_text"]
    assert "# width = 4" in default
    assert "# betas = [0.9, 0.99]" in default
    assert "# seed = 5" in default, "the task's function takes the word seed"
    assert "seed" not in tomllib.loads(default)["run"]


def test_the_rules_of_a_file_replace_the_tasks_and_stand_in_the_resolved_file_themselves() -> None:
    job = parse_job(["lm", "tp=2", "tensor=rules.toml"])
    assert job.task.tensor == {"*.up": "column(2)", "*.down": "row"}
    assert tomllib.loads(job.settings["config_text"])["run"]["tensor"] == job.task.tensor
    assert job.identity == parse_job(["lm"]).identity, "how layers are split does not change what is trained"
    own = parse_job(["lm", "tp=2"])
    assert own.task.tensor == lm.task().tensor
    assert "tensor" not in tomllib.loads(own.settings["config_text"])["run"]
    for text in ("[run]\ntensor = 'rules.toml'", "[run.tensor]\n'*.up' = 'column(2)'\n'*.down' = 'row'"):
        assert parse_job(["lm", "tp=2", written(text)], has_run_dir=False).task.tensor == job.task.tensor
    (Path("other.toml")).write_text("head = 'vocabulary'")
    both = ["lm", "tp=2", written("[run.tensor]\n'*.up' = 'column'"), "tensor=other.toml"]
    assert parse_job(both).task.tensor == {"head": "vocabulary"}, "the command wins over the file"


def test_a_task_that_makes_its_own_number_of_steps_is_given_back_the_argument() -> None:
    for words in ([], ["steps=5"]):
        job = parse_job(["tasks/mine.py:doubled", *words])
        assert is_same(job, same_again(job))
    assert "steps" not in tomllib.loads(job.settings["config_text"])["run"]


@pytest.mark.parametrize("words", [[], ["name=y"]])
def test_an_argument_called_name_stands_under_run(words: list[str]) -> None:
    job = parse_job(["tasks/mine.py:named", *words])
    assert is_same(job, same_again(job))


@pytest.mark.parametrize("place", ["here.toml", "tasks/here.toml", "deep/er/here.toml"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_tasks_path_counts_from_the_folder_of_the_file(folder: Path, place: str, absolute: bool) -> None:
    file = folder / place
    file.parent.mkdir(parents=True, exist_ok=True)
    name = os.path.relpath(folder / "tasks" / "mine.py", file.parent)
    file.write_text(f'[task]\nname = "{name}:plain"\nlr = 2\n')
    job = parse_job([str(file) if absolute else place])
    assert job.identity == parse_job(["tasks/mine.py:plain", "lr=2"]).identity


def written(text: str) -> str:
    Path("config.toml").write_text(text)
    return "config.toml"


def test_words_win_over_the_file() -> None:
    file = written(
        '[task]\nname = "tasks/mine.py:plain"\nlr = 3\n[plan]\ndp = 2\nzero = 1\n[run]\nsteps = 9\nema = 0.5\n'
    )
    job = parse_job([file, "lr=0.25", "zero=2", "steps=8", "ema=none"])
    assert job.settings["extra_settings"] == {"lr": 0.25}
    assert (job.plan.dp, job.plan.zero, job.task.steps) == (2, 2, 8)
    assert "ema" not in job.identity
    assert parse_job([file]).identity["ema"] == 0.5


def test_a_file_without_dp_leaves_it_to_the_processes() -> None:
    file = written("[plan]\nzero = 1\n")
    assert parse_job(["tasks/mine.py", file], num_processes=3).plan.dp == 3


def test_a_toml_without_sections_is_a_plan() -> None:
    file = written("version = 1\nzero = 1\ndp = 2\n")
    assert parse_job(["tasks/mine.py", file]).plan.zero == 1


def problems(text: str, *words: str, **options: Any) -> str:
    with pytest.raises((FourfoldError, ExceptionGroup)) as caught:
        parse_job([*words, written(text)], **options)
    error = caught.value
    text = "\n".join(map(str, error.exceptions if isinstance(error, ExceptionGroup) else [error]))
    return re.sub(r" {3,}", "   ", text)  # columns are aligned


@pytest.mark.parametrize(("text", "expected"), [
    ("[plan]\nsteps = 100", "steps = 100 in [plan]   need a field of the plan   try move it to [run]"),
    ("[run]\nzero = 1", "zero = 1 in [run]   need a setting of the run   try move it to [plan]"),
    ("[run]\nwidth = 1", "width = 1 in [run]   need a setting of the run   try move it to [task]"),
    ("[run]\nstep = 1", "step = 1 in [run]   need a setting of the run   try steps"),
    ("[plan]\nbatchsize = 1", "batchsize = 1 in [plan]   need a field of the plan   try batch_size in [run]"),
    ("[plan]\nzeroo = 1", "zeroo = 1 in [plan]   need a field of the plan   try zero"),
    ("[task]\nwidht = 1", "widht = 1 in [task]   need an argument of the task   try width"),
    ("[task]\nbatch_size = 1", "batch_size = 1 in [task]   need an argument of the task   try move it to [run]"),
    ("[runs]\nsteps = 1", "[runs]   need one section [task], [plan] or [run]   try [run]"),
    ("[[run]]\nsteps = 1", "[[run]]   need one section"),
    ("steps = 1\n[plan]\n", "steps = 1   need every key in a section: [task], [plan] or [run]   try move it to [run]"),
    ("[run]\nskip_nan = -1", "skip_nan = -1 in [run]   need a whole number of at least 0"),
    ('[run]\nbatch_size = "8"', 'batch_size = "8" in [run]   need a whole number of at least 1'),
    ("[run]\nbatch_size = true", "batch_size = true in [run]   need a whole number of at least 1"),
    ("[run.ema]\nx = 1", "ema = a table in [run]   need a number above 0"),
    ("[run]\nema = 2021-01-01", "ema = a date in [run]   need a number above 0"),
    ("[task]\nlr = [0.1, 0.2]", "lr = [0.1, 0.2] in [task]   need a number   try lr=0.1,0.2 on the command line"),
    ("[plan]\nzero = 7", "zero = 7 in [plan]   need one of 0, 1, 2, 3"),
    ("[task]\nsteps = 1\n[run]\nsteps = 1", "steps in [run] and in [task]   need each key once"),
    ("version = 2\n[plan]", "version = 2   need version = 1"),
    ("[plan]\nversion = 2", "version = 2 in [plan]   need version = 1"),
    ("[run]\ntensor = 3", "tensor = 3 in [run]   need a text"),
    ("[run.tensor]\nx = 3", '"x" = 3 in [run.tensor]   need a rule as text   try "x" = "column"'),
    ("[run.tensor]\n'*.up' = 'rwo'", '"*.up": the style "rwo" in [run.tensor]   need a style:'),
    ("[run.tensor]\na.b = 'row'", 'a table, a in [run.tensor]   need no tables; a pattern with dots in quotes'),
    ("[tensor]\n'*.up' = 'row'", "[tensor]   need one section [task], [plan] or [run]   try [run.tensor]"),
    ("[task]\nname = 3", "name = 3 in [task]   need the task's name"),
])  # fmt: skip
def test_each_problem_of_a_file_names_the_file_the_section_and_where_a_key_belongs(text: str, expected: str) -> None:
    found = problems(text, *([] if "name" in text else [MINE]))
    assert expected in found
    assert "config.toml" in found


def test_a_rules_file_that_is_wrong_is_reported_with_the_other_problems() -> None:
    Path("wrong.toml").write_text("'*.up' = 'rwo'\n'*.down' = 3")
    Path("binary.toml").write_bytes(b"\xff")
    wrong = problems("[run]\ntensor = 'wrong.toml'", "lm", "zero=7")
    for part in (
        "zero = 7",
        "2 problems in wrong.toml",
        '"*.up": the style "rwo"',
        '"*.down" = 3   need a rule as text',
    ):
        assert part in wrong
    missing = "tensor = rule.toml (no such file)   need a TOML file of tensor rules   try rules.toml"
    assert missing in problems("[run]\ntensor = 'rule.toml'", "lm")
    assert "need a TOML file of tensor rules   try tensor=rules.toml" in problems("[run]\ntensor = ''", "lm")
    binary = "tensor = binary.toml is not a text file   need TOML in UTF-8"
    assert binary in problems("[run]\ntensor = 'binary.toml'", "lm")


def test_all_problems_of_a_file_are_reported_at_once() -> None:
    text = problems("[runs]\n[plan]\nzero = 7\nstep = 1\n[run]\nskip_nan = -1\n[task]\nlr = 'x'\n", MINE, "dp=x")
    for part in ("[runs]", "zero = 7", "step = 1", "skip_nan = -1", 'lr = "x"', "dp = 'x'"):
        assert part in text
    assert "5 problems in config.toml" in text


def test_two_tasks_are_refused_and_one_named_twice_is_not() -> None:
    text = '[task]\nname = "tasks/mine.py:plain"\n'
    assert "need one task" in problems(text, "lm")
    assert parse_job([written(text), "./tasks/mine.py:plain"]).task_name == "tasks/mine.py:plain"


def test_a_size_that_does_not_fit_the_processes_is_reported_with_the_files_name() -> None:
    assert "in config.toml" in problems("[plan]\ndp = 3\n", MINE, num_processes=2)


def test_a_task_file_is_found_only_where_the_command_would_find_it(folder: Path) -> None:
    assert "no such file" in problems('[task]\nname = "mine.py:task"\n')


@given(
    st.recursive(
        PLAIN_VALUES,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    )
)
@settings(max_examples=25, deadline=None)
def test_a_value_of_any_type_is_accepted_or_refused_and_never_changed(value: Any) -> None:
    for kind in (int, float, bool, str, tuple, None):
        for is_optional in (False, True):
            try:
                found = Field(type=kind, is_optional=is_optional).convert(value)
            except (ValueError, OverflowError):
                continue
            if kind is float and isinstance(value, int):
                value = float(value)  # as for the same digits on the command line
            assert found is None or found == value or repr(found) == repr(value) or list(found) == value
            assert found is None or kind is None or type(found) is kind


def test_a_key_that_needs_quotes_is_written_with_them() -> None:
    assert format_pair("a b", 1) == '"a b" = 1'


def test_what_a_setting_checks_itself_is_checked_in_a_file_and_in_a_word_with_its_place() -> None:
    need = "need increasing fractions of the steps, between 0 and 1"
    assert f"lr_milestones = 0.5, 0.2 in [run]   {need}" in problems("[run]\nlr_milestones = [0.5, 0.2]\n")
    assert f"lr_milestones = 0.5, 0.2   {need}" in problems("", "lr_milestones=0.5,0.2")
