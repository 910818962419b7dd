"""Run: what the words of a command and the file among them say, before a task is made or torch is imported.

word   a task, a plan or settings file (….toml or recipe:NAME), or KEY=VALUE, which takes precedence over the file
ask    a file or ask:NAME that leaves fields of the plan open, for the planner
Law: words and file become a run here, once, and ranks get the run; what is wrong is reported at once, with its place.
"""

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fourfold.axes.tensor.rules.styles import read_rules
from fourfold.cli import task_loader
from fourfold.cli.arguments import (
    CALLBACK_WORD,
    PLAN_WORD,
    RULES_WORD,
    Arguments,
    ParsedValues,
    has_several_values,
    parse_values,
    several_values,
)
from fourfold.cli.callback_loader import load_callbacks, options_of_file
from fourfold.cli.errors import ErrorCollector, is_file, nearest_file
from fourfold.cli.settings_file import SettingsFile, read_settings_file
from fourfold.cli.strategy import expand_strategy
from fourfold.feed.text_path import resolve_text_path
from fourfold.launcher.process_defaults import default_num_processes
from fourfold.plan.ask import AUTO, is_left_open
from fourfold.plan.decode import DecodeError, read_bounded
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS
from fourfold.plan.recipes import ASK_PREFIX, RECIPE_PREFIX, SHIPPED_PLANS
from fourfold.trainer.run_identity import HF_PREFIX, normal_task_name
from fourfold.trainer.settings import TASK_FIELDS
from fourfold.words.errors import PlanError, Problem, SettingError, os_error_text
from fourfold.words.field import KEY_VALUE
from fourfold.words.run_files import WEIGHTS_NEED

