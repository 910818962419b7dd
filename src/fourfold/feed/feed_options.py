"""Feed options: the keywords of `ff.Feed` for the order and the reading of samples, which it describes."""

from typing import NamedTuple, TypedDict

from fourfold.feed.transform import SampleTransform


class FeedOptions(NamedTuple):
    """The options with their defaults."""

    order: str | None = None
    window: int | None = None
    bad_samples: int = 0
    transform: SampleTransform | None = None
    shared: bool = True


class FeedKeywords(TypedDict, total=False):
    """The fields of `FeedOptions`, as keywords."""

    order: str | None
    window: int | None
    bad_samples: int
    transform: SampleTransform | None
    shared: bool
