"""Strategy words: they become fields of the plan, and contradictions are said at once."""

import pytest

from fourfold.cli.run import resolve
from fourfold.cli.strategy import expand_strategy
from fourfold.words.errors import SettingError


@pytest.mark.parametrize(("words", "fields"), [
    ({"strategy": "hybrid", "partitions": "2", "replicas": "3"}, {"pp": "2", "dp": "3", "microbatches": "8"}),
    ({"partitions": "2", "replicas": "2", "microbatches": "6"}, {"pp": "2", "dp": "2", "microbatches": "6"}),
    ({"strategy": "model", "partitions": "4"}, {"pp": "4", "microbatches": "16"}),
    ({"strategy": "model", "partitions": "4", "replicas": "1"}, {"pp": "4", "dp": "1", "microbatches": "16"}),
    ({"strategy": "data", "replicas": "4", "zero": "1"}, {"dp": "4", "zero": "1"}),
    ({"strategy": "data"}, {}),
    ({"pp": "2", "zero": "1"}, {"pp": "2", "zero": "1"}),
])  # fmt: skip
def test_a_strategy_becomes_fields_of_the_plan(words, fields):
    assert expand_strategy(words) == (fields, [])


@pytest.mark.parametrize(("words", "parts"), [
    (["strategy=hybird", "partitions=2"], ["one of data, model, hybrid", "try strategy=hybrid"]),
    (["strategy=model"], ["without partitions", "partitions=2"]),
    (["strategy=data", "partitions=2"], ["partitions = 2", "strategy=hybrid"]),
    (["strategy=hybrid", "partitions=two", "replicas=0"], ["partitions = two", "replicas = 0"]),
    (["strategy=hybrid", "partitions=2", "pp=2", "dp=1", "replicas=2"], ["and pp = 2", "and dp = 1"]),
])  # fmt: skip
def test_what_is_no_strategy_is_said_at_once(words, parts):
    with pytest.raises(SettingError) as caught:
        resolve(["lm", *words])
    for part in parts:
        assert part in str(caught.value)