DEFAULT_TASK = "lm"
SETTINGS_WITHOUT_RUN = (*TASK_FIELDS, RULES_WORD, "seed")  # of a settings file, for commands that write no run
RULES_NEED = "a TOML file of tensor rules"
PLAN_AUTO = f"{PLAN_WORD}={AUTO}"
COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Run:
    """The words of a command line, sorted, and the file among them: a plan, or a settings file.

    texts    of KEY=VALUE
    ask      its file or ask:NAME, if one is named
    decided  the plan, once it is known: it takes the place of what file and words say of a plan
    """

    named_task: str | None = None
    plan_file: str | None = None
    settings_file: SettingsFile | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    ask: str | None = None
    decided: Plan | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Run":
        """The run of `to_json`."""
        file, plan = record["settings_file"], record["decided"]
        settings_file = None if file is None else SettingsFile(**file)
        return cls(**{**record, "settings_file": settings_file, "decided": None if plan is None else Plan(**plan)})

    def to_json(self) -> dict[str, Any]:
        """The run as values that JSON can hold; one that has been checked, so that its file has no problems."""
        return dataclasses.asdict(self)

    @property
    def task(self) -> str:
        """The task's name, as in the current folder."""
        in_file = None if self.settings_file is None else self.settings_file.task
        return self.named_task or in_file or DEFAULT_TASK

    @property
    def file(self) -> str | None:
        """The plan or settings file among the words."""
        return self.plan_file if self.settings_file is None else self.settings_file.path

    @property
    def words(self) -> list[str]:
        """The words again: task, files, KEY=VALUE."""
        names = [name for name in (self.named_task, self.file, self.ask) if name is not None]
        return [*names, *(f"{key}={text}" for key, text in self.texts.items())]

    def with_texts(self, **texts: str) -> "Run":
        """The same run with these words too."""
        return replace(self, texts={**self.texts, **texts})

    def without(self, keys: Collection[str]) -> "Run":
        """The same run without the words of these keys."""
        return replace(self, texts={key: text for key, text in self.texts.items() if key not in keys})

    @property
    def without_plan(self) -> "Run":
        """The task alone, without the words and files of a plan or an ask; a settings file stays."""
        return replace(self.without((*FIELDS, PLAN_WORD)), plan_file=None, ask=None)

    @property
    def _plan_in_file(self) -> Mapping[str, object]:
        return {} if self.settings_file is None else self.settings_file.plan

    @property
    def has_plan(self) -> bool:
        """Whether a field of the plan is given, by a file or a word."""
        return self.plan_file is not None or bool({*self._plan_in_file, *self.texts} & {*FIELDS})

    @property
    def has_model(self) -> bool:
        """Whether the task, or how many layers the default one has, is given."""
        return self.named_task is not None or self.settings_file is not None or "layers" in self.texts

    @property
    def has_dp(self) -> bool:
        """Whether the number of data ranks is given. A plan file gives every field."""
        return self.plan_file is not None or "dp" in {**self._plan_in_file, **self.texts}

    @property
    def num_ranks(self) -> int:
        """Of a run whose plan is known."""
        return self.plan().mesh.size

    @property
    def asks_plan(self) -> bool:
        """Whether the words ask for a plan. Raises SettingError for another value than auto."""
        text = self.texts.get(PLAN_WORD)
        if text not in (None, AUTO):
            need = f"{AUTO}; a plan's file is a word of its own"
            attempt = text if text.endswith(".toml") else PLAN_AUTO
            raise SettingError(Problem(f"{PLAN_WORD} = {text or '(nothing)'}", need, attempt), where=COMMAND_LINE)
        return text is not None

    @property
    def opened(self) -> list[str]:
        """The fields of the plan that words leave to the planner."""
        return [key for key, text in self.texts.items() if key in FIELDS and is_left_open(key, text)]

    @property
    def asked(self) -> "Run":
        """A run that asks for a plan, without what only the planner reads."""
        return replace(self.without((PLAN_WORD, *self.opened)), plan_file=None, ask=None)

    def swept_values(self) -> dict[str, list[str]]:
        """The values of each key that has several; empty if this is a single run. Raises FourfoldError."""
        if not any("," in text for text in self.texts.values()):
            return {}
        types = task_loader.task_arguments(task_loader.find_task(self.task))
        return several_values(self.texts, types, where=COMMAND_LINE)

    @property
    def recipe_lines(self) -> list[str]:
        """What to say of the settings of the run that a recipe brings with it: those that no word replaces."""
        file = self.settings_file
        if file is None or not file.path.startswith(RECIPE_PREFIX):
            return []
        return [f"{file.path}: {key} = {value}" for key, value in file.run.items() if key not in self.texts]

    def values(self, types: Arguments, *, has_run_dir: bool = True, errors: ErrorCollector) -> ParsedValues:
        """The values of file and words. `types`: the arguments of the task; None: not known, only the plan's count.

        has_run_dir  False: without what only a run needs of a settings file
        errors       collects what is wrong
        """
        in_file, options, file = ParsedValues(), {}, self.settings_file
        in_words = errors.attempt(parse_values, self.texts, types)
        if in_words is None:  # the fields of the plan can be checked all the same
            in_words = ParsedValues(plan=self.plan_in_words)
        if file is not None:
            in_file = errors.attempt(file.parse, types) or in_file
            if has_run_dir:
                options = errors.attempt(options_of_file, in_file, in_words, path=file.path) or {}
        run = {key: value for key, value in in_file.run.items() if has_run_dir or key in SETTINGS_WITHOUT_RUN}
        return ParsedValues(
            in_file.plan | in_words.plan,
            run | in_words.run,
            in_file.task | in_words.task,
            options | in_words.callback_options,
        )

    @property
    def plan_in_words(self) -> dict[str, object]:
        """The fields of the plan that words give. Raises SettingError."""
        return parse_values(self.texts, None).plan

    def pinned_fields(self) -> dict[str, object]:
        """The fields of the plan that words and settings file give, and do not leave open. Raises FourfoldError."""
        in_file = {} if self.settings_file is None else self.settings_file.parse(None).plan
        return {**in_file, **self.without(self.opened).plan_in_words}

    def plan(self, num_processes: int | None = None) -> Plan:
        """The plan of the file with the fields of the words; without dp, that is what the other axes leave.

        Raises PlanError with all problems, or where the mesh does not have `num_processes` ranks.
        """
        from fourfold.plan.check import size_problems

        plan, where = self.decided or self._plan_of_words(num_processes), self.file or COMMAND_LINE
        if num_processes is not None and plan.mesh.size != num_processes:
            raise PlanError(size_problems(plan, num_processes, start="or -n {size}"), where=where)
        return plan

    def _plan_of_words(self, num_processes: int | None) -> Plan:
        errors = ErrorCollector()
        values, in_words = {}, self.plan_in_words
        errors.attempt(Plan.from_dict, in_words, where=COMMAND_LINE)
        if self.settings_file is not None:
            with contextlib.suppress(SettingError):  # which `values` raises
                values = self.settings_file.parse(None).plan
        elif self.plan_file is not None:
            with errors.collect():
                values = vars(Plan.from_toml(read_plan_text(self.plan_file), where=self.plan_file))
        errors.raise_collected()
        plan = Plan.from_dict({**values, **in_words}, where=self.file or COMMAND_LINE)
        if self.has_dp:
            return plan
        count = default_num_processes() if num_processes is None else num_processes
        return replace(plan, dp=max(1, count // (plan.mesh.size // plan.dp)))

    def check(self, num_processes: int | None = None, *, has_run_dir: bool = True, takes_lists: bool = False) -> None:
        """Raise all that can be seen to be wrong before the task is imported: a group if it is several errors.

        What the function of a task takes is read from its source. Where only an import can tell, nothing is said yet of
        words that it may take.

        takes_lists  a key may have several values: a sweep, or the planner, checks each of them
        """
        errors, asks_plan = ErrorCollector(), self.asks_plan
        types = errors.attempt(task_loader.arguments_in_source, self.task)
        lists = [key for key, text in self.texts.items() if takes_lists and has_several_values(key, text, types or {})]
        single = (self.asked if asks_plan else self).without(lists)
        values = single.values(types, has_run_dir=has_run_dir, errors=errors)
        spec = single.texts.get(CALLBACK_WORD) if types is None else values.run.get(CALLBACK_WORD)
        errors.attempt(load_callbacks, spec, values.callback_options, runs_files=False)
        if isinstance(init := values.run.get("init"), str):
            errors.attempt(check_init_path, init)
        errors.attempt(read_rules_setting, values.run.get(RULES_WORD))
        if "data" in self.texts and (self.task == DEFAULT_TASK or self.task.startswith(HF_PREFIX)):
            errors.attempt(resolve_text_path, self.texts["data"])
        if not (lists or asks_plan):
            errors.attempt(self.plan, num_processes)
        errors.raise_collected()


def resolve(words: Iterable[str], *, takes_ask: bool = False) -> Run:
    """Sort the words, and read the file among them. Raises SettingError.

    takes_ask  ask:NAME is an ask, as in `fourfold plan`; with plan=auto it is one anyway
    """
    words = list(words)
    takes_ask = takes_ask or PLAN_AUTO in words
    names, texts, problems = list[str](), dict[str, str](), list[Problem]()
    for word in words:
        match = KEY_VALUE.fullmatch(word)
        if not match:
            names.append(word)
            continue
        key, text = match["key"], match["value"]
        if key == CALLBACK_WORD and key in texts:
            texts[key] += f",{text}"
            continue
        if key in texts:
            problems.append(Problem(f"{key} = {texts[key]} and {word}", "each key once"))
        texts[key] = text
    files = [name for name in names if name.endswith(".toml") or name.startswith(RECIPE_PREFIX)]
    asks = [name for name in names if takes_ask and name.startswith(ASK_PREFIX)]
    tasks = [name for name in names if name not in (*files, *asks)]
    for each, need, attempt in (
        (tasks, "one task", "settings as key=value"),
        (files, "one plan", ""),
        (asks, "one ask", ""),
    ):
        if len(each) > 1:
            problems.append(Problem(" and ".join(each), need, attempt))
    texts, wrong_strategy = expand_strategy(texts)
    problems += wrong_strategy
    if problems:
        raise SettingError(problems, where=COMMAND_LINE)
    named = normal_task_name(tasks[0]) if tasks else None
    path, ask = (next(iter(each), None) for each in (files, asks))
    file = None if path is None else read_settings_file(path)
    if file is not None and None not in (named, file.task) and named != file.task:
        got = f"the task {named}, and {file.task} in {file.path}"
        raise SettingError(Problem(got, "one task", f"no name in [task] of {file.path}"), where=COMMAND_LINE)
    return Run(named, path if file is None else None, file, texts, ask)


# ---- files -----------------------------------------------------------------------------------------------------------


def read_plan_text(file: str) -> str:
    """The text of a plan's file, or of recipe:NAME. Raises PlanError."""
    if file.startswith(RECIPE_PREFIX):
        return SHIPPED_PLANS.text(file.removeprefix(RECIPE_PREFIX))
    return _read_text(file, file, "a plan in TOML")


def read_rules_setting(given: str | Mapping[str, str] | None) -> dict[str, Mapping[str, str]]:
    """The setting `tensor` with the rules themselves: those of the file that it names. Empty if it is not given.

    Raises PlanError with all problems of the file.
    """
    if given is None:
        return {}
    if isinstance(given, str):
        path, setting = Path(given), f"{RULES_WORD} = {given or '(nothing)'}"
        if not is_file(path):
            problem = Problem(f"{setting} (no such file)", RULES_NEED, nearest_file(path, "*.toml"))
            raise PlanError(problem if given else Problem(setting, RULES_NEED, f"{RULES_WORD}=rules.toml"))
        given = read_rules(_read_text(given, setting, RULES_NEED), where=given)
    return {RULES_WORD: given}


def check_init_path(init: str) -> None:
    """Raise SettingError where there is neither file nor folder."""
    path = Path(init)
    if not (is_file(path) or os.path.isdir(path)):
        got = f"init = {init} ({'no regular file' if os.path.exists(path) else 'no such file'})"
        raise SettingError(Problem(got, WEIGHTS_NEED, nearest_file(path, "*.safetensors")))


def _read_text(file: str, got: str, need: str) -> str:
    """The text of a small file. `got`: how it was given."""
    try:
        return read_bounded(Path(file)).decode()
    except DecodeError as error:
        raise PlanError(Problem(f"{got} has {error}", need), where=file) from None
    except OSError as error:
        close = nearest_file(Path(file), "*.toml")
        raise PlanError(Problem(f"{got} ({os_error_text(error)})", "a file", close)) from None
    except UnicodeDecodeError:
        raise PlanError(Problem(f"{got} is not a text file", "TOML in UTF-8"), where=file) from None
