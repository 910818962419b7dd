"""Strategy: `strategy=hybrid partitions=2 replicas=2` says how a model is divided and copied, and no more.

partition  a stage of the model, on a rank of its own; replica: a copy of all of them, with its own samples
Law: these words become fields of the plan, and everything else sees only those.
Source: HyPar-Flow (Awan et al., 1911.05146), whose users say no more than this.
"""

from collections.abc import Mapping

from fourfold.words.errors import Problem, closest_match

FIELD_OF = {"partitions": "pp", "replicas": "dp"}
WORDS_OF = {"data": ("replicas",), "model": ("partitions",), "hybrid": ("partitions", "replicas")}
STRATEGY_WORDS = ("strategy", *FIELD_OF)
# With four microbatches for each stage, a quarter of the time is lost to the bubble at most (GPipe, 1811.06965, §3.3).
MICROBATCHES_PER_PARTITION = 4


def expand_strategy(values: Mapping[str, str]) -> tuple[dict[str, str], list[Problem]]:
    """The words of a command line with fields of the plan in place of a strategy, and what is wrong with it."""
    if not any(word in values for word in STRATEGY_WORDS):
        return dict(values), []
    strategy = values.get("strategy", "hybrid")
    if strategy not in WORDS_OF:
        close = closest_match(strategy, WORDS_OF)
        need = f"one of {', '.join(WORDS_OF)}"
        return dict(values), [Problem(f"strategy = {strategy}", need, f"strategy={close}" if close else "")]
    problems = _word_problems(values, strategy)
    fields = {name: text for name, text in values.items() if name not in STRATEGY_WORDS}
    fields |= {field: values[word] for word, field in FIELD_OF.items() if word in values}
    partitions = values.get("partitions", "1")
    if not problems and int(partitions) > 1:
        fields.setdefault("microbatches", str(MICROBATCHES_PER_PARTITION * int(partitions)))
    return fields, problems


def _word_problems(values: Mapping[str, str], strategy: str) -> list[Problem]:
    problems, example = [], {"data": "replicas=2", "model": "partitions=2", "hybrid": "partitions=2 replicas=2"}
    for word, field in FIELD_OF.items():
        text = values.get(word)
        if text is None:
            if word in WORDS_OF[strategy] and word == "partitions":
                got = f"strategy = {strategy} without partitions"
                problems.append(Problem(got, "into how many stages to divide the model", example[strategy]))
            continue
        if not text.isdecimal() or int(text) < 1:
            problems.append(Problem(f"{word} = {text or '(nothing)'}", "a whole number of at least 1", f"{word}=2"))
        elif word not in WORDS_OF[strategy] and int(text) > 1:
            got, need = f"strategy = {strategy} with {word} = {text}", f"{word} = 1, or strategy = hybrid"
            problems.append(Problem(got, need, f"strategy=hybrid {example['hybrid']}"))
        if field in values:
            got = f"{word} = {text} and {field} = {values[field]}"
            problems.append(Problem(got, "one of them: they are the same", f"{word}={text}"))
    return problems
