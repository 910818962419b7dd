"""How the tensor axis splits a model: the style of each module and the shards of each parameter."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from fourfold.plan.tensor_shard import TensorShard


class Style(StrEnum):
    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    REPLICATED = "replicated"


class TensorLayout(NamedTuple):
    shards: Mapping[str, tuple[TensorShard, ...]]
    styles: Mapping[str, Style]
    counts: Mapping[str, Mapping[str, int]]
