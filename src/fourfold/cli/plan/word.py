"""`plan=auto` among the words of a training; nothing here imports more than the words need."""

from collections.abc import Sequence

from fourfold.cli.arguments import PLAN_WORD
from fourfold.words.errors import Problem, SettingError

AUTO = "auto"
PLAN_AUTO = f"{PLAN_WORD}={AUTO}"


def wants_plan(words: Sequence[str]) -> bool:
    """Whether the words ask for a plan. Raises SettingError for another value than auto."""
    texts = [word.partition("=")[2] for word in words if word.startswith(f"{PLAN_WORD}=")]
    for text in texts:
        if text != AUTO:
            need = f"{AUTO}; a plan's file is a word of its own"
            attempt = text if text.endswith(".toml") else PLAN_AUTO
            raise SettingError(Problem(f"{PLAN_WORD} = {text or '(nothing)'}", need, attempt), where="the command line")
    return bool(texts)


def training_words(words: Sequence[str]) -> list[str]:
    """The words of a training without those that only the planner reads."""
    if not wants_plan(words):
        return list(words)
    from fourfold.cli.run import is_ask

    return [word for word in words if word.partition("=")[2] != AUTO and not is_ask(word)]
