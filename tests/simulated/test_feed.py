"""Laws of a feed's state: what goes on from it has the batches that were left, or is refused."""

import io
import json
from itertools import chain

import pytest
import torch

import fourfold as ff
from fourfold.feed.feed import Position
from fourfold.words.errors import DataError


def numbers(length):
    return [(torch.tensor(float(number)), number) for number in range(length)]


def fed(length=20, *, batch_size=4, seed=0):
    return ff.Feed(numbers(length), batch_size=batch_size, seed=seed)


def targets(feed, count=None):
    found = []
    for batch in feed:
        found.append(batch[1].tolist())
        if len(found) == count:
            break
    return found


def through_json(state):
    return json.loads(json.dumps(state))


def through_torch(state):
    file = io.BytesIO()
    torch.save({"feed": state}, file)
    file.seek(0)
    return torch.load(file)["feed"]  # with weights_only, torch's default


@pytest.mark.parametrize("saved", [lambda state: state, tuple, through_json, through_torch, lambda state: state[:3]])
def test_a_state_goes_on_in_any_form_with_the_seed_it_was_made_with(saved):
    whole, first, second = fed(seed=3), fed(seed=3), fed(seed=5)
    expected = targets(whole) + targets(whole)
    begun = targets(first, 2)
    second.load(saved(first.state))
    assert begun + targets(second) + targets(second) == expected
    assert second.state == Position(3, 2, 0, 20)


def test_a_state_goes_on_with_another_batch_size():
    first, second = fed(), fed(batch_size=3)
    begun = targets(first, 2)
    second.load(first.state)
    assert sorted(chain(*begun, *targets(second))) == list(range(20))


def test_a_state_within_an_epoch_of_another_length_is_refused_and_changes_nothing():
    first, second = fed(20), fed(24)
    targets(first, 2)
    with pytest.raises(DataError, match=r"position 8 in an epoch of 20 samples, and a source of 24 now .* \(0, 1, 0\)"):
        second.load(first.state)
    assert second.state == Position(0, 0, 0, 24)
    targets(first)
    second.load(first.state)  # between epochs
    assert sorted(chain(*targets(second))) == list(range(24))


def test_a_source_that_grows_within_an_epoch_ends_the_loop_that_goes_on():
    source = numbers(20)
    feed = ff.Feed(source, batch_size=4)
    targets(feed, 2)
    source += numbers(4)
    with pytest.raises(DataError, match="position 8 in an epoch of 20 samples, and a source of 24 now"):
        targets(feed)


@pytest.mark.parametrize(("state", "said"), [
    ((0, -1, 4, 20), "epoch = -1"),
    ((2**64, 0, 4, 20), "seed = 18446744073709551616"),
    ((0, 0, -1, 20), "position -1"),
    ((0, 0, 20, 20), "position 20"),
    ((0, 0, 4.0, 20), "a state"),
    ((0, 0, 4, 20, 1), "a state"),
    ((0, 0), "a state"),
    (None, "a state None"),
    ("abc", "a state 'abc'"),
])  # fmt: skip
def test_what_is_no_state_is_refused(state, said):
    with pytest.raises(DataError, match=said):
        fed().load(state)
