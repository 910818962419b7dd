"""Synchronous schedules without a split backward: gpipe, 1F1B and interleaved 1F1B.

warm-up  the forwards of an index in front of its first backward
Law: every stage runs its backwards in order of microbatch, so that all of these schedules sum gradients in one order.
Sources: GPipe (Huang et al., 1811.06965); 1F1B: PipeDream-Flush (Narayanan et al., 2006.09503) and DAPPLE (Fan et al.,
2007.01045); interleaved 1F1B (Narayanan et al., 2104.04473, §2.2).
"""

from collections.abc import Iterator, Sequence

from fourfold.plan.pipeline.spec import ComputeLists, PipelineSpec
from fourfold.words.program import Action, Verb


def gpipe(spec: PipelineSpec) -> ComputeLists:
    """All forwards, then all backwards. These run in order of microbatch, so gradients are summed as in 1F1B."""
    return tuple(
        tuple(Action(verb, stage, i) for verb in (Verb.FORWARD, Verb.BACKWARD) for i in range(spec.microbatches))
        for stage in range(spec.pp)
    )


def one_f_one_b(spec: PipelineSpec) -> ComputeLists:
    """A warm-up of pp − 1 − stage forwards, then one forward and one backward in turn: pp − stage in flight."""
    return tuple(
        _alternate(
            [Action(Verb.FORWARD, stage, i) for i in range(spec.microbatches)],
            [Action(Verb.BACKWARD, stage, i) for i in range(spec.microbatches)],
            warm_up=spec.pp - 1 - stage,
        )
        for stage in range(spec.pp)
    )


def interleaved(spec: PipelineSpec) -> ComputeLists:
    """1F1B over the chunks of each index: pp microbatches go through one chunk, then through the next one."""
    lists = []
    for index in range(spec.pp):
        forwards = [Action(Verb.FORWARD, chunk * spec.pp + index, i) for chunk, i in _chunk_order(spec)]
        last = spec.num_stages - spec.pp + index
        backwards = [Action(Verb.BACKWARD, last - chunk * spec.pp, i) for chunk, i in _chunk_order(spec)]
        # Twice that of 1F1B, as in Megatron: every hop there and back has the time of a block for its message. With
        # messages of a tenth of a forward, pp 4, 8 microbatches and interleave 2, simulated: bubble 0.248, not 0.260.
        warm_up = 2 * (spec.pp - 1 - index) + (spec.interleave - 1) * spec.pp
        lists.append(_alternate(forwards, backwards, warm_up=warm_up))
    return tuple(lists)


def _chunk_order(spec: PipelineSpec) -> Iterator[tuple[int, int]]:
    """Chunk and microbatch, in groups of pp microbatches."""
    for first in range(0, spec.microbatches, spec.pp):
        for chunk in range(spec.interleave):
            for microbatch in range(first, first + spec.pp):
                yield chunk, microbatch


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warm_up: int) -> tuple[Action, ...]:
    """The warm-up, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    actions = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return (*actions, *backwards[len(forwards) - warm_up :])
