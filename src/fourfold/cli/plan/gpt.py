"""Plan of a GPT: `fourfold plan gpt layers=… width=… heads=…`, priced by formula, without a model.

Law: the words are those of Megatron's tables; what is left out is what these tables have in common.
"""

from collections.abc import Sequence
from typing import Any

from fourfold.cli.arguments import KEY_VALUE
from fourfold.cli.plan.arguments import BATCH, GPT, MAX_BATCH, WHERE, read_size, size_need
from fourfold.planner.predict.facts import FactsSource
from fourfold.words.errors import PlanError, Problem, SettingError, closest_match

NEEDED = ("layers", "width", "heads")
OPTIONAL = {"vocabulary": 51200, "length": 2048, BATCH: 512}
LARGEST = {"layers": 2**10, "width": 2**20, "heads": 2**20, "vocabulary": 2**24, "length": 2**24, BATCH: MAX_BATCH}
"""Beyond any model, and still answered in a time that one waits."""
EXAMPLE = "layers=24 width=2304 heads=24"


def gpt_source(words: Sequence[str]) -> tuple[str, FactsSource]:
    """The facts of the GPT that the words describe, and what to call it. Raises FourfoldError."""
    from fourfold.planner.predict.gpt_facts import GptFacts

    values: dict[str, Any] = dict(OPTIONAL)
    source, problems = None, []
    for word in words:
        match = KEY_VALUE.fullmatch(word)
        if match is None:
            problems += [] if word == GPT else [Problem(word, "KEY=VALUE after gpt", EXAMPLE)]
        elif match["key"] not in (*NEEDED, *OPTIONAL):
            close = closest_match(match["key"], (*NEEDED, *OPTIONAL))
            need = f"one of {', '.join((*NEEDED, *OPTIONAL))}, or a field of the plan"
            problems.append(Problem(word, need, f"{close}={match['value']}" if close else ""))
        elif (value := read_size(match["value"], LARGEST[match["key"]])) is None:
            problems.append(Problem(word, size_need(LARGEST[match["key"]])))
        else:
            values[match["key"]] = value
    named = {word.partition("=")[0] for word in words}
    if missing := [name for name in NEEDED if name not in named]:
        problems.append(Problem(f"a gpt without {' and '.join(missing)}", "its size", EXAMPLE))
    try:
        source = None if problems else GptFacts(**values)
    except PlanError as error:
        problems += error.problems
    if source is None:
        raise SettingError(problems, where=WHERE)
    return f"gpt of {values['layers']} layers, width {values['width']:,}", source
