"""Plan of a GPT: `fourfold plan gpt layers=… width=… heads=…`, priced by formula, without a model.

Law: the words are those of Megatron's tables; what is left out is what these tables have in common.
"""

import dataclasses
from collections.abc import Sequence

from fourfold.cli.plan.arguments import BATCH, BATCH_SIZE, GPT, WHERE
from fourfold.planner.predict.facts import FactsSource
from fourfold.words.errors import PlanError, Problem, SettingError
from fourfold.words.field import Field, read_words

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

    others, given, problems = read_words(words, FIELDS)
    values = {name: each.default for name, each in FIELDS.items()} | given
    problems += [Problem(word, "KEY=VALUE after gpt", EXAMPLE) for word in others if word != GPT]
    if missing := [name for name, value in values.items() if value is dataclasses.MISSING]:
        problems.append(Problem(f"a gpt without {' and '.join(missing)}", "its size", EXAMPLE))
    if problems:
        raise SettingError(problems, where=WHERE)
    try:
        source = GptFacts(**values)
    except PlanError as error:
        raise SettingError(error.problems, where=WHERE) from None
    return f"gpt of {values['layers']} layers, width {values['width']:,}", source
