"""Feed: the batches of one rank, prefetched by a thread.

state        (seed, epoch, position, num_samples): which samples the feed has yielded; independent of ranks and prefetch
local batch  this data rank's part of a global batch; if a batch does not divide evenly, parts differ by one sample
Law: the local batches of all data ranks together are `plan.sample_order.rows` of the batch's positions, on any mesh.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fourfold.feed.collate import source_problem
from fourfold.feed.prefetch import prefetch
from fourfold.feed.sample_rng import fetch_seeded
from fourfold.feed.source import fetch
from fourfold.feed.source_fingerprint import Fingerprint, fingerprint_of, is_same_sample
from fourfold.parts.comm import init
from fourfold.plan.plan import Plan
from fourfold.plan.sample_order import BatchRange, shard_range
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem
from fourfold.words.noop import noop
from fourfold.words.task import Source


class Position(NamedTuple):
    """The state of a feed: it has yielded samples [0, position) of the epoch.

    num_samples  the length of the epoch; None in states of older versions
    """

    seed: int
    epoch: int
    position: int
    num_samples: int | None = None


torch.serialization.add_safe_globals([Position])  # torch.load accepts a saved state, with weights_only too


class Batch(tuple):
    """A pair (inputs, targets) with the numbers of its samples, which errors name.

    probe: the fingerprint of the feed's source, on a data rank's first batch if there are several data ranks
    (`feed/source_fingerprint.py`).
    """

    samples: BatchRange
    probe: Fingerprint | None = None

    @classmethod
    def wrap(cls, values: Any, samples: BatchRange) -> Any:
        """The pair or dict with the numbers of its samples; other values are returned as they are."""
        if isinstance(values, Mapping):
            batch = DictBatch(values)
        elif type(values) in (tuple, list) and len(values) == 2:
            batch = cls(values)
        else:
            return values
        batch.samples = samples
        return batch


class DictBatch(dict[str, Any]):
    """A dict of inputs with the numbers of its samples; see `Batch`."""

    samples: BatchRange
    probe: Fingerprint | None = None


class Feed:
    """Iterates over the local batches of an epoch; the next loop is the next epoch. `batch_size` is global.

    An epoch's last batch holds the remaining samples; a data rank may then get an empty batch, which a step accepts.
    Samples that draw from torch's, Python's or NumPy's generators draw the same numbers on any mesh; such samples are
    not prefetched, but read when their batch is requested.
    Raises DataError for an empty source or a batch size below one.
    """

    def __init__(self, source: Source, plan: Plan | None = None, *, batch_size: int, seed: int = 0) -> None:
        problem = source_problem(source, "source")
        problems = [] if problem is None else [problem]
        problems += argument_checks.int_problems("batch_size", batch_size, minimum=1) + argument_checks.seed_problems(
            seed
        )
        problems += argument_checks.instance_problems("plan", plan, Plan, optional=True, attempt="ff.Plan(dp=2)")
        if problems:
            raise DataError(problems, where="the feed")
        self._source, self._batch_size = source, int(batch_size)
        self._size, self._index = dp_size_and_index(plan, where="the feed")
        self._state = Position(int(seed), 0, 0, len(source))
        self._uses_rng = self._has_fingerprint = False
        self.check_peers: Callable[[], None] = noop
        """Called from time to time while the feed waits for a batch; an error that it raises ends the wait."""

    @classmethod
    def single_rank(cls, source: Source, *, batch_size: int, seed: int = 0) -> "Feed":
        """A feed of global batches, as in a world of one rank."""
        feed = cls(source, batch_size=batch_size, seed=seed)
        feed._size, feed._index = 1, 0
        return feed

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self._batch_size

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self._source)

    @property
    def state(self) -> Position:
        """Which samples the feed has yielded; `load_state` continues from there, on any number of ranks."""
        return self._state

    def load_state(self, state: Position) -> None:
        """Continue from the state of another feed over the same source, with the seed and the order of that feed.

        Within a loop over the feed, the next batch comes from the new position; if the state is in another epoch, the
        loop ends. The batch size may differ, because a position counts samples. Raises DataError for a state in the
        middle of an epoch if the number of samples has changed since, because the order has changed with it.
        """
        if problems := _state_problems(state, len(self._source)):
            raise DataError(problems, where="the feed")
        self._state = Position(*state)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._source) // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        """The remaining batches of the epoch. The state advances when a batch is yielded, not when it is read."""
        epoch = self._state.epoch
        while self._state.epoch == epoch:
            batches = prefetch(
                self._batches(self._state), is_on_demand=lambda: self._uses_rng, check_peers=lambda: self.check_peers()
            )
            for after, batch in batches:
                self._state = after
                yield batch
                if self._state is not after or after.epoch != epoch:
                    break  # the epoch is over, or `load_state` has moved the feed

    def repeat(self) -> Generator[Any, None, None]:
        """Batches without end, epoch after epoch."""
        while True:
            yield from self

    def _batches(self, start: Position) -> Iterator[tuple[Position, Any]]:
        """The remaining batches of an epoch, each with the state after it."""
        num_samples, (seed, epoch, position, _) = len(self._source), start
        if problem := _length_mismatch(start, num_samples):
            raise DataError(problem, where="the feed")
        while position < num_samples:
            stop = min(position + self._batch_size, num_samples)
            first, last = shard_range(position, stop, self._size, self._index)
            samples = BatchRange(num_samples, seed, epoch, position, stop, first, last)
            batch = Batch.wrap(self._fetch(samples, is_first=position == start.position), samples)
            if self._size > 1 and not self._has_fingerprint and isinstance(batch, Batch | DictBatch):
                self._has_fingerprint, batch.probe = True, self._source_fingerprint(seed)
            position = stop
            after = (epoch, position) if position < num_samples else (epoch + 1, 0)
            yield Position(seed, *after, num_samples), batch

    def _fetch(self, samples: BatchRange, *, is_first: bool) -> Any:
        """A batch. The first one shows whether samples draw random numbers: no other code draws while it is read."""
        if not is_first and not self._uses_rng:
            return fetch(self._source, samples.sample_ids())
        options = {"seed": samples.seed, "epoch": samples.epoch, "uses_rng": self._uses_rng}
        batch, self._uses_rng = fetch_seeded(self._source, samples.sample_ids(), **options)
        return batch

    def _source_fingerprint(self, seed: int) -> Fingerprint | None:
        """The fingerprint of the source's middle sample; None if the sample differs each time it is read."""
        options = {"seed": seed, "epoch": 0, "uses_rng": self._uses_rng}
        try:
            twice = [fetch_seeded(self._source, [len(self._source) // 2], **options)[0] for _ in range(2)]
        except Exception:  # the batch that holds this sample will raise the error
            return None
        first, second = map(fingerprint_of, twice)
        return first if is_same_sample(first, second) else None


def _state_problems(state: Any, num_samples: int) -> list[Problem]:
    """What is wrong with a state, for a feed of `num_samples` samples."""
    numbers = list(state) if isinstance(state, tuple | list) else []
    if len(numbers) == 4 and numbers[3] is None:
        numbers = numbers[:3]
    if len(numbers) not in (3, 4) or not all(map(argument_checks.is_int, numbers)):
        got = f"a state {state!r}"
        return [Problem(got, "(seed, epoch, position, num_samples), the `state` of another feed")]
    position = Position(*numbers)
    problems = argument_checks.seed_problems(position.seed) + argument_checks.int_problems(
        "epoch", position.epoch, minimum=0
    )
    if other := _length_mismatch(position, num_samples):
        problems.append(other)
    elif not 0 <= position.position < num_samples:
        need = f"one before the source's {num_samples} samples"
        problems.append(Problem(f"position {position.position}", need))
    return problems


def _length_mismatch(state: Position, num_samples: int) -> Problem | None:
    """The problem if the source had another length when the state's epoch began: its order differs then."""
    if state.position == 0 or state.num_samples in (None, num_samples):
        return None
    got = f"position {state.position} in an epoch of {state.num_samples} samples, and a source of {num_samples} now"
    attempt = f"the source as it was, or ({state.seed}, {state.epoch + 1}, 0), the beginning of the next epoch"
    return Problem(got, "the same number of samples until the epoch is over", attempt)


def dp_size_and_index(plan: Plan | None, *, where: str) -> tuple[int, int]:
    """The size of the data axis and this rank's index on it. Raises DataError for a plan of another number of ranks."""
    world = init.world()
    if plan is None:
        return world.size, world.rank
    if plan.mesh.size != world.size:
        got = f"a plan of {plan.mesh.size} ranks in a world of {world.size}"
        attempt = "the plan that the model is trained with, or no plan: then all ranks are data ranks"
        raise DataError(Problem(got, "one for each rank", attempt), where=where)
    return plan.dp, plan.mesh.coordinates(world.rank)["dp"]
