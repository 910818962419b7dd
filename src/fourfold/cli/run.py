"""Run: what the words of a command and the file among them say, before a task is made or torch is imported.

word   a task, a plan or settings file (….toml or recipe:NAME), or KEY=VALUE, which takes precedence over the file
Law: words and file become a run here and nowhere else; what is wrong is reported at once, with its place.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fourfold.axes.tensor.rules.styles import read_rules
from fourfold.cli import task_loader
from fourfold.cli.arguments import (
    CALLBACK_WORD,
    PROGRAM_WORD,
    RULES_WORD,
    Arguments,
    ParsedValues,
    has_several_values,
    parse_values,
)
from fourfold.cli.callback_loader import check_callback_files, check_shipped_callbacks, options_of_file
from fourfold.cli.errors import ErrorCollector, is_file, nearest_file
from fourfold.cli.settings_file import SettingsFile, read_settings_file
from fourfold.cli.strategy import expand_strategy
from fourfold.feed.text_path import resolve_text_path
from fourfold.launcher.process_defaults import default_num_processes
from fourfold.plan.decode import DecodeError, read_bounded
from fourfold.plan.plan import Plan
from fourfold.plan.plan_fields import FIELDS
from fourfold.plan.recipes import ASK_PREFIX, RECIPE_PREFIX, SHIPPED_PLANS
from fourfold.trainer.run_identity import HF_PREFIX, normal_task_name
from fourfold.trainer.settings import TASK_FIELDS
from fourfold.words.errors import FourfoldError, PlanError, Problem, SettingError, os_error_text
from fourfold.words.field import KEY_VALUE
from fourfold.words.run_files import WEIGHTS_NEED

DEFAULT_TASK = "lm"
SETTINGS_WITHOUT_RUN = (*TASK_FIELDS, RULES_WORD, "seed")  # of a settings file, for commands that write no run
RULES_NEED = "a TOML file of tensor rules"


@dataclass(frozen=True)
class Run:
    """The words of a command line, sorted, and the file among them: a plan, or a settings file.

    texts  of KEY=VALUE
    """

    named_task: str | None = None
    plan_file: str | None = None
    settings_file: SettingsFile | None = None
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The task's name, as in the current folder."""
        in_file = None if self.settings_file is None else self.settings_file.task
        return self.named_task or in_file or DEFAULT_TASK

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
    def recipe_lines(self) -> list[str]:
        """What to say of the settings of the run that a recipe brings with it: those that no word replaces."""
        file = self.settings_file
        if file is None or not file.path.startswith(RECIPE_PREFIX):
            return []
        return [f"{file.path}: {key} = {value}" for key, value in file.run.items() if key not in self.texts]

    def values(
        self, types: Arguments, *, has_run_dir: bool = True, errors: ErrorCollector | None = None
    ) -> ParsedValues:
        """The values of file and words. `types`: the arguments of the task; None: not known, unknown keys pass.

        has_run_dir  False: without what only a run needs of a settings file
        errors       collects what is wrong; without it, it is raised
        """
        collector = ErrorCollector() if errors is None else errors
        in_file, options, file = ParsedValues(), {}, self.settings_file
        in_words = collector.attempt(parse_values, self.texts, types)
        if in_words is None:  # the fields of the plan can be checked all the same
            in_words = ParsedValues(plan=self.plan_in_words)
        if file is not None:
            in_file = collector.attempt(file.parse, types) or in_file
            if has_run_dir:
                options = collector.attempt(options_of_file, in_file, in_words, path=file.path) or {}
        if errors is None:
            collector.raise_collected()
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
        return parse_values({key: text for key, text in self.texts.items() if key in FIELDS}, None).plan

    def plan(self, num_processes: int | None) -> Plan:
        """The plan of the file with the fields of the words; without dp, that is what the other axes leave.

        Raises PlanError with all problems, or where the mesh does not have `num_processes` ranks.
        """
        from fourfold.plan.check import size_problems

        errors, where = ErrorCollector(), self.plan_file or "the command line"
        values, in_words = {}, self.plan_in_words
        errors.attempt(Plan.from_dict, in_words, where="the command line")
        if self.settings_file is not None:
            where = self.settings_file.path
            with contextlib.suppress(SettingError):  # which `values` raises
                values = self.settings_file.parse(None).plan
        elif self.plan_file is not None:
            with errors.collect():
                values = vars(Plan.from_toml(read_plan_text(self.plan_file), where=self.plan_file))
        errors.raise_collected()
        plan = Plan.from_dict({**values, **in_words}, where=where)
        if not self.has_dp:
            count = default_num_processes() if num_processes is None else num_processes
            plan = replace(plan, dp=max(1, count // (plan.mesh.size // plan.dp)))
        if num_processes is not None and plan.mesh.size != num_processes:
            raise PlanError(size_problems(plan, num_processes, start="or -n {size}"), where=where)
        return plan

    def planned_size(self, num_processes: int | None) -> int | None:
        """The number of ranks; None where a word is wrong, as far as that is seen without the task."""
        try:
            values = self.values(None)
            check_shipped_callbacks(values.run.get(CALLBACK_WORD), values.callback_options)
            return self.plan(num_processes).mesh.size
        except (FourfoldError, ExceptionGroup):
            return None

    def check_files(self) -> None:
        """Raise what is wrong with the files that are named, and the plan: a group if it is several errors.

        Of settings that the function of a task in a file may take itself, nothing is said yet.
        """
        errors, texts = ErrorCollector(), dict(self.texts)
        errors.attempt(task_loader.check_task_file, self.task)
        with errors.collect():
            if self.texts.keys() <= {*FIELDS} or PROGRAM_WORD in self.texts:
                Plan.from_dict(self.plan_in_words, where="the command line")  # else all problems come at once, later
        with errors.collect():
            if self.plan_file is not None:
                Plan.from_toml(read_plan_text(self.plan_file), where=self.plan_file)
        texts = {**({} if self.settings_file is None else self.settings_file.run), **texts}
        check_callback_files(texts.get(CALLBACK_WORD), errors)
        if task_loader.is_in_file(self.task):
            texts = {key: text for key, text in texts.items() if key not in self.texts}
        if isinstance(init := texts.get("init"), str) and init.lower() != "none":
            errors.attempt(check_init_path, init)
        if isinstance(rules := texts.get(RULES_WORD), str):
            errors.attempt(check_rules_path, rules)
        if "data" in self.texts and (self.task == DEFAULT_TASK or self.task.startswith(HF_PREFIX)):
            errors.attempt(resolve_text_path, self.texts["data"])
        errors.raise_collected()


def resolve(words: Iterable[str]) -> Run:
    """Sort the words, and read the file among them. Raises SettingError."""
    tasks, files, texts, problems = list[str](), list[str](), dict[str, str](), list[Problem]()
    for word in words:
        match = KEY_VALUE.fullmatch(word)
        if not match:
            (files if word.endswith(".toml") or word.startswith(RECIPE_PREFIX) else tasks).append(word)
            continue
        key, text = match["key"], match["value"]
        if key == CALLBACK_WORD and key in texts:
            texts[key] += f",{text}"
            continue
        if key in texts:
            problems.append(Problem(f"{key} = {texts[key]} and {word}", "each key once"))
        texts[key] = text
    if len(tasks) > 1:
        problems.append(Problem(" and ".join(tasks), "one task", "settings as key=value"))
    if len(files) > 1:
        problems.append(Problem(" and ".join(files), "one plan"))
    texts, wrong_strategy = expand_strategy(texts)
    problems += wrong_strategy
    if problems:
        raise SettingError(problems, where="the command line")
    named = normal_task_name(tasks[0]) if tasks else None
    path = files[0] if files else None
    file = None if path is None else read_settings_file(path)
    if file is not None and None not in (named, file.task) and named != file.task:
        got = f"the task {named}, and {file.task} in {file.path}"
        raise SettingError(Problem(got, "one task", f"no name in [task] of {file.path}"), where="the command line")
    return Run(named, path if file is None else None, file, texts)


def check_named_files(words: Sequence[str]) -> None:
    """Raise the errors of all files that are not there.

    Of a key with several values nothing is said: a sweep, or the planner, reads each of them.
    """
    pairs = {word: match for word in words if (match := KEY_VALUE.fullmatch(word))}
    lists = [word for word, match in pairs.items() if has_several_values(match["key"], match["value"], {})]
    resolve(word for word in words if word not in lists).check_files()


def is_ask(word: str) -> bool:
    """Whether a word is the name of an ask, and not of a settings file."""
    is_toml = word.endswith(".toml") or word.startswith(RECIPE_PREFIX)
    return word.startswith(ASK_PREFIX) or (is_toml and read_settings_file(word) is None)


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
        check_rules_path(given)
        given = read_rules(_read_text(given, f"{RULES_WORD} = {given}", RULES_NEED), where=given)
    return {RULES_WORD: given}


def check_rules_path(name: str) -> None:
    """Raise PlanError for a file that is not there."""
    path, setting = Path(name), f"{RULES_WORD} = {name or '(nothing)'}"
    if not is_file(path):
        problem = Problem(f"{setting} (no such file)", RULES_NEED, nearest_file(path, "*.toml"))
        raise PlanError(problem if name else Problem(setting, RULES_NEED, f"{RULES_WORD}=rules.toml"))


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
