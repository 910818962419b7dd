"""State problems: what is wrong with buffers and weights that a forward writes, as users read it."""

from collections.abc import Collection, Sequence

from fourfold.words.errors import Problem

EDIT_ADVICE = "writing after the step, inside step.edit()"


def sample_dependence_problems(names: Sequence[str], num_parts: int, trained: Collection[str] = ()) -> list[Problem]:
    """What is wrong with state that depends on the samples of a forward, if a batch is split into so many parts."""
    problems = []
    if buffers := [name for name in names if name not in trained]:
        got = f"forward writes {format_names(buffers)}, and the values depend on its samples"
        need = f"the same values after each of the {num_parts} parts that a batch is split into"
        attempt = 'batch_norm = "local", which keeps them per rank (not the same training)'
        problems.append(Problem(got, need, attempt))
    if weights := [name for name in names if name in trained]:
        got = f"forward writes {describe_trained(weights)}, and the values depend on its samples"
        need = f"the same weights on all ranks, and after each of the {num_parts} parts that a batch is split into"
        attempt = f"{EDIT_ADVICE}, from statistics that step.all_reduce(…) has summed over the ranks"
        problems.append(Problem(got, need, attempt))
    return problems


def forward_count_problems(names: Sequence[str], num_microbatches: int, trained: Collection[str] = ()) -> list[Problem]:
    """What is wrong with state that depends on how often a model runs forward."""
    problems, need = [], "state that does not depend on the number of forwards in a step"
    if buffers := [name for name in names if name not in trained]:
        got = f"each forward changes {format_names(buffers)}, and microbatches = {num_microbatches}"
        attempt = 'microbatches = 1, or batch_norm = "local" (not the same training)'
        problems.append(Problem(got, need, attempt))
    if weights := [name for name in names if name in trained]:
        got = f"each forward changes {describe_trained(weights)}, and microbatches = {num_microbatches}"
        problems.append(Problem(got, need, f"microbatches = 1, or {EDIT_ADVICE}"))
    return problems


def loss_state_problem(names: Sequence[str], num_parts: int) -> Problem:
    """What is wrong with state of the loss that changes with the samples, or with the number of calls."""
    got = f"the loss writes its own {format_names([name.partition('.')[2] for name in names])} each time it is called"
    need = f"a loss without such state: it is called for each of the {num_parts} parts that a batch is split into"
    return Problem(got, need, 'batch_norm = "local", which keeps the state per rank (not the same training)')


def describe_trained(names: Sequence[str]) -> str:
    return f"{'the trained weight' if len(names) == 1 else 'the trained weights'} {format_names(names)}"


def format_names(names: Sequence[str]) -> str:
    """The first three names."""
    return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
