"""Position: which samples a feed has yielded, in which order, also as JSON; and whether it can continue from there.

Law: a position in the middle of an epoch belongs to sources of one length. A state continues only in the order that it
was saved in; it has less than 1 kB, whatever the source.

global    all samples shuffled
windowed  shards shuffled, and the samples of a window of a few shards: for storage that reads whole files
in order  without a shuffle
own       the source has an order of its own, `sample_order`: a mixture
Law: an order that the source cannot have is refused when the feed is made.
Law: telling a source what comes changes when its samples are read, never which.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from fourfold.feed.source import source_attribute
from fourfold.feed.stream import Stream
from fourfold.orders.order_names import ORDERS
from fourfold.orders.sample_order import UNSHUFFLED, GlobalOrder, InOrder, SampleOrder
from fourfold.orders.windowed_order import WindowedOrder, window_problems
from fourfold.words import argument_checks
from fourfold.words.comma_lists import comma_list
from fourfold.words.errors import Problem
from fourfold.words.task import Source

# ---- samples ---------------------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """The state of a feed: it has yielded samples [0, position) of the epoch.

    num_samples  the length of the epoch; None for a stream that does not say
    """

    seed: int
    epoch: int
    position: int
    num_samples: int | None = None


# torch.load accepts a saved state, with weights_only too.
torch.serialization.add_safe_globals([Position])


def position_problems(state: Any, num_samples: int | None) -> list[Problem]:
    """What is wrong with a state, for a feed of `num_samples` samples; None: of a stream."""
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
    if other := length_mismatch(position, num_samples):
        problems.append(other)
    elif position.position < 0 or (num_samples is not None and position.position >= num_samples):
        need = "0 or more" if num_samples is None else f"one before the source's {num_samples} samples"
        problems.append(Problem(f"position {position.position}", need))
    return problems


def length_mismatch(state: Position, num_samples: int | None) -> Problem | None:
    """The problem if the source had another length when the state's epoch began: its order differs then."""
    if state.position == 0 or num_samples is None or state.num_samples in (None, num_samples):
        return None
    got = f"position {state.position} in an epoch of {state.num_samples} samples, and a source of {num_samples} now"
    attempt = f"the source as it was, or ({state.seed}, {state.epoch + 1}, 0), the beginning of the next epoch"
    return Problem(got, "the same number of samples until the epoch is over", attempt)


# ---- as JSON values --------------------------------------------------------------------------------------------------


VERSION = 1
MAX_DESCRIPTION = 300  # letters; a mixture names its sources
STREAM = "stream"
ORDER_KEYS = ("order", "order_version", "order_digest")


def describe_order(order: SampleOrder | None) -> dict[str, Any]:
    """What a state says of its order; None: of a stream."""
    if order is None:
        return dict(zip(ORDER_KEYS, (STREAM, UNSHUFFLED, ""), strict=True))
    text = order.description()
    shown = text if len(text) <= MAX_DESCRIPTION else f"{text[:MAX_DESCRIPTION]}…"
    return dict(zip(ORDER_KEYS, (shown, order.version, order.digest()), strict=True))


def make_state_dict(position: Mapping[str, Any], order: SampleOrder | None) -> dict[str, Any]:
    """The state of a feed at a position."""
    return {"version": VERSION, **position, **describe_order(order)}


def state_dict_problems(state: Any, order: SampleOrder | None) -> list[Problem]:
    """Why a feed with this order cannot continue from a state; its position is not looked at."""
    keys = {"version", *Position._fields, *ORDER_KEYS}
    if not isinstance(state, Mapping) or set(state) != keys:
        got = f"a state with {comma_list(state) or 'nothing'}" if isinstance(state, Mapping) else repr(state)
        return [Problem(got, "the state_dict() of a feed")]
    if state["version"] != VERSION:
        return [Problem(f"a state of version {state['version']}", f"version {VERSION}", "the Fourfold that saved it")]
    saved, now = {key: state[key] for key in ORDER_KEYS}, describe_order(order)
    # Between epochs the source may have grown; the order is still the same if only that has changed.
    is_same_but_for_length = saved["order"] == now["order"] and saved["order_version"] == now["order_version"]
    if saved == now or (is_same_but_for_length and state["position"] == 0 and not _spans_epochs(order)):
        return []
    is_other_length = order is not None and state["num_samples"] != order.num_positions
    if is_same_but_for_length and is_other_length and state["position"]:
        return []  # `load_state` says so, with the numbers
    return [order_problem(saved, now)]


