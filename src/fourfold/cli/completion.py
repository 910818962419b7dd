"""Completion: what a shell may offer for the word that is being typed.

words       the words after `fourfold`; the last one is being typed, and may be empty
candidates  whole words, as they would stand on the command line; the shell adds names of files
Law: neither torch nor the user's code is imported, and nothing is printed but candidates: a Tab takes a moment.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fourfold.words.errors import Problem, SettingError, closest_match
from fourfold.words.run_files import RUNS_DIR

# What is before a `=` or `:` is a word of its own for bash, so it must not be repeated in what bash inserts.
BASH = """_fourfold() {
    local line="${COMP_LINE:0:COMP_POINT}" word=() current
    read -ra word <<<"$line"
    [[ "$line" == *[[:space:]] ]] && word+=("")
    current="${word[-1]}"
    local prefix="${current%"${current##*[=:]}"}" candidate
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$prefix"}")
    done < <("${word[0]}" completion words -- "${word[@]:1}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *[=:] ]] && compopt -o nospace
}
complete -o bashdefault -o default -F _fourfold fourfold
"""
ZSH = """#compdef fourfold
_fourfold() {
    local -a candidates open closed
    candidates=(${(f)"$("${words[1]}" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    open=(${(M)candidates:#*[=:]})
    closed=(${candidates:#*[=:]})
    compadd -S '' -a open
    compadd -a closed
    _files
}
compdef _fourfold fourfold
"""
FISH = """function __fourfold_words
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion words -- $words[2..-1] 2>/dev/null
end
complete -c fourfold -a '(__fourfold_words)'
"""
FORMAT_OPTION = "--format"
EXPORT_OPTIONS = (FORMAT_OPTION, "--step", "--ema")
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def print_completion(words: Sequence[str], commands: Sequence[str]) -> int:
    """Print a shell's script, or the candidates for a command line; returns the exit code. Raises SettingError."""
    shell, *typed = words or [""]
    if shell == "words":
        print("\n".join(candidates(typed or [""], commands)))
        return 0
    if shell not in SCRIPTS or typed:
        close = closest_match(shell, SCRIPTS)
        problem = Problem(
            " ".join(words) or "no shell", f"one of {', '.join(SCRIPTS)}", f"fourfold completion {close or 'bash'}"
        )
        raise SettingError(problem, where="fourfold completion")
    print(SCRIPTS[shell], end="")
    return 0


def candidates(words: Sequence[str], commands: Sequence[str]) -> list[str]:
    """The words that may stand in place of the last of `words`."""
    *before, typed = words
    if not before:
        found: Iterable[str] = commands
    elif before[0] not in ARGUMENTS:
        return []
    else:
        found = ARGUMENTS[before[0]](before[1:], typed)
    return sorted({word for word in found if word.startswith(typed)})


def _training_words(before: Sequence[str], typed: str) -> Iterable[str]:
    """A task, a recipe, or a setting with its values."""
    from fourfold.cli.arguments import CALLBACK_WORD, SETTINGS
    from fourfold.cli.settings_file import DEFAULT_TASK
    from fourfold.cli.task_loader import BUILT_IN
    from fourfold.cli.task_source import argument_names
    from fourfold.plan.plan_fields import PLAN_FIELDS
    from fourfold.plan.recipes import RECIPE_PREFIX, recipe_names
    from fourfold.trainer.run_identity import HF_PREFIX
    from fourfold.words.field import KEY_VALUE

    if typed.startswith(RECIPE_PREFIX):
        return [f"{RECIPE_PREFIX}{name}" for name in recipe_names()]
    key, equals, value = typed.partition("=")
    if key == CALLBACK_WORD and equals:
        return [f"{key}={names}" for names in _callback_values(before, value)]
    if equals:
        rule = PLAN_FIELDS.get(key) or SETTINGS.get(key)
        return [] if rule is None else [f"{key}={value}" for value in rule.offered]
    free = [word for word in before if not KEY_VALUE.fullmatch(word) and not word.startswith("-")]
    tasks = [word for word in free if not word.endswith(".toml") and not word.startswith(RECIPE_PREFIX)]
    given = {word.partition("=")[0] for word in before} - {CALLBACK_WORD}  # it may be repeated
    keys = {*PLAN_FIELDS, *SETTINGS, *(argument_names(tasks[0] if tasks else DEFAULT_TASK) or [])}
    keys = (keys | _callback_options(before)) - given
    has_plan = len(free) > len(tasks)
    return [
        *(f"{name}=" for name in keys),
        *([] if tasks else (*BUILT_IN, HF_PREFIX)),
        *([] if has_plan else [RECIPE_PREFIX]),
    ]


def _train_words(before: Sequence[str], typed: str) -> Iterable[str]:
    from fourfold.cli.plan.word import PLAN_AUTO

    return [*_training_words(before, typed), *([] if PLAN_AUTO in before else [PLAN_AUTO])]


def _plan_words(before: Sequence[str], typed: str) -> Iterable[str]:
    """A task, a run, an ask, an own word with its values, or what a training may have."""
    from fourfold.cli.arguments import SETTINGS
    from fourfold.cli.plan.arguments import CALIBRATE, GPT, OWN_WORDS
    from fourfold.cli.plan.gpt import FIELDS
    from fourfold.plan.ask import ASK_PREFIX, ask_names
    from fourfold.planner.predict.clusters import cluster_names
    from fourfold.trainer.settings import TASK_FIELDS

    if typed.startswith(ASK_PREFIX):
        return [f"{ASK_PREFIX}{name}" for name in ask_names()]
    key, equals, _ = typed.partition("=")
    if equals and key in OWN_WORDS:
        values = {"cluster": cluster_names(), "out": ("none",)}
        return [f"{key}={value}" for value in values.get(key, OWN_WORDS[key].offered)]
    if before[:1] == [CALIBRATE]:
        return ()
    others = {f"{name}=" for name in SETTINGS if name not in TASK_FIELDS}
    found = set(_training_words(before, typed)) - others
    if before[:1] == [GPT]:
        found |= {f"{name}=" for name in FIELDS}
    given = {f"{word.partition('=')[0]}=" for word in before}
    own = {f"{name}=" for name in OWN_WORDS} - given
    first = (CALIBRATE, GPT, ASK_PREFIX, *_runs(before, typed)) if not before else (ASK_PREFIX,)
    return [*found, *own, *first]


def _callback_values(before: Sequence[str], value: str) -> Iterable[str]:
    """What may stand after `callback=`: what is there up to the last comma, and one more shipped callback."""
    from fourfold.trainer.callbacks.registry import SHIPPED

    head, comma, _ = value.rpartition(",")
    return [f"{head}{comma}{name}" for name in SHIPPED if name not in (*_callback_names(before), *head.split(","))]


def _callback_options(before: Sequence[str]) -> set[str]:
    """NAME.OPTION of the shipped callbacks that are named."""
    from fourfold.trainer.callbacks.registry import SHIPPED, callback_options

    names = [name for name in _callback_names(before) if name in SHIPPED]
    return {f"{name}.{option}" for name in names for option in callback_options(name)}


def _callback_names(before: Sequence[str]) -> list[str]:
    from fourfold.cli.arguments import CALLBACK_WORD

    pairs = [word.partition("=") for word in before]
    return [name for key, _, value in pairs if key == CALLBACK_WORD for name in value.split(",")]


def _runs(before: Sequence[str], typed: str) -> Iterable[str]:
    try:
        return [path.name for path in Path(RUNS_DIR).iterdir() if path.is_dir()]
    except OSError:
        return []


def _checkpoint_words(before: Sequence[str], typed: str) -> Iterable[str]:
    from fourfold.cli.checkpoint import ENDINGS

    if not before:
        return ("list", "verify", "export")
    if before[0] == "export":
        if before[-1] == FORMAT_OPTION:
            return ENDINGS
        if typed.startswith("-"):
            return (*EXPORT_OPTIONS, *(f"{FORMAT_OPTION}={name}" for name in ENDINGS if "=" in typed))
    return _runs(before, typed)


def _shells(before: Sequence[str], typed: str) -> Iterable[str]:
    return SCRIPTS


ARGUMENTS: dict[str, Callable[[Sequence[str], str], Iterable[str]]] = {
    "train": _train_words,
    "show": _training_words,
    "plan": _plan_words,
    "verify": _training_words,
    "checkpoint": _checkpoint_words,
    "report": _runs,
    "completion": _shells,
}
