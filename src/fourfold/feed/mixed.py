"""Mixed: several sources as one, by weight.

part   one of the sources, with its weight, its own order, and how often an epoch may go through it
id     of a sample: the samples of all parts one after the other. An id beyond the last is that sample once more, in a
       further pass of an epoch through its part: id − len(mixture), or less by as many lengths as it takes
Law: a feed of a mixture takes fixed quotas of its parts in every block (`orders/mixed_order.py`). Read by number, as a
pack or an evaluation does, a mixture has each sample of each part once.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fourfold.feed.data_input import input_problems
from fourfold.feed.position import AllExpected, Expected, expect_batches, make_order, order_problems
from fourfold.feed.source import fetch, map_leaves, source_attribute
from fourfold.orders.mixed_order import MAX_BLOCK, MixedOrder, MixedPart, mixture_problems
from fourfold.orders.order_names import ORDERS
from fourfold.words import argument_checks
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import DamagedSample, DataError, Problem


class Weighted(NamedTuple):
    """A source of a mixture.

    weight   its share is weight / sum of all weights
    repeat   how often an epoch may go through the source, such as 1, 2 or 0.5; None: as often as the others last
    order, window   the order within the source: see `ff.Feed`
    """

    source: Any
    weight: float
    repeat: float | None = 1
    order: str = "global"
    window: int | None = None


class Mixed:
    """Sources by weight, as a source: `ff.Mixed({"web": ff.Weighted(web, 0.7), "code": ff.Weighted(code, 0.3)})`.

    block_size   in how many consecutive positions each source has a fixed quota; None: the smallest at which all
                 weights are exact, at most 4096

    An epoch ends where the first source with a `repeat` has been gone through so often. The next epoch goes on where
    this one has ended in each source. `quotas` says how many samples of a block each source has, `max_error` by how
    much, at most, a share differs from its weight. Raises DataError for weights that are not positive.
    """

    def __init__(self, sources: Mapping[str, Weighted], *, block_size: int | None = None) -> None:
        if problems := _problems(sources, block_size):
            raise DataError(problems, where="the mixture")
        self._names = tuple(sources)
        self._sources: tuple[Any, ...] = tuple(each.source for each in sources.values())
        self._first_ids = np.cumsum([0, *map(len, self._sources)])
        parts = [_part(name, each) for name, each in sources.items()]
        if problems := mixture_problems(parts, block_size):
            raise DataError(problems, where="the mixture")
        self.sample_order = MixedOrder(parts, block_size)
        """The order in which a feed reads the mixture."""
        if all(hasattr(source, "fetch") for source in self._sources):
            # Else samples are read one by one, each with its own random numbers: see `feed/sample_rng.py`.
            self.fetch = self._fetch

    @property
    def quotas(self) -> dict[str, int]:
        """How many samples of each source a block has."""
        return dict(zip(self._names, self.sample_order.quotas.tolist(), strict=True))

    @property
    def max_error(self) -> float:
        """The largest relative error of a source's share of a block."""
        return self.sample_order.max_error

    def __len__(self) -> int:
        """The samples of all sources, each once. An epoch of a feed has `sample_order.num_positions`."""
        return int(self._first_ids[-1])

    def __getitem__(self, index: int, /) -> Any:
        part, number = self._locate(index)
        source = self._sources[part]
        with _naming(self._names[part]):
            if hasattr(source, "__getitem__"):
                return source[number]
            return map_leaves(source.fetch([number]), lambda leaf: leaf[0] if isinstance(leaf, Tensor) else leaf)

    def sample_key(self, index: int) -> str:
        """The name of a sample for people: its source, and its name there."""
        part, number = self._locate(index)
        own = source_attribute(self._sources[part], "sample_key")
        return f"{self._names[part]}: {number if own is None else own(number)}"

    def expect_batches(self, batches: Iterable[Sequence[int]], /) -> Expected:
        """These samples will be read, batch after batch; each source expects its own."""
        copies = enumerate(itertools.tee(batches, len(self._sources)))
        numbers = [self._numbers_of(part, each) for part, each in copies]
        expected = [expect_batches(*each) for each in zip(self._sources, numbers, strict=True)]
        return AllExpected([each for each in expected if each is not None])

    def _numbers_of(self, part: int, batches: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
        """The numbers of one source's samples in each batch."""
        first, last = self._first_ids[part : part + 2]
        for batch in batches:
            places = np.asarray(batch, dtype=np.int64) % len(self)
            yield (places[(places >= first) & (places < last)] - first).tolist()

    def _locate(self, index: int) -> tuple[int, int]:
        """The source of a sample, and its number there."""
        if index < 0:
            raise IndexError(f"sample {index} asked of {len(self)}")
        place = index % len(self)
        part = int(np.searchsorted(self._first_ids, place, side="right")) - 1
        return part, place - int(self._first_ids[part])

    def _fetch(self, indices: Sequence[int], /) -> Any:
        """A batch of these samples: of each source one batch, put together in the order of `indices`."""
        places = np.asarray(indices, dtype=np.int64) % len(self)
        parts = np.searchsorted(self._first_ids, places, side="right") - 1
        batches, rows = [], []
        for part in np.unique(parts).tolist() or [0]:
            mine = np.flatnonzero(parts == part)
            with _naming(self._names[part]):
                batches.append(fetch(self._sources[part], (places[mine] - self._first_ids[part]).tolist()))
            rows.append(mine)
        if len(batches) == 1:
            return batches[0]
        order = torch.from_numpy(np.argsort(np.concatenate(rows)))
        return _join(batches, order, [self._names[part] for part in np.unique(parts)])


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Within: a damaged sample is named with its source."""
    try:
        yield
    except DamagedSample as error:
        raise DamagedSample(f"{name}: {error.key}", error.reason, where=error.where) from error


def _part(name: str, each: Weighted) -> MixedPart:
    order = make_order(each.source, order=each.order, window=each.window, shuffle=None)
    assert order is not None
    return MixedPart(name, order, len(each.source), float(each.weight), each.repeat)


def _problems(sources: Any, block_size: Any) -> list[Problem]:
    need, attempt = "named sources with weights", '{"web": ff.Weighted(web, 0.7), "code": ff.Weighted(code, 0.3)}'
    if not isinstance(sources, Mapping) or not sources:
        got = "no sources" if isinstance(sources, Mapping) else argument_checks.format_argument("sources", sources)
        return [Problem(got, need, attempt)]
    problems = argument_checks.int_problems("block_size", block_size, minimum=1, optional=True)
    if not problems and block_size is not None and block_size > MAX_BLOCK:
        problems.append(Problem(f"block_size = {block_size}", f"at most {MAX_BLOCK}"))
    for name, each in sources.items():
        if not isinstance(name, str) or not isinstance(each, Weighted):
            got = argument_checks.format_argument(f"sources[{name!r}]", each)
            problems.append(Problem(got, need, attempt))
        else:
            problems += _weighted_problems(name, each)
    return problems


def _weighted_problems(name: str, each: Weighted) -> list[Problem]:
    problems = _source_problems(name, each.source)
    for field, optional in (("weight", False), ("repeat", True)):
        value, label = getattr(each, field), f"{field} of {name!r}"
        found = argument_checks.positive_problems(label, value, optional=optional, attempt=f"{field}=1")
        if not found and value is not None and value == float("inf"):
            found = [Problem(f"{label} = {value}", "a finite number", "repeat=None" if optional else "weight=1")]
        problems += found
    if each.order not in ORDERS:
        problems.append(Problem(f"order of {name!r} = {each.order!r}", " or ".join(ORDERS), "order='global'"))
    elif not problems:
        found = order_problems(each.source, order=each.order, window=each.window, shuffle=None)
        problems += [problem._replace(got=f"{name}: {problem.got}") for problem in found]
    return problems


def _source_problems(name: str, source: Any) -> list[Problem]:
    need = "numbered samples, len(source) and source[i]"
    if isinstance(source, DataLoader | IterableDataset):
        attempt = "its dataset" if isinstance(source, DataLoader) else "a dataset with numbered samples"
        return [Problem(f"{name!r} = a {type(source).__name__}", need, attempt)]
    if source_attribute(source, "sample_order") is not None:
        return [Problem(f"{name!r} = a mixture", "a source that is none", "all sources in one mixture")]
    return input_problems(source, repr(name))


def _join(batches: Sequence[Any], order: Tensor, names: Sequence[str]) -> Any:
    """The rows of some batches, in another order. Raises DataError if the batches differ in more than their length."""
    first = batches[0]
    if isinstance(first, Mapping):
        if any(not isinstance(each, Mapping) or each.keys() != first.keys() for each in batches):
            raise _mismatch(names, batches)
        return {key: _join([each[key] for each in batches], order, names) for key in first}
    if isinstance(first, tuple | list):
        if any(not isinstance(each, tuple | list) or len(each) != len(first) for each in batches):
            raise _mismatch(names, batches)
        parts = [_join(list(each), order, names) for each in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if any(not isinstance(each, Tensor) or _form(each) != _form(first) for each in batches):
        raise _mismatch(names, batches)
    return torch.cat(list(batches))[order]


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape[1:])}"
    if isinstance(value, Mapping):
        return f"a dict of {comma_list(value)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


def _mismatch(names: Sequence[str], batches: Sequence[Any]) -> DataError:
    got = "; ".join(f"{_form(batch)} in {name}" for name, batch in zip(names, batches, strict=True))
    need = "samples of one form, so that a batch can stack them"
    return DataError(Problem(got, need, "sources that make the same samples"), where="the mixture")
