"""Divergence report: the error that says which ranks are in which call, or have which optimizer options."""

from collections.abc import Collection, Mapping

from fourfold.torch_kit.option_text import ABSENT, parse_options
from fourfold.words.errors import DivergenceError, Problem
from fourfold.words.rank_groups import format_groups

POSITIONS_SEPARATOR = ", positions "  # a step's part of the sample order follows: see `plan.sample_order.BatchRange`


def with_options(call: str, options: str) -> str:
    """The call, with the optimizer's options as text on its second line."""
    return f"{call}\n{options}"


SAME_OPTIONS_HINT = "the same arguments, schedule and edits of them on every rank"


def divergence_error(
    calls: Mapping[int, str], *, behind: Collection[int] = (), attempt: str = SAME_OPTIONS_HINT
) -> DivergenceError:
    """The error that says which ranks are in which call. Ranks `behind` have not begun the call yet: theirs is older.

    `attempt`: what to try if ranks are in the same call with different options.
    """
    names, options = {}, {}
    for rank, call in calls.items():
        name, _, text = call.partition("\n")
        names[rank] = f"{name} and has come no further" if rank in behind else name
        if rank not in behind:
            options[rank] = text
    if len({names[rank] for rank in options}) == 1 and len(set(options.values())) > 1:
        return _option_divergence_error(names[next(iter(options))], options, attempt)
    got = format_groups({rank: f"at {name}" for rank, name in names.items()}, "is", "are")
    attempt = "no step, evaluation or exchange that only one rank does or leaves out"
    if len({name.partition(POSITIONS_SEPARATOR)[0] for name in names.values()}) == 1:
        attempt = "the same source, seed, batch_size and state on every rank, and no batch that one rank leaves out"
    return DivergenceError(Problem(got, "every rank in the same call", attempt), where="the calls of the ranks")


def _option_divergence_error(call: str, options: Mapping[int, str], attempt: str) -> DivergenceError:
    """For ranks in the same call with different optimizer options: names each option that differs, and its values."""
    by_rank = {rank: parse_options(text) for rank, text in options.items()}
    need, problems = "the same options on every rank", []
    for option in dict.fromkeys(name for values in by_rank.values() for name in values):
        shown = {rank: values.get(option, ABSENT) for rank, values in by_rank.items()}
        if len(set(shown.values())) > 1:
            problems.append(Problem(f"{option}: {format_groups(shown)}", need, attempt))
    if not problems:  # the call was too short for all options; the digest at its beginning differs
        got = format_groups({rank: text.split()[0] for rank, text in options.items()})
        problems.append(Problem(f"options that are too long to show, by digest: {got}", need, attempt))
    return DivergenceError(problems, where=f"the options of the optimizer at {call}")
