"""Plan of a GPT: `fourfold plan gpt layers=… width=… heads=…`, priced by formula, without a model.

Law: the words are those of Megatron's tables; what is left out is what these tables have in common.
"""

import dataclasses
from collections.abc import Sequence

from fourfold.cli.arguments import KEY_VALUE
from fourfold.cli.plan.arguments import BATCH, BATCH_SIZE, GPT, WHERE
from fourfold.planner.predict.facts import FactsSource
from fourfold.words.errors import PlanError, Problem, SettingError, closest_match
from fourfold.words.field import Field

FIELDS = {
    "layers": Field(type=int, minimum=1, maximum=2**10),
    "width": Field(type=int, minimum=1, maximum=2**20),
    "heads": Field(type=int, minimum=1, maximum=2**20),
    "vocabulary": Field(type=int, minimum=1, maximum=2**24, default=51200),
    "length": Field(type=int, minimum=1, maximum=2**24, default=2048),
    BATCH: dataclasses.replace(BATCH_SIZE, default=512),
}
"""The maxima are beyond any model, and still answered in a time that one waits."""
EXAMPLE = "layers=24 width=2304 heads=24"


def gpt_source(words: Sequence[str]) -> tuple[str, FactsSource]:
    """The facts of the GPT that the words describe, and what to call it. Raises FourfoldError."""
    from fourfold.planner.predict.gpt_facts import GptFacts

    values = {name: each.default for name, each in FIELDS.items()}
    source, problems = None, []
    for word in words:
        match = KEY_VALUE.fullmatch(word)
        if match is None:
            problems += [] if word == GPT else [Problem(word, "KEY=VALUE after gpt", EXAMPLE)]
        elif match["key"] not in FIELDS:
            close = closest_match(match["key"], FIELDS)
            need = f"one of {', '.join(FIELDS)}, or a field of the plan"
            problems.append(Problem(word, need, f"{close}={match['value']}" if close else ""))
        else:
            try:
                values[match["key"]] = FIELDS[match["key"]].read(*match.groups())
            except SettingError as error:
                problems += error.problems
    named = {word.partition("=")[0] for word in words}
    needed = [name for name, each in FIELDS.items() if each.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in named]:
        problems.append(Problem(f"a gpt without {' and '.join(missing)}", "its size", EXAMPLE))
    try:
        source = None if problems else GptFacts(**values)
    except PlanError as error:
        problems += error.problems
    if source is None:
        raise SettingError(problems, where=WHERE)
    return f"gpt of {values['layers']} layers, width {values['width']:,}", source
