"""Laws of the words of `fourfold plan`: what is not understood is refused, all of it at once, with what to try."""

import pytest

from fourfold.cli.plan.arguments import parse_plan_words
from fourfold.cli.plan.what_if import listed
from fourfold.cli.run import Run, resolve
from fourfold.words.errors import SettingError


def test_own_words_are_sorted_from_those_of_a_training():
    found = parse_plan_words(["lm", "devices=8", "tp=2", "memory=80GiB", "ask:dapple", "length=256", "out=none"])
    assert found.run == Run("lm", texts={"tp": "2", "length": "256"}, ask="ask:dapple")
    assert (found.value("devices"), found.value("memory")) == (8, 80 * 2**30)
    assert found.out is None
    assert str(parse_plan_words([]).out) == "plan.toml"


def test_every_wrong_word_is_told_at_once():
    words = ["devices=0", "memory=80", "network=10Gb/s", "confirm=99", "overwrite=maybe", "ask:a", "ask:b"]
    with pytest.raises(SettingError) as raised:
        parse_plan_words(words)
    text = str(raised.value)
    assert text.startswith("6 problems in fourfold plan\n")
    assert "devices = 0" in text
    assert "a unit behind the number, such as GB or GiB" in text
    assert 'try network="10 Gbit/s"' in text
    assert "a whole number from 1 to 8" in text
    assert "ask:a and ask:b" in text


@pytest.mark.parametrize("word", ["devices=8,", "devices=8,8", "memory=", "html="])
def test_a_list_has_different_values(word):
    with pytest.raises(SettingError, match="1 problem in fourfold plan"):
        parse_plan_words([word])


def test_a_word_with_several_values_is_a_list_where_its_commas_stand_between_values():
    words = ["lm", "devices=8,16", "zero=1,3", "length=128,256", "data=a,b.txt", "stages=3,2", "memory=80GiB"]
    words += ["lr_milestones=0.5,0.9", "dims=heads:tp,ff:tp"]
    arguments = parse_plan_words(words)
    found = listed(arguments)
    assert found == {"devices": ["8", "16"], "zero": ["1", "3"], "length": ["128", "256"]}
    with pytest.raises(SettingError, match="a value on both sides of each comma"):
        listed(parse_plan_words(["lm", "length=128,"]))
    many = parse_plan_words(["lm", "length=" + ",".join(map(str, range(65)))])
    with pytest.raises(SettingError, match=r"65 combinations +need at most 64"):
        listed(many)


def test_a_change_replaces_a_word():
    given = parse_plan_words(["lm", "devices=8,16", "length=128", "tp=2"])
    changed = given.with_changes({"devices": "16", "length": "256", "batch_size": "64"})
    assert changed.value("devices") == 16
    assert changed.run == Run("lm", texts={"tp": "2", "length": "256", "batch_size": "64"})


def test_a_plan_of_a_training_is_auto_or_a_file():
    assert resolve(["lm", "plan=auto"]).asks_plan
    assert not resolve(["lm", "plan.toml"]).asks_plan
    with pytest.raises(SettingError, match=r"plan = mine\.toml +need auto; .* try mine\.toml"):
        resolve(["plan=mine.toml"]).check()
