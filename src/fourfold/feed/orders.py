"""Orders of a feed: which order the samples of a source come in, from what the user and the source say.

global    all samples shuffled
windowed  shards shuffled, and the samples of a window of a few shards: for storage that reads whole files
in order  without a shuffle
own       the source has an order of its own, `sample_order`: a mixture
Law: an order that the source cannot have is refused when the feed is made.
"""

from typing import Any, Literal, NamedTuple

from fourfold.feed.source import source_attribute
from fourfold.feed.stream import Stream
from fourfold.orders.order_names import ORDERS
from fourfold.orders.sample_order import GlobalOrder, InOrder, SampleOrder
from fourfold.orders.windowed_order import WindowedOrder, window_problems
from fourfold.words import argument_checks
from fourfold.words.errors import Problem
from fourfold.words.task import Source

OrderKind = Literal["global", "windowed", "in order", "own", "stream"]


class OrderChoice(NamedTuple):
    """Which order; `window` is an int if it is windowed."""

    kind: OrderKind
    window: int | None = None

    def make(self, source: Source) -> SampleOrder:
        """The order of a source's samples as it is now."""
        if self.kind == "own":
            return source_attribute(source, "sample_order")
        if self.kind == "windowed":
            assert self.window is not None
            return WindowedOrder(source_attribute(source, "shard_sizes"), self.window)
        return (InOrder if self.kind == "in order" else GlobalOrder)(len(source))


def choose_order(
    source: Source | Stream, *, order: str | None, window: int | None, shuffle: bool | None, default_shuffle: bool
) -> OrderChoice:
    """The order that arguments without problems mean; `default_shuffle`: what `shuffle = None` means."""
    if isinstance(source, Stream):
        return OrderChoice("stream")
    if source_attribute(source, "sample_order") is not None:
        return OrderChoice("own")
    if order == "windowed":
        return OrderChoice("windowed", window)
    shuffles = order is not None or (default_shuffle if shuffle is None else shuffle)
    return OrderChoice("global" if shuffles else "in order")


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
