"""Divergence report: the error that says which ranks are in which call, or have which optimizer options."""

from collections.abc import Collection, Mapping, Sequence

from fourfold.parts.optim.option_text import ABSENT, parse_options
from fourfold.words.errors import DivergenceError, Problem

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
    rows = _group_by_text(names)
    got = "; ".join(f"{_format_ranks(ranks, 'is', 'are')} at {call}" for call, ranks in rows)
    attempt = "no step, evaluation or exchange that only one rank does or leaves out"
    if len({name.partition(POSITIONS_SEPARATOR)[0] for name in names.values()}) == 1:
        attempt = "the same source, seed, batch_size and state on every rank, and no batch that one rank leaves out"
    return DivergenceError(Problem(got, "every rank in the same call", attempt), where="the calls of the ranks")


def _option_divergence_error(call: str, options: Mapping[int, str], attempt: str) -> DivergenceError:
    """For ranks in the same call with different optimizer options: names each option that differs, and its values."""
    by_rank = {rank: parse_options(text) for rank, text in options.items()}
    need, problems = "the same options on every rank", []
    for option in dict.fromkeys(name for values in by_rank.values() for name in values):
        rows = _group_by_text({rank: values.get(option, ABSENT) for rank, values in by_rank.items()})
        if len(rows) > 1:
            got = "; ".join(f"{_format_ranks(ranks, 'has', 'have')} {values}" for values, ranks in rows)
            problems.append(Problem(f"{option}: {got}", need, attempt))
    if not problems:  # the call was too short for all options; the digest at its beginning differs
        got = "; ".join(
            f"{_format_ranks(ranks, 'has', 'have')} {text.split()[0]}" for text, ranks in _group_by_text(options)
        )
        problems.append(Problem(f"options that are too long to show, by digest: {got}", need, attempt))
    return DivergenceError(problems, where=f"the options of the optimizer at {call}")


def _group_by_text(texts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """The ranks of each text, the fewest first: they are the likeliest to have diverged."""
    by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        by_text.setdefault(text, []).append(rank)
    return sorted(by_text.items(), key=lambda row: (len(row[1]), row[1]))


def _format_ranks(ranks: Sequence[int], one: str, many: str) -> str:
    """`rank 1 is`, `ranks 0, 2 and 3 are`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} {many}"