def order_problem(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Problem:
    """The problem of samples that came in another order when a state was saved."""
    got = f"samples saved in the order: {saved['order']}; now: {now['order']}"
    if saved["order"] == now["order"]:
        got = (
            f"the order {now['order']}, version {saved['order_version']} when it was saved, now {now['order_version']}"
        )
        if saved["order_version"] == now["order_version"]:
            got = f"the order {now['order']}, of other shards, sources or weights than when it was saved"
    return Problem(got, "the same order, so that no sample is left out or comes twice", "the order it was saved with")


def _spans_epochs(order: SampleOrder | None) -> bool:
    """Whether an epoch goes on where the one before has ended: a mixture's sources do."""
    return order is not None and order.kind == "mixed"


# ---- Orders of a feed: which order the samples of a source come in, from what the user and the source say -----------


def make_order(
    source: Source | Stream,
    *,
    order: str | None,
    window: int | None,
    shuffle: bool | None,
    default_shuffle: bool = True,
) -> SampleOrder | None:
    """The order of a source's samples as it is now, by arguments without problems; None: of a stream.

    `default_shuffle`: what `shuffle = None` means.
    """
    if isinstance(source, Stream):
        return None
    if (own := source_attribute(source, "sample_order")) is not None:
        return own
    if order == "windowed":
        assert window is not None
        return WindowedOrder(source_attribute(source, "shard_sizes"), window)
    shuffles = order is not None or (default_shuffle if shuffle is None else shuffle)
    return (GlobalOrder if shuffles else InOrder)(len(source))


def order_problems(source: Source | Stream, *, order: Any, window: Any, shuffle: Any) -> list[Problem]:
    """Why a source cannot have the order that is asked for."""
    problems = value_problems(order, window)
    if problems:
        return problems
    if isinstance(source, Stream):
        got = f"order = {order!r}, and a stream" if order is not None else "shuffle = True, and a stream"
        attempt = "a dataset that shuffles itself, such as dataset.shuffle(buffer_size=…) of datasets"
        return [Problem(got, "numbered samples to shuffle", attempt)] if shuffle or order is not None else []
    if source_attribute(source, "sample_order") is not None:
        got = f"order = {order!r}" if order is not None else "shuffle = False"
        attempt = "ff.Weighted(source, weight, order=…) for each source of the mixture"
        is_refused = order is not None or shuffle is False
        return [Problem(f"{got}, and a mixture", "the order of its blocks", attempt)] if is_refused else []
    if order is not None and shuffle is False:
        return [Problem(f"order = {order!r} and shuffle = False", "one of them", f"order={order!r}")]
    if order == "windowed":
        return window_problems(source_attribute(source, "shard_sizes"), window, len(source))
    return []


def value_problems(order: Any, window: Any) -> list[Problem]:
    """Why these values are no order and window of any source."""
    if order is not None and order not in ORDERS:
        got = argument_checks.format_argument("order", order)
        return [Problem(got, " or ".join(ORDERS), "order='windowed', window=4")]
    problems = argument_checks.int_problems("window", window, minimum=1, optional=True)
    if not problems and (order == "windowed") != (window is not None):
        got = "order = 'windowed' without a window" if window is None else f"window = {window}, and order = {order!r}"
        problems.append(Problem(got, "how many shards are shuffled together", "order='windowed', window=4"))
    return problems


# ---- Expected batches: a source that stages its samples is told which ones come, in the feed's order ----------------

Batch = TypeVar("Batch")


class Expected(Protocol):
    """What a source does ahead for the batches that are expected of it."""

    def advance(self) -> None:
        """The first of the expected batches has been read."""
        ...

    def close(self) -> None:
        """No more of them will be read."""
        ...


class AllExpected(NamedTuple):
    """The same batches, expected of several sources."""

    parts: Sequence[Expected]

    def advance(self) -> None:
        for part in self.parts:
            part.advance()

    def close(self) -> None:
        for part in self.parts:
            part.close()


def expect_batches(source: Source | Stream, batches: Iterable[Sequence[int]]) -> Expected | None:
    """These samples of a source will be read, batch after batch. None: nothing is done ahead."""
    expect = source_attribute(source, "expect_batches")
    return None if expect is None else expect(batches)


def read_expected(
    source: Source | Stream, batches: Iterable[Batch], expected: Iterable[Sequence[int]]
) -> Iterator[Batch]:
    """The batches, of which `expected` has the sample ids."""
    ahead = expect_batches(source, expected)
    try:
        for batch in batches:
            if ahead is not None:
                ahead.advance()
            yield batch
    finally:
        if ahead is not None:
            ahead.close()
