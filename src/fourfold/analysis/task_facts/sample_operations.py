"""Sample operations: from the kernels of forwards of some numbers of samples to the operations of one.

chunked  of the last segment: a loss over a large vocabulary is computed some rows at a time, so that more samples are
         more kernels; those of one name and size count as one
Law: the flops of each segment are affine in the samples, or the step has no facts.
"""

from collections.abc import Mapping, Sequence

from fourfold.analysis.task_facts.operations import Kernel
from fourfold.plan.predict.facts import Operation
from fourfold.words.errors import Problem, TaskError

Kernels = Sequence[tuple[int, Kernel]]


def operations_of_sample(forwards: Mapping[int, Kernels]) -> dict[int, list[Operation]]:
    """By segment. `forwards`: by number of samples, three of them. Raises TaskError."""
    numbers = sorted(forwards)
    segments = sorted({segment for kernels in forwards.values() for segment, _ in kernels})
    found: dict[int, list[Operation]] = {}
    for segment in segments:
        lists = [[kernel for owner, kernel in forwards[number] if owner == segment] for number in numbers]
        _check_affine(lists, numbers)
        if segment == segments[-1] and any(_keys(each) != _keys(lists[0]) for each in lists):
            lists = [_merged(each) for each in lists]
        if _keys(lists[0]) != _keys(lists[1]):
            got = f"a forward that calls other operations for {numbers[1]} samples than for {numbers[0]}"
            attempt = "a loop over tokens, not samples"
            raise TaskError(Problem(got, "the same operations for any number of samples", attempt))
        found[segment] = [operation_of(few, many, *numbers[:2]) for few, many in zip(*lists[:2], strict=True)]
    return found


def _keys(kernels: Sequence[Kernel]) -> list[tuple[object, ...]]:
    """What is the same for any number of samples."""
    return [(each.name, each.has_weight, each.columns, each.inner) for each in kernels]


def _merged(kernels: Sequence[Kernel]) -> list[Kernel]:
    found: dict[tuple[object, ...], Kernel] = {}
    for key, each in zip(_keys(kernels), kernels, strict=True):
        before = found.get(key)
        found[key] = (
            each
            if before is None
            else before._replace(
                flops=before.flops + each.flops,
                num_bytes=before.num_bytes + each.num_bytes,
                rows=before.rows + each.rows,
            )
        )
    return list(found.values())


def _check_affine(lists: Sequence[Sequence[Kernel]], numbers: Sequence[int]) -> None:
    flops = [sum(int(kernel.flops) for kernel in each) for each in lists]  # whole numbers: sums are exact
    if (flops[2] - flops[1]) * (numbers[1] - numbers[0]) != (flops[1] - flops[0]) * (numbers[2] - numbers[1]):
        few, many, more = (f"{each:g}" for each in flops)
        got = f"a step with {few}, {many} and {more} operations for {numbers[0]}, {numbers[1]} and {numbers[2]} samples"
        need, attempt = "as many for each sample", "a loss that compares no samples of a batch with each other"
        raise TaskError(Problem(got, need, attempt))


def operation_of(few: Kernel, many: Kernel, num_few: int, num_many: int) -> Operation:
    """The operation of one sample, from the same call with few and with many samples."""

    def per_sample(values: tuple[float, float]) -> float:
        return (values[1] - values[0]) / (num_many - num_few)

    moved = per_sample((few.num_bytes, many.num_bytes))
    batch = per_sample((few.batch, many.batch))
    rows = few.rows if few.batch else per_sample((few.rows, many.rows))
    flops = per_sample((few.flops, many.flops))
    fixed = max(0.0, few.num_bytes - num_few * moved)
    return Operation(few.kind, flops, moved, fixed, few.has_weight, rows, few.columns, few.inner, batch)
